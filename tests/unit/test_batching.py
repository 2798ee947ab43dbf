"""How deliveries become batches: none waits too long, none is too large, and none is lost between two of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from eventbus.consuming import execution
from eventbus.consuming.batching import Collector
from eventbus.event import Event, current_event
from eventbus.transport import Delivery
from tests.unit.offered import Finished, deliveries, runner, until


class Clock:
    """Monotonic seconds that stand still."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def numbers(batch: list[Delivery]) -> list[int]:
    return [delivery.seq for delivery in batch]


async def test_a_batch_is_full_or_its_oldest_delivery_has_waited() -> None:
    clock, woken = Clock(), asyncio.Event()
    collector = Collector(3, 0.05, clock, woken.set)
    given = deliveries(8)
    collector.add(given[:7])
    assert (collector.ready(), len(collector)) == (2, 7)
    assert [numbers(collector.take()) for _ in range(3)] == [[1, 2, 3], [4, 5, 6], []]
    clock.now = 0.03
    collector.add(given[7:])
    assert collector.take() == []
    clock.now = 0.05
    async with asyncio.timeout(5):
        await woken.wait()
    assert collector.ready() == 1
    assert numbers(collector.take()) == [7, 8]
    assert (collector.ready(), len(collector)) == (0, 0)


async def test_what_is_to_run_alone_waits_for_nothing_and_shares_no_batch() -> None:
    collector = Collector(3, 60.0, Clock(), lambda: None)
    given = deliveries(5)
    collector.add(given[:1])
    collector.add_alone(given[1:3])
    assert (collector.ready(), len(collector)) == (2, 3)
    assert [numbers(collector.take()) for _ in range(3)] == [[2], [3], []]
    collector.add_alone(given[3:])
    assert numbers(collector.withdraw()) == [4, 5, 1]
    assert len(collector) == 0
    collector.close()


class Recorder:
    """Handlers of both kinds that record their batches; those with a number in ``bad`` fail."""

    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)
        self.batches: list[list[int]] = []
        self.current: list[Event | None] = []
        self.open = threading.Event()
        self.open.set()

    def in_a_thread(self, events: list[Event]) -> None:
        """A plain handler."""
        self._record(events)
        assert self.open.wait(10)
        self._fail(events)

    async def on_the_loop(self, events: list[Event]) -> None:
        """An async handler."""
        self._record(events)
        assert await asyncio.to_thread(self.open.wait, 10)
        self._fail(events)

    def returned(self, events: list[Event]) -> Any:
        """A plain handler that returns a coroutine."""
        return self.on_the_loop(events)

    def _record(self, events: list[Event]) -> None:
        self.batches.append([event.payload for event in events])
        self.current.append(current_event.get())

    def _fail(self, events: list[Event]) -> None:
        if self.bad & {event.payload for event in events}:
            raise ValueError("bad")


KINDS = ["in_a_thread", "on_the_loop", "returned"]


@pytest.mark.parametrize("kind", KINDS)
async def test_every_delivery_is_in_one_batch_and_no_batch_is_too_large(kind: str) -> None:
    recorder, finish = Recorder(), Finished()
    slots = runner(getattr(recorder, kind), 2, finish, batch=4, batch_wait=0.02)
    given = deliveries(10)
    slots.offer(given)
    await finish.wait_for(10)
    assert sorted(map(len, recorder.batches)) == [2, 4, 4]
    assert sorted(number for batch in recorder.batches for number in batch) == list(range(1, 11))
    assert {outcome for _, outcome in finish.outcomes} == {"done"}
    assert (slots.running, slots.waiting, given[0].lease.started) == (0, 0, 10)
    slots.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_one_bad_event_fails_alone(kind: str) -> None:
    recorder, finish = Recorder(3, 7), Finished()
    slots = runner(getattr(recorder, kind), 2, finish, batch=5, batch_wait=0.02)
    slots.offer(deliveries(15))
    await finish.wait_for(15)
    assert sorted(finish.outcomes) == [(n, "retry" if n in (3, 7) else "done") for n in range(1, 16)]
    runs = [number for batch in recorder.batches for number in batch]
    assert [runs.count(number) for number in range(1, 16)] == [2] * 10 + [1] * 5
    slots.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_no_more_batches_run_at_once_than_there_are_slots_and_the_rest_can_be_taken_back(kind: str) -> None:
    recorder, finish = Recorder(), Finished()
    recorder.open.clear()
    slots = runner(getattr(recorder, kind), 2, finish, batch=3, batch_wait=0.0)
    given = deliveries(20)
    slots.offer(given)
    await until(lambda: len(recorder.batches) == 2)
    assert (slots.running, slots.waiting, given[0].lease.started) == (6, 14, 6)
    assert slots.withdraw() == given[6:]
    assert (slots.running, slots.waiting) == (6, 0)
    recorder.open.set()
    await finish.wait_for(6)
    slots.offer(given[6:])
    await finish.wait_for(20)
    assert slots.running == 0
    slots.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_event_of_a_batch_of_one_is_the_current_one_and_of_several_none_is(kind: str) -> None:
    recorder, finish = Recorder(), Finished()
    slots = runner(getattr(recorder, kind), 1, finish, batch=3, batch_wait=0.0)
    given = deliveries(4)
    slots.offer(given)
    await finish.wait_for(4)
    assert recorder.current == [None, given[3].event]
    slots.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_batch_that_hangs_costs_no_capacity_and_its_events_run_one_by_one_when_it_ends(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "STUBBORN", 0.02)
    free = threading.Event()
    batches: list[list[int]] = []

    def in_a_thread(events: list[Event]) -> None:
        batches.append([event.payload for event in events])
        if len(events) == 2 and events[0].payload < 5:
            assert free.wait(10)

    async def on_the_loop(events: list[Event]) -> None:
        batches.append([event.payload for event in events])
        while len(events) == 2 and events[0].payload < 5 and not free.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    def returned(events: list[Event]) -> Any:
        return on_the_loop(events)

    handlers: dict[str, Callable[..., Any]] = {
        "in_a_thread": in_a_thread, "on_the_loop": on_the_loop, "returned": returned,
    }  # fmt: skip
    finish = Finished()
    slots = runner(handlers[kind], 1, finish, batch=2, batch_wait=0.01, timeout=0.05)
    slots.offer(deliveries(8))
    await finish.wait_for(4)
    assert sorted(finish.outcomes) == [(number, "done") for number in range(5, 9)]
    await until(lambda: slots.running == 0)
    free.set()
    await finish.wait_for(8)
    assert {outcome for _, outcome in finish.outcomes} == {"done"}
    assert sorted(batches[4:]) == [[1], [2], [3], [4]]
    assert slots._overruns.replaced == 0  # type: ignore[attr-defined]
    slots.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_events_that_run_one_by_one_use_all_slots(kind: str) -> None:
    together = threading.Barrier(3)

    def in_a_thread(events: list[Event]) -> None:
        if len(events) > 1:
            raise ValueError("bad")
        together.wait(10)

    async def on_the_loop(events: list[Event]) -> None:
        await asyncio.to_thread(in_a_thread, events)

    handlers: dict[str, Callable[..., Any]] = {
        "in_a_thread": in_a_thread, "on_the_loop": on_the_loop, "returned": lambda events: on_the_loop(events),  # noqa: PLW0108 - a plain function that returns a coroutine is the case
    }  # fmt: skip
    finish = Finished()
    slots = runner(handlers[kind], 3, finish, batch=3, batch_wait=60)
    slots.offer(deliveries(3))
    await finish.wait_for(3)
    assert {outcome for _, outcome in finish.outcomes} == {"done"}
    slots.close()
