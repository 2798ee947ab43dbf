"""The consumer on a scripted engine: when it asks, what it settles, and what it does when the engine says no."""

from __future__ import annotations

import asyncio
import logging

import pytest

from eventbus.errors import BusPaused, Unavailable
from eventbus.event import Event
from eventbus.transport import LeaseLost
from tests.unit.consumer_line import OTHER, QUEUE, Gate, fine, line
from tests.unit.scripted_engine import Waiting


async def test_everything_that_waits_is_handled_and_settled_once() -> None:
    async with line() as made:
        made.engine.fresh[QUEUE].extend(str(number) for number in range(50))
        made.start()
        await made.engine.until(lambda: len(made.engine.settled) == 50)
        assert sorted(made.engine.settled) == sorted((str(number), "done") for number in range(50))


async def test_an_empty_queue_is_not_asked_again_until_there_is_news_of_it() -> None:
    async with line() as made:
        made.add(OTHER, fine)
        made.start()
        await made.still()
        before = len(made.engine.order)
        await made.still()
        assert len(made.engine.order) == before
        made.consumer.wake([99])
        await made.still()
        assert len(made.engine.order) == before, "news of queues that are not ours"
        made.consumer.wake([OTHER])
        await made.still()
        assert made.engine.order[before:] == ["claim"]
        assert list(made.engine.rooms[-1]) == [OTHER]


async def test_news_that_arrive_while_the_engine_is_asked_are_not_lost() -> None:
    async with line() as made:
        gate = made.engine.hold("claim")
        made.start()
        await made.engine.called("claim")
        made.consumer.wake([QUEUE])
        gate.set()
        await made.engine.called("claim", 2)


async def test_a_queue_that_another_worker_was_claiming_from_is_asked_again() -> None:
    async with line() as made:
        made.engine.busy.append(True)
        made.engine.fresh[QUEUE].append("a")
        made.start()
        await made.engine.until(lambda: made.engine.settled == [("a", "done")])


async def test_a_retry_whose_storing_took_longer_than_its_wait_is_not_left_to_the_next_poll() -> None:
    tried = []

    async def fail_once(event: Event) -> None:
        tried.append(event.attempt)
        if event.attempt == 1:
            raise ValueError("no")

    async with line(fail_once) as made:
        made.engine.fresh[QUEUE].append("a")
        gate = made.engine.hold("settle")
        made.start()
        await made.engine.called("settle")
        await asyncio.sleep(0.1)  # longer than the wait of the policy
        gate.set()
        await made.engine.until(lambda: made.engine.settled == [("a", "retry"), ("a", "done")])
        assert tried == [1, 2]


async def test_leases_that_finish_together_are_settled_together() -> None:
    async with line(interval=0.05) as made:
        made.engine.exceptions[QUEUE].extend(Waiting(str(number)) for number in range(4))
        made.start()
        await made.engine.until(lambda: len(made.engine.settled) == 4)
        assert made.engine.batches == [4]


async def test_after_a_lost_reply_everything_that_the_database_says_we_hold_is_compared_before_the_next_claim() -> None:
    gate = Gate()
    async with line(gate.wait) as made:
        made.engine.fresh[QUEUE].append("a")
        made.start()
        await made.engine.until(lambda: gate.started)
        made.engine.failures["claim"].append(Unavailable("gone"))
        made.consumer.wake([QUEUE])
        await made.engine.called("look at everything")
        await made.still()
        recovery = made.engine.order[made.engine.order.index("recover") :]
        assert recovery[:3] == ["recover", "look at everything", "claim"]
        assert [lease.claim_id for lease in made.engine.known[-1]] == [1], "what runs is not to be given back"
        gate.open("a")
        await made.engine.until(lambda: made.engine.settled == [("a", "done")])


async def test_a_routine_doubt_is_resolved_at_the_next_look() -> None:
    async with line() as made:
        made.start()
        await made.still()
        made.consumer.doubt()
        made.consumer.wake([QUEUE])
        await made.engine.called("look")


async def test_a_worker_that_was_taken_over_settles_nothing_more_and_starts_anew() -> None:
    gate = Gate()
    async with line(gate.wait, slots=1) as made:
        made.engine.fresh[QUEUE].extend(["running", "waiting"])
        made.start()
        await made.engine.until(lambda: gate.started)
        made.consumer.orphan()
        await made.engine.called("register")
        assert not made.consumer.leases
        made.engine.fresh[QUEUE].append("new")
        made.consumer.wake([QUEUE])
        gate.open("running", "waiting", "new")
        await made.engine.until(lambda: made.engine.settled)
        assert made.engine.settled == [("new", "done")]
        assert gate.ended == ["running", "new"], "what had not started ran although it was lost"


