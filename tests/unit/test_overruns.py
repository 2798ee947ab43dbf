"""Handlers that outlast their timeout: they cost their slot, but neither the capacity nor a second run of the event."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from eventbus.consuming import execution, overruns
from eventbus.event import Event
from eventbus.transport import RELEASED, Verdict
from tests.unit.offered import Finished, deliveries, runner, until


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "STUBBORN", 0.05)


class Hanging:
    """Handlers of both kinds that hang with the numbers up to ``hanging`` until they are let go."""

    def __init__(self, hanging: int) -> None:
        self.hanging = hanging
        self.free = threading.Event()
        self.runs: Counter[int] = Counter()

    def in_a_thread(self, event: Event) -> None:
        """A plain handler."""
        self.runs[event.payload] += 1
        if event.payload <= self.hanging:
            assert self.free.wait(20)

    async def on_the_loop(self, event: Event) -> None:
        """An async handler that swallows its cancellation."""
        self.runs[event.payload] += 1
        if event.payload <= self.hanging:
            while not self.free.is_set():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue

    def returned(self, event: Event) -> Any:
        """A plain handler that returns such a coroutine."""
        return self.on_the_loop(event)


KINDS = ["in_a_thread", "on_the_loop"]


@pytest.mark.parametrize("kind", [*KINDS, "returned"])
async def test_good_events_are_handled_although_more_handlers_hang_than_there_are_slots(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, finish = Hanging(6), Finished()
    slots = runner(getattr(hanging, kind), 2, finish, timeout=0.1)
    given = deliveries(16)
    slots.offer(given)
    await finish.wait_for(10)
    assert sorted(finish.outcomes) == [(number, "done") for number in range(7, 17)]
    await until(lambda: slots.running == 0)
    assert slots.waiting == 0
    reports = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(reports) == 6
    said = reports[0].__dict__
    assert (said["queue"], said["seconds"], said["event_ids"]) == ("tests", 0.1, [str(given[0].event.event_id)])  # type: ignore[union-attr]
    assert said["where"].startswith("thread tests-" if kind == "in_a_thread" else "task ")
    hanging.free.set()
    await finish.wait_for(16)
    slots.close()


@pytest.mark.parametrize("kind", [*KINDS, "returned"])
async def test_the_event_of_a_hanging_handler_has_no_verdict_before_it_ends_and_then_that_of_the_timeout(
    kind: str,
) -> None:
    hanging, finish = Hanging(1), Finished()
    slots = runner(getattr(hanging, kind), 1, finish, timeout=0.05)
    slots.offer(deliveries(3))
    await finish.wait_for(2)
    assert sorted(seq for seq, _ in finish.verdicts) == [2, 3]
    await until(lambda: slots.running == 0)
    hanging.free.set()
    await finish.wait_for(3)
    seq, verdict = finish.verdicts[-1]
    assert (seq, verdict.outcome) == (1, "retry")
    assert verdict.error is not None
    assert (verdict.error["type"], hanging.runs[1]) == ("TimeoutError", 1)
    assert "longer than its timeout of 0.05 s" in verdict.error["message"]
    slots.offer(deliveries(3)[1:])
    await finish.wait_for(5)
    assert (slots.running, replaced(slots)) == (0, 0)
    slots.close()


def replaced(slots: Any) -> int:
    """How many slots the runner believes to be replaced."""
    count: int = slots._overruns.replaced
    return count


@pytest.mark.parametrize("kind", [*KINDS, "returned"])
async def test_a_slot_that_is_replaced_is_news_for_the_consumer_so_that_it_claims_more_at_once(kind: str) -> None:
    hanging, finish, news = Hanging(2), Finished(), asyncio.Event()
    slots = runner(getattr(hanging, kind), 1, finish, timeout=0.05)
    slots.made_room = news.set
    slots.offer(deliveries(1))
    async with asyncio.timeout(5):
        await news.wait()
    hanging.free.set()
    await finish.wait_for(1)
    slots.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_slot_whose_handler_comes_back_is_not_one_too_many(kind: str) -> None:
    hanging, finish = Hanging(3), Finished()
    slots = runner(getattr(hanging, kind), 2, finish, timeout=0.05)
    slots.offer(deliveries(4))
    await finish.wait_for(1)
    hanging.free.set()
    await finish.wait_for(4)
    most = Counter[str]()
    most_at_once = await at_once(slots, finish, hanging, most)
    assert most_at_once == 2
    slots.close()


async def at_once(slots: Any, finish: Finished, hanging: Hanging, most: Counter[str]) -> int:
    """How many of ten deliveries the slots have running at the same time."""
    hanging.free.clear()
    hanging.hanging = 100
    before = len(finish.verdicts)
    started = sum(hanging.runs.values())
    slots.offer(deliveries(10))
    await until(lambda: sum(hanging.runs.values()) >= started + 2)
    running = int(slots.running)
    hanging.free.set()
    await finish.wait_for(before + 10)
    return running


@pytest.mark.parametrize("kind", KINDS)
async def test_after_a_hundred_no_more_slots_are_replaced_and_one_line_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(overruns, "MOST_REPLACED", 3)
    hanging, finish = Hanging(6), Finished()
    slots = runner(getattr(hanging, kind), 2, finish, timeout=0.05)
    slots.offer(deliveries(8))
    await until(lambda: sum(record.levelno == logging.ERROR for record in caplog.records) == 5)
    assert [record.levelno for record in caplog.records].count(logging.CRITICAL) == 1
    assert (slots.running, slots.waiting, finish.verdicts) == (2, 3, [])
    hanging.free.set()
    await finish.wait_for(8)
    assert sorted(finish.outcomes) == [(number, "retry" if number <= 5 else "done") for number in range(1, 9)]
    assert slots.running == 0
    slots.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_what_has_not_started_can_be_taken_back_while_handlers_hang(kind: str) -> None:
    hanging, finish = Hanging(10), Finished()
    slots = runner(getattr(hanging, kind), 1, finish, timeout=0.05)
    given = deliveries(20)
    slots.offer(given)
    await until(lambda: hanging.runs[2] == 1)
    taken = slots.withdraw()
    assert taken == given[-len(taken) :]
    assert slots.waiting == 0
    await until(lambda: slots.running == 0)
    hanging.free.set()
    await finish.wait_for(20 - len(taken))
    slots.close()


async def test_threads_whose_handlers_come_back_end_and_the_others_end_with_the_queue() -> None:
    before = set(threading.enumerate())
    hanging, finish = Hanging(3), Finished()
    slots = runner(hanging.in_a_thread, 1, finish, timeout=0.05)
    slots.offer(deliveries(4))
    await finish.wait_for(1)
    made = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("tests-")]
    assert len(made) == 4
    assert len({thread.name for thread in made}) == 4
    slots.close()
    hanging.free.set()
    await finish.wait_for(4)
    for thread in made:
        thread.join(5)
    assert not any(thread.is_alive() for thread in made)


async def test_a_hanging_task_that_gives_up_in_a_stop_has_failed_and_not_been_released(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stopped = asyncio.Event()

    async def handle(event: Event) -> None:
        while not stopped.is_set():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    finish = Finished()
    slots = runner(handle, 1, finish, timeout=0.05)
    slots.offer(deliveries(1))
    await until(lambda: any(record.levelno == logging.ERROR for record in caplog.records))
    assert slots.running == 0
    stopped.set()
    slots.abort()
    await finish.wait_for(1)
    assert finish.outcomes == [(1, "retry")]


async def test_a_handler_that_ends_in_time_is_never_reported(caplog: pytest.LogCaptureFixture) -> None:
    def handle(event: Event) -> None:
        threading.Event().wait(0.03)

    finish = Finished()
    slots = runner(handle, 2, finish, timeout=5)
    slots.offer(deliveries(10))
    await finish.wait_for(10)
    assert caplog.records == []
    assert {verdict for _, verdict in finish.verdicts} == {Verdict("done")}
    slots.close()


def fails_late(event: Event) -> None:
    threading.Event().wait(0.1)
    raise LookupError("no row")


def gives_up_late(event: Event) -> Any:
    threading.Event().wait(0.1)
    return RELEASED


@pytest.mark.parametrize("handler", [fails_late, gives_up_late])
async def test_whatever_a_handler_does_after_its_timeout_it_has_failed_with_the_timeout(
    handler: Callable[..., Any],
) -> None:
    finish = Finished()
    slots = runner(handler, 1, finish, timeout=0.02)
    slots.offer(deliveries(1))
    await finish.wait_for(1)
    verdict = finish.verdicts[0][1]
    assert verdict.error is not None
    assert (verdict.outcome, verdict.error["type"]) == ("retry", "TimeoutError")
    assert ("LookupError: no row" in verdict.error["traceback"]) is (handler is fails_late)
    slots.close()
