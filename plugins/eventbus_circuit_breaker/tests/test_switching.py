from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from pydantic import ValidationError

from eventbus import signals
from eventbus.errors import ConfigurationError, PayloadMismatch, Unavailable
from eventbus.plugins import Failure, Postpone
from eventbus.testing.plugins import PluginBench
from eventbus.testing.values import new_event, new_failure, new_queue, new_result
from eventbus.testing.workers import BenchWorker
from eventbus_circuit_breaker import closed, opened
from eventbus_circuit_breaker.options import Options
from eventbus_circuit_breaker.plugin import CircuitBreaker
from eventbus_circuit_breaker.tests.failing import failure

LATER = float("inf")
OPENED, PROBED, CLOSED = [("opened", 30.0, 1)], [("opened", 60.0, 2)], [(95.0, 2)]


class Play:
    """The plugin with a worker that remembers what it is asked to do."""

    def __init__(self, **settings: Any) -> None:
        self.bench = PluginBench(CircuitBreaker, settings)
        self.worker = BenchWorker([new_queue("q"), new_queue("other")])
        self.bench.call("eventbus_worker_ready", worker=self.worker)

    def fail(self, times: int, **how: Any) -> list[Postpone | None]:
        return [self.failed(failure(began=LATER, **how)) for _ in range(times)]

    def failed(self, what: Failure) -> Postpone | None:
        self.worker.handled["q"] = self.worker.finished("q") + 1
        answer: Postpone | None = self.bench.call("eventbus_handler_failed", queue="q", failure=what)
        return answer

    def settle(self, *results: Any) -> None:
        for result in results:
            self.bench.call("eventbus_probed", queue="q", result=result)

    async def carry_out(self) -> None:
        """Everything that was begun in the background."""
        while self.worker.begun:
            _, action = self.worker.begun.popitem()
            await action()

    async def open(self) -> None:
        self.fail(5)
        self.worker.answers.append(OPENED)
        await self.carry_out()

    def asked(self, name: str) -> list[tuple[Any, ...]]:
        return [request for request in self.worker.requests if request[0] == name]

    def end(self) -> None:
        self.bench.call("eventbus_worker_stopped", worker=self.worker, code=0)


@pytest.fixture
def play() -> Iterator[Play]:
    play = Play()
    yield play
    play.end()


