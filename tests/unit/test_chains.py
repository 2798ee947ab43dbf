"""Events of one key in one process: one after the other, and what follows stops where one is not done."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from eventbus.consuming.pace import Pace
from eventbus.event import Event
from eventbus.transport import DeadLetter
from tests.unit.consumer_line import OTHER, QUEUE, Gate, fine, line
from tests.unit.scripted_engine import Waiting


class Unlucky(Gate):
    """Lets events through that it is told to, and fails with some of them."""

    def __init__(self, *failing: str, give_up: bool = False) -> None:
        super().__init__()
        self._failing = failing
        self._give_up = give_up

    async def handle(self, event: Event) -> DeadLetter | None:
        """Handle an event."""
        await self.wait(event)
        if event.payload not in self._failing:
            return None
        if self._give_up:
            return DeadLetter("no use")
        raise ValueError(event.payload)


async def test_an_event_starts_when_the_one_before_it_in_its_key_is_done_and_other_keys_do_not_wait() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        made.engine.fresh[QUEUE].extend(["a1", "a2", "b1", "a3"])
        made.start()
        await made.engine.until(lambda: len(gate.started) == 2)
        await made.still()
        assert sorted(gate.started) == ["a1", "b1"]
        gate.open("a2", "a3", "a1")
        await made.engine.until(lambda: "a3" in gate.ended)
        assert [payload for payload in gate.ended if payload[0] == "a"] == ["a1", "a2", "a3"]
        gate.open("b1")
        await made.engine.until(lambda: len(made.engine.settled) == 4)
        assert {outcome for _, outcome in made.engine.settled} == {"done"}
        assert made.consumer.queues[QUEUE].waiting == 0


@pytest.mark.parametrize("give_up", [False, True])
async def test_what_follows_an_event_that_is_not_done_does_not_start(give_up: bool) -> None:
    handler = Unlucky("a1", give_up=give_up)
    async with line(handler.handle, ordered=True) as made:
        made.engine.fresh[QUEUE].extend(["a1", "a2", "b1", "a3"])
        handler.open("a1", "b1")
        made.start()
        await made.engine.until(lambda: len(made.engine.settled) == 4)
        outcome = "dead" if give_up else "retry"
        assert made.engine.settled == [("a1", outcome), ("a2", "parked"), ("b1", "done"), ("a3", "parked")]
        assert handler.started[:2] == ["a1", "b1"]
        assert not {"a2", "a3"} & set(handler.started)
        assert made.consumer.queues[QUEUE].behind == 0


async def test_where_dead_letters_are_skipped_what_follows_one_starts() -> None:
    handler = Unlucky("a1", give_up=True)
    async with line(handler.handle, ordered=True, when_exhausted="skip") as made:
        made.engine.fresh[QUEUE].extend(["a1", "a2"])
        handler.open("a1", "a2")
        made.start()
        await made.engine.until(lambda: len(made.engine.settled) == 2)
        assert sorted(made.engine.settled) == [("a1", "dead"), ("a2", "done")]


async def test_where_dead_letters_are_skipped_what_follows_a_retry_does_not_start() -> None:
    handler = Unlucky("a1")
    async with line(handler.handle, ordered=True, when_exhausted="skip") as made:
        made.engine.fresh[QUEUE].extend(["a1", "a2"])
        handler.open("a1")
        made.start()
        await made.engine.until(lambda: len(made.engine.settled) >= 2)
        assert made.engine.settled[:2] == [("a1", "retry"), ("a2", "parked")]


async def test_retries_of_one_key_run_one_after_the_other_and_are_parked_when_the_first_fails_again() -> None:
    handler = Unlucky("a2")
    async with line(handler.handle, ordered=True) as made:
        made.engine.exceptions[QUEUE].extend([Waiting("a1"), Waiting("a2", attempts=1), Waiting("a3")])
        handler.open("a1", "a2")
        made.start()
        await made.engine.until(lambda: len(made.engine.settled) == 3)
        assert dict(made.engine.settled) == {"a1": "done", "a2": "dead", "a3": "parked"}
        assert handler.started == ["a1", "a2"]


async def test_what_waits_behind_another_event_counts_as_waiting_so_that_not_more_is_claimed_than_fits() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True, slots=2) as made:
        made.engine.fresh[QUEUE].extend(f"a{number}" for number in range(40))
        made.start()
        await made.engine.until(lambda: gate.started == ["a0"])
        await made.still()
        claimed = 40 - len(made.engine.fresh[QUEUE])
        assert made.consumer.queues[QUEUE].waiting == claimed - 1
        gate.open(*(f"a{number}" for number in range(40)))
        await made.engine.until(lambda: len(made.engine.settled) == 40)
        assert gate.ended == [f"a{number}" for number in range(40)]
        assert made.consumer.queues[QUEUE].waiting == 0


async def test_a_stop_gives_back_all_that_has_not_started_in_order_and_starts_nothing_that_follows() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True, slots=1) as made:
        made.consumer.queues[QUEUE].pace = Pace(5, 1_000, time.monotonic())
        made.engine.fresh[QUEUE].extend(["a1", "b1", "b2", "a2", "a3"])
        made.start()
        await made.engine.until(lambda: gate.started == ["a1"])
        stopping = asyncio.create_task(made.stop())
        await made.engine.until(lambda: made.engine.detached)
        assert made.engine.settled == [("b1", "released"), ("b2", "released")]
        assert made.engine.detached == [{"a1"}]
        assert made.engine.returned == ["a2", "a3"]
        gate.open("a1")
        await stopping
        assert made.engine.settled[2:] == [("a1", "done")]
        assert gate.started == ["a1"]


async def test_a_stop_releases_retries_of_one_key_in_order() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True, slots=1) as made:
        made.consumer.queues[QUEUE].pace = Pace(4, 1_000, time.monotonic())
        made.engine.exceptions[QUEUE].extend(map(Waiting, ["a1", "b1", "b2", "a2"]))
        made.start()
        await made.engine.until(lambda: gate.started == ["a1"])
        stopping = asyncio.create_task(made.stop())
        await made.engine.until(lambda: made.engine.settled)
        assert made.engine.settled == [("b1", "released"), ("b2", "released")]
        gate.open("a1")
        await stopping
        assert sorted(made.engine.settled[2:]) == [("a1", "done"), ("a2", "parked")]
        assert gate.started == ["a1"]


async def test_a_claim_that_arrives_during_a_stop_is_given_back_with_all_that_follows() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        made.engine.fresh[QUEUE].extend(["a1", "a2", "b1"])
        arriving = made.engine.hold("claim")
        made.start()
        await made.engine.called("claim")
        stopping = asyncio.create_task(made.stop())
        await made.still()
        arriving.set()
        await stopping
        assert made.engine.settled == [("a1", "released"), ("a2", "released"), ("b1", "released")]
        assert not gate.started


async def test_a_worker_that_was_taken_over_starts_nothing_that_follows_what_it_runs() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        made.engine.fresh[QUEUE].extend(["a1", "a2"])
        made.start()
        await made.engine.until(lambda: gate.started == ["a1"])
        made.consumer.orphan()
        await made.engine.called("register")
        gate.open("a1", "a2", "b1")
        made.engine.fresh[QUEUE].append("b1")
        made.consumer.wake([QUEUE])
        await made.engine.until(lambda: made.engine.settled)
        assert made.engine.settled == [("b1", "done")]
        assert gate.started == ["a1", "b1"]
        assert made.consumer.queues[QUEUE].waiting == 0


async def test_retries_whose_lease_was_lost_are_told_and_the_rest_of_the_key_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        made.engine.exceptions[QUEUE].extend(map(Waiting, ["a1", "a2"]))
        made.start()
        await made.engine.until(lambda: gate.started == ["a1"])
        first = min(made.consumer.leases, key=lambda lease: lease.exception_id)
        made.engine.lost.append(first)
        with caplog.at_level(logging.WARNING, "eventbus"):
            gate.open("a1", "a2")
            await made.engine.until(lambda: made.engine.settled == [("a2", "done")])
        assert [record.message for record in caplog.records] == [
            "lost a lease while its events ran; they run again elsewhere"
        ]
        assert not made.consumer.leases


async def test_a_lane_that_another_worker_has_is_asked_for_again_soon_and_not_all_the_time() -> None:
    async with line(ordered=True) as made:
        made.engine.held.append(True)
        made.engine.fresh[QUEUE].append("a1")
        made.start()
        await made.engine.called("claim")
        await made.still()
        assert made.engine.calls["claim"] == 1
        assert not made.consumer.quiet
        await made.engine.until(lambda: made.engine.settled == [("a1", "done")])


async def test_after_its_own_claim_is_settled_the_lane_is_looked_at_at_once() -> None:
    async with line(ordered=True) as made:
        made.add(OTHER, fine)
        made.engine.fresh[QUEUE].append("a1")
        made.start()
        await made.engine.until(lambda: made.engine.settled == [("a1", "done")])
        await made.still()
        after = made.engine.order[made.engine.order.index("settle") :]
        assert after == ["settle", "claim_due", "claim"]