async def test_a_claim_that_the_engine_refuses_tells_the_worker_that_it_was_taken_over() -> None:
    async with line() as made:
        made.engine.failures["claim"].append(LeaseLost())
        made.engine.fresh[QUEUE].append("a")
        made.start()
        await made.engine.until(lambda: made.engine.settled == [("a", "done")])
        assert made.engine.calls["register"] == 1


async def test_a_worker_that_cannot_register_anew_tries_until_it_can() -> None:
    async with line() as made:
        made.engine.failures["register"].append(Unavailable("gone"))
        made.start()
        await made.still()
        made.consumer.orphan()
        await made.engine.called("register", 2)
        assert made.engine.calls["recover"] == 1
        made.engine.fresh[QUEUE].append("a")
        made.consumer.wake([QUEUE])
        await made.engine.until(lambda: made.engine.settled == [("a", "done")])


async def test_outcomes_that_could_not_be_told_are_told_again_and_none_is_lost() -> None:
    async def fail(event: Event) -> None:
        if event.payload == "bad":
            raise ValueError("no")

    async with line(fail) as made:
        made.engine.failures["settle"].extend([Unavailable("gone"), Unavailable("gone")])
        made.engine.fresh[QUEUE].extend(["good", "bad"])
        made.start()
        await made.engine.until(lambda: len(made.engine.settled) >= 2)
        assert made.engine.settled[:2] == [("good", "done"), ("bad", "retry")]
        assert made.engine.calls["recover_settling"] == 2
        await made.engine.until(lambda: made.engine.settled[2:] == [("bad", "dead")])