async def test_the_fifth_failure_holds_the_queue_here_at_once_and_pauses_it_for_everybody(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[dict[str, Any]] = []
    opened.connect(hear := lambda _, **what: heard.append(what))
    try:
        assert play.fail(4) == [None] * 4
        assert play.worker.requests == []
        assert play.fail(1) == [None]
        [(_, queue, seconds)] = play.asked("hold")
        assert queue == "q"
        assert seconds >= 30
        play.worker.answers.append(OPENED)
        await play.carry_out()
    finally:
        opened.disconnect(hear)
    [(statement, parameters)] = play.worker.statements
    assert "circuit_breaker_open" in statement
    assert parameters[:4] == ("q", None, "5 failures in a row", "OSError: no route")
    assert play.worker.requests[-2:] == [("hold", "q", 0), ("wake", "q")]
    assert "queue q is paused for 30 s (5 failures in a row; OSError: no route)" in caplog.text
    assert heard == [
        {"queue": "q", "seconds": 30.0, "trips": 1, "reason": "5 failures in a row", "error": "OSError: no route"}
    ]


async def test_what_another_process_has_opened_is_neither_logged_nor_announced(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    play.fail(5)
    play.worker.answers.append([("open", 12.0, 1)])
    await play.carry_out()
    assert caplog.text == ""
    [late] = play.fail(1, probe=False)
    assert late is None  # it began after that, so that somebody has closed it
    assert play.worker.requests[-2:] == [("hold", "q", 0), ("wake", "q")]


async def test_a_call_that_was_running_gets_the_chance_to_prove_that_the_handler_works(play: Play) -> None:
    play.worker.pools["q"] = (3, 10)
    play.fail(5)
    working = asyncio.ensure_future(play.carry_out())
    await asyncio.sleep(0.02)
    assert play.worker.statements == []
    play.worker.handled["q"] += 1
    await working
    assert play.worker.statements == []
    assert play.worker.requests[-2:] == [("hold", "q", 0), ("wake", "q")]


async def test_calls_that_were_running_and_fail_too_open_it_and_lose_no_attempt(play: Play) -> None:
    play.worker.pools["q"] = (1, 10)
    play.fail(5)
    working = asyncio.ensure_future(play.carry_out())
    await asyncio.sleep(0.02)
    [late] = play.fail(1)
    assert late is not None
    assert 30 <= late.seconds <= 33
    play.worker.answers.append(OPENED)
    play.worker.pools["q"] = (0, 10)
    await working
    assert len(play.worker.statements) == 1


async def test_stragglers_come_back_after_the_pause(play: Play) -> None:
    await play.open()
    late = play.failed(failure(began=0.0))
    assert late is not None
    assert 29 < late.seconds <= 33


async def test_a_failed_probe_opens_it_longer_and_is_not_freed(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    await play.open()
    event = new_event(queue="q")
    probe = new_failure(OSError("still"), event=event, queue="q", probe=True)
    answer = play.failed(probe)
    assert answer is not None
    assert 59 < answer.seconds <= 66
    play.worker.answers.append(PROBED)
    await play.carry_out()
    assert play.worker.statements[-1][1][1] > 0  # how long the probe ran
    assert "paused for 60 s (the probe failed; OSError: still)" in caplog.text
    play.settle(new_result("deferred", event=event, queue="q", probe=True))
    await play.carry_out()
    assert play.asked("free_probe") == []


@pytest.mark.parametrize("outcome", ["done", "discarded"])
async def test_a_successful_probe_closes_it(play: Play, outcome: Any, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[dict[str, Any]] = []
    closed.connect(hear := lambda _, **what: heard.append(what))
    try:
        await play.open()
        play.worker.answers.append(CLOSED)
        play.settle(new_result(outcome, queue="q", probe=True))
        await play.carry_out()
    finally:
        closed.disconnect(hear)
    assert "circuit_breaker_close" in play.worker.statements[-1][0]
    assert "queue q goes on after 95 s" in caplog.text
    assert heard == [{"queue": "q", "seconds": 95.0, "trips": 2}]
    assert play.failed(failure(began=0.0)) is None
    assert play.fail(4) == [None] * 4


@pytest.mark.parametrize("outcome", ["duplicate", "released", "parked", "deferred", "dead", "retry"])
async def test_a_probe_that_told_nothing_lets_another_event_try(outcome: Any) -> None:
    play = Play(first_pause=0.1)
    play.settle(new_result(outcome, queue="q", probe=True))
    await play.carry_out()
    assert play.asked("free_probe") == [("free_probe", "q", "circuit_breaker")]
    assert play.worker.statements == []


@pytest.mark.parametrize("error", [Unavailable("away"), psycopg.errors.UndefinedFunction("missing")])
async def test_a_database_that_refuses_costs_one_line_and_the_queue_stands_here_for_the_pause(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    play = Play(first_pause=0.05, longest_pause=0.05)
    play.fail(5)
    play.worker.answers += [error] * 20
    await play.carry_out()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "the database does not answer" in caplog.text
    assert play.worker.requests[-2:] == [("hold", "q", 0), ("wake", "q")]
    assert play.fail(5)[:4] == [None] * 4
    play.worker.answers[:] = [OPENED]
    await play.carry_out()
    assert play.worker.statements[-1][1][2] == "5 failures in a row"
    play.end()


async def test_an_outage_that_ends_in_time_opens_it_after_all(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventbus_circuit_breaker.switching._AGAIN", 0.001)
    play.fail(5)
    play.worker.answers += [Unavailable("away"), Unavailable("away"), OPENED]
    await play.carry_out()
    assert len(play.worker.statements) == 3
    assert play.failed(failure(began=0.0)) is not None


async def test_a_pause_that_another_process_has_begun_is_looked_at(play: Play) -> None:
    signals.send(signals.queue_paused, None, queue="q", seconds=20.0)
    play.worker.answers.append([(20.0, 1)])
    await play.carry_out()
    late = play.failed(failure(began=0.0))
    assert late is not None
    assert 19 < late.seconds < 24


async def test_an_opening_after_one_that_is_over_is_looked_at_too_and_one_that_is_known_is_not(play: Play) -> None:
    for seconds in (0.0, 20.0, 20.0):
        signals.send(signals.queue_paused, None, queue="q", seconds=20.0)
        play.worker.answers.append([(seconds, 1)])
        await play.carry_out()
    assert len(play.worker.statements) == 2


async def test_a_pause_by_hand_is_no_reason_to_spare_attempts(play: Play) -> None:
    signals.send(signals.queue_paused, None, queue="q", seconds=None)
    await play.carry_out()
    assert play.failed(failure(began=0.0)) is None


async def test_a_worker_that_has_stopped_hears_of_no_pauses() -> None:
    before = len(signals.queue_paused.receivers)
    play = Play()
    assert len(signals.queue_paused.receivers) == before + 1
    play.end()
    assert len(signals.queue_paused.receivers) == before
    signals.send(signals.queue_paused, None, queue="q", seconds=20.0)
    assert play.worker.begun == {}
    assert play.failed(failure()) is None


async def test_a_stop_does_not_wait_for_calls_that_still_run(play: Play) -> None:
    play.worker.pools["q"] = (3, 10)
    play.fail(5)
    play.bench.call("eventbus_worker_draining", worker=play.worker)
    await asyncio.wait_for(play.carry_out(), 1)
    assert play.worker.statements == []


def bad_payload() -> ValidationError:
    from pydantic import TypeAdapter

    try:
        TypeAdapter(int).validate_python("no number")
    except ValidationError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "harmless", [new_failure(PayloadMismatch("no"), queue="q", started_at=LATER),
        new_failure(bad_payload(), queue="q", started_at=LATER),
                 new_failure(None, outcome="dead", queue="q", started_at=LATER)]
)  # fmt: skip
async def test_bad_payloads_and_events_given_up_on_purpose_do_not_count(play: Play, harmless: Failure) -> None:
    assert [play.failed(harmless) for _ in range(20)] == [None] * 20
    assert play.worker.requests == []


async def test_a_handler_that_asks_for_retries_counts(play: Play) -> None:
    for _ in range(5):
        play.failed(new_failure(None, queue="q", started_at=LATER))
    assert len(play.asked("hold")) == 1


def only_timeouts(failed: Failure) -> bool:
    return isinstance(failed.error, TimeoutError)


@pytest.mark.parametrize("counts", [only_timeouts, "eventbus_circuit_breaker.tests.test_switching:only_timeouts"])
async def test_a_program_may_say_what_counts(counts: Any) -> None:
    play = Play(counts=counts)
    play.fail(10, error=OSError("no"))
    assert play.asked("hold") == []
    play.fail(5, error=TimeoutError("late"))
    assert len(play.asked("hold")) == 1
    play.end()


@pytest.mark.parametrize(
    "settings",
    [{"failures": 0}, {"ratio": 2}, {"first_pause": 60, "longest_pause": 30}, {"counts": "nowhere:at_all"},
     {"counts": "os:sep"}, {"threshold": 5}],
)  # fmt: skip
def test_settings_that_cannot_work_stop_the_start(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        PluginBench(CircuitBreaker, settings)


async def test_a_share_of_failures_opens_it_at_once() -> None:
    play = Play(failures=1_000, ratio=0.5, least_calls=10)
    for _ in range(4):
        play.worker.handled["q"] = play.worker.finished("q") + 1
        play.fail(1)
    assert play.asked("hold") == []
    play.worker.handled["q"] += 1
    play.fail(1)
    play.worker.answers.append(OPENED)
    await play.carry_out()
    assert play.worker.statements[0][1][2] == "5 of 10 calls failed within 60 s"
    play.end()


async def test_looking_around_once_in_a_while_tells_when_calls_succeeded(play: Play) -> None:
    play.worker.handled["q"] = 100
    [look] = play.worker.repeated.values()
    await look()
    now = time.monotonic()
    for _ in range(5):
        play.failed(failure(began=0.0))  # slow ones, that had begun before the successes
    assert play.asked("hold") == []
    for _ in range(5):
        play.failed(failure(began=now))
    assert len(play.asked("hold")) == 1


async def test_an_error_with_control_characters_or_that_cannot_be_shown_is_told_all_the_same(play: Play) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise ValueError("not this one")

    play.fail(4)
    play.fail(1, error=Unspeakable())
    play.worker.answers.append(OPENED)
    await play.carry_out()
    assert play.worker.statements[0][1][3] == "Unspeakable"
    play.bench.call("eventbus_probed", queue="q", result=new_result("done", probe=True))
    play.worker.answers.append(CLOSED)
    await play.carry_out()
    play.fail(5, error=OSError("a\0b\n" + "c" * 1_000))
    play.worker.answers.append(OPENED)
    await play.carry_out()
    assert play.worker.statements[-1][1][3] == f"OSError: a b {'c' * 1_000}"[:300]


async def test_one_probe_after_the_other_that_tells_nothing_is_not_a_handler_that_is_called_all_the_time() -> None:
    play, began = Play(first_pause=0.3), time.monotonic()
    play.settle(new_result("dead", queue="q", probe=True))
    await play.carry_out()
    assert play.asked("free_probe")
    assert time.monotonic() - began > 0.29


def test_a_predicate_that_fails_counts_as_if_there_were_none(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_failure: Failure) -> bool:
        raise KeyError("predicate")

    plugin = CircuitBreaker(Options().model_copy(update={"counts": broken}))
    assert plugin._counted(new_failure(OSError("away")))
    assert not plugin._counted(new_failure(PayloadMismatch("no")))
    assert caplog.text.count("the function counts failed") == 1


def test_an_async_predicate_is_refused() -> None:
    async def late(_failure: Failure) -> bool:
        return True

    with pytest.raises(ValidationError, match="async function"):
        Options.model_validate({"counts": late})