async def test_a_lease_that_was_lost_is_told_and_not_settled_again(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    async with line(gate.wait) as made:
        made.engine.fresh[QUEUE].append("a")
        made.start()
        await made.engine.until(lambda: gate.started)
        made.engine.lost.extend(made.consumer.leases)
        with caplog.at_level(logging.WARNING, "eventbus"):
            gate.open("a")
            await made.engine.called("settle")
            await made.still()
        assert made.engine.settled == []
        assert not made.consumer.leases
        assert [record.message for record in caplog.records] == [
            "lost a lease while its events ran; they run again elsewhere"
        ]


async def test_what_is_done_in_a_claim_that_lasts_is_told_before_its_end() -> None:
    gate = Gate()
    async with line(gate.wait) as made:
        made.engine.fresh[QUEUE].extend(["long", "short"])
        made.start()
        gate.open("short")
        await made.engine.until(lambda: made.engine.settled == [("short", "done")])
        assert gate.ended == ["short"]
        gate.open("long")
        await made.engine.until(lambda: made.engine.settled[1:] == [("long", "done")])


async def test_no_more_payload_is_held_than_the_limit_says() -> None:
    gate = Gate()
    async with line(gate.wait, slots=2, prefetch_bytes=100) as made:
        made.engine.fresh[QUEUE].extend(["x" * 70, "y" * 20, "z" * 50])
        made.start()
        await made.engine.until(lambda: len(gate.started) == 2)
        await made.still()
        assert made.engine.budgets[0] == 100
        gate.open("x" * 70, "y" * 20, "z" * 50)
        await made.engine.until(lambda: len(made.engine.settled) == 3)
        await made.still()
        made.consumer.wake([QUEUE])
        await made.still()
        assert made.engine.budgets[-1] == 100, "settled payloads still count"


async def test_nothing_is_asked_while_the_limit_of_payload_is_reached() -> None:
    gate = Gate()
    async with line(gate.wait, slots=1, prefetch_bytes=50) as made:
        made.engine.fresh[QUEUE].append("x" * 60)
        made.start()
        await made.engine.until(lambda: gate.started)
        await made.still()
        before = made.engine.calls["claim"]
        made.consumer.wake([QUEUE])
        await made.still()
        assert made.engine.calls["claim"] == before
        gate.open("x" * 60)
        await made.engine.called("claim", before + 1)


async def test_a_paused_bus_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventbus.consuming.fetching._PAUSED_POLL", 0.01)
    async with line() as made:
        made.engine.failures["claim"].append(BusPaused())
        made.engine.fresh[QUEUE].append("a")
        made.start()
        await made.engine.until(lambda: made.engine.settled == [("a", "done")])


async def test_what_ran_when_a_worker_died_runs_with_nothing_beside_it() -> None:
    gate = Gate()
    async with line(gate.wait) as made:
        made.engine.fresh[QUEUE].append("before")
        made.start()
        await made.engine.until(lambda: gate.started == ["before"])
        made.engine.exceptions[QUEUE].append(Waiting("suspect", crashes=1))
        made.consumer.wake()
        await made.still()
        made.engine.fresh[QUEUE].append("after")
        made.consumer.wake([QUEUE])
        await made.still()
        assert gate.started == ["before"]
        gate.open("before")
        await made.engine.until(lambda: gate.started == ["before", "suspect"])
        await made.still()
        assert gate.started == ["before", "suspect"]
        gate.open("suspect")
        await made.engine.until(lambda: gate.started == ["before", "suspect", "after"])
        gate.open("after")


async def test_a_handler_that_never_ends_does_not_keep_all_others_waiting_for_one_that_must_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eventbus.consuming.solitude._FIRST_PATIENCE", 0.05)
    gate = Gate()
    async with line(gate.wait) as made:
        made.engine.fresh[QUEUE].append("endless")
        made.start()
        await made.engine.until(lambda: gate.started == ["endless"])
        made.engine.exceptions[QUEUE].append(Waiting("suspect", crashes=1))
        made.engine.fresh[QUEUE].extend(["next", "one more"])
        gate.open("next", "one more", "suspect")
        made.consumer.wake()
        await made.engine.until(lambda: len(made.engine.settled) == 2)
        assert sorted(gate.ended) == ["next", "one more"]
        assert "suspect" not in gate.started
        gate.open("endless")
        await made.engine.until(lambda: len(made.engine.settled) == 4)
        assert gate.started[-1] == "suspect"


async def test_a_stop_gives_back_what_has_not_started_while_the_rest_runs_on() -> None:
    gate = Gate()
    async with line(gate.wait, slots=1) as made:
        made.engine.fresh[QUEUE].extend(["running", "waiting"])
        made.start()
        await made.engine.until(lambda: gate.started == ["running"])
        stopping = asyncio.create_task(made.stop())
        await made.engine.until(lambda: made.engine.settled == [("waiting", "released")])
        assert not stopping.done()
        gate.open("running")
        await stopping
        assert made.engine.settled[1:] == [("running", "done")]


async def test_a_claim_that_is_under_way_at_a_stop_is_given_back_and_not_left_to_expire() -> None:
    gate = Gate()
    async with line(gate.wait) as made:
        made.engine.fresh[QUEUE].extend(["late", "later"])
        arriving = made.engine.hold("claim")
        made.start()
        await made.engine.called("claim")
        stopping = asyncio.create_task(made.stop())
        for _ in range(20):
            await asyncio.sleep(0.01)
        arriving.set()
        await stopping
        assert made.engine.settled == [("late", "released"), ("later", "released")]
        assert not gate.started


async def test_a_handler_that_outlasts_the_stop_is_cancelled_and_its_event_released() -> None:
    gate = Gate()
    async with line(gate.wait, slots=2) as made:
        made.engine.fresh[QUEUE].extend(["a", "b"])
        made.engine.exceptions[QUEUE].append(Waiting("c"))
        made.start()
        await made.engine.until(lambda: len(gate.started) == 2)
        await made.stop(0.0)
        assert {outcome for _, outcome in made.engine.settled} == {"released"}
        assert {payload for payload, _ in made.engine.settled} == set("abc") - set(made.engine.fresh[QUEUE])
        assert sorted(gate.cancelled) == sorted(gate.started)
        assert not gate.ended


async def test_a_handler_that_swallows_its_cancellation_loses_its_event_at_a_stop() -> None:
    began, free = asyncio.Event(), asyncio.Event()

    async def stubborn(event: Event) -> None:
        began.set()
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue

    async with line(stubborn) as made:
        made.engine.fresh[QUEUE].append("a")
        made.start()
        await began.wait()
        await made.stop(0.0)
        assert made.engine.settled == [("a", "released")]
        free.set()
        await made.still()
        assert made.engine.settled == [("a", "released")], "it was told twice what became of it"


async def test_quiet_means_that_nothing_is_held_and_nothing_waits() -> None:
    gate = Gate()
    async with line(gate.wait) as made:
        made.engine.exceptions[QUEUE].append(Waiting("later", due_at=asyncio.get_running_loop().time() + 0.2))
        made.engine.fresh[QUEUE].append("now")
        made.start()
        assert not made.consumer.quiet
        await made.engine.until(lambda: gate.started == ["now"])
        assert not made.consumer.quiet
        gate.open("now", "later")
        await made.engine.until(lambda: made.engine.settled == [("now", "done")])
        await made.still()
        assert not made.consumer.quiet, "a retry waits"
        await made.engine.until(lambda: len(made.engine.settled) == 2)
        await made.still()
        assert made.consumer.quiet


async def test_a_queue_is_not_starved_by_another_whose_handlers_are_all_busy() -> None:
    gate = Gate()
    async with line(gate.wait, slots=1) as made:
        made.add(OTHER, fine)
        made.engine.fresh[QUEUE].extend(str(number) for number in range(10))
        made.start()
        await made.engine.until(lambda: gate.started)
        made.engine.fresh[OTHER].append("other")
        made.consumer.wake([OTHER])
        await made.engine.until(lambda: made.engine.settled == [("other", "done")])
        gate.open(*(str(number) for number in range(10)))
        await made.engine.until(lambda: len(made.engine.settled) == 11)
