"""Slots: what runs at once, in which context, and what a stop or a stray cancellation does to the rest."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest

from eventbus.consuming.runners import Runner
from eventbus.event import Event, current_event
from eventbus.transport import DONE, RELEASED
from tests.unit.offered import Finished, deliveries, runner, until
from tests.waiting import wait_until


class Gate:
    """Handlers of both kinds that wait until they are let through; ``started`` has the numbers in order."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.started: deque[int] = deque()
        self.most = 0
        self._running = 0
        self._lock = threading.Lock()

    async def on_the_loop(self, event: Event) -> None:
        """An async handler."""
        self._enter(event)
        assert await asyncio.to_thread(self.open.wait, 10)
        self._leave()

    def in_a_thread(self, event: Event) -> None:
        """A plain handler."""
        self._enter(event)
        assert self.open.wait(10)
        self._leave()

    def _enter(self, event: Event) -> None:
        with self._lock:
            self.started.append(event.payload)
            self._running += 1
            self.most = max(self.most, self._running)

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1


KINDS = ["on_the_loop", "in_a_thread"]


@pytest.mark.parametrize("kind", KINDS)
async def test_deliveries_start_in_their_order_and_no_more_at_once_than_there_are_slots(kind: str) -> None:
    gate, finish = Gate(), Finished()
    slots = runner(getattr(gate, kind), 3, finish)
    given = deliveries(20)
    slots.offer(given)
    await until(lambda: len(gate.started) == 3)
    assert (slots.running, slots.waiting) == (3, 17)
    assert given[0].lease.started == 3
    gate.open.set()
    await finish.wait_for(20)
    assert gate.most == 3
    assert sorted(gate.started) == list(range(1, 21))
    assert (slots.running, slots.waiting, given[0].lease.started) == (0, 0, 20)
    slots.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_what_has_not_started_can_be_taken_back_whole(kind: str) -> None:
    gate, finish = Gate(), Finished()
    slots = runner(getattr(gate, kind), 2, finish)
    given = deliveries(10)
    slots.offer(given)
    await until(lambda: len(gate.started) == 2)
    assert slots.withdraw() == given[2:]
    assert (slots.running, slots.waiting) == (2, 0)
    gate.open.set()
    await finish.wait_for(2)
    assert sorted(finish.outcomes) == [(1, "done"), (2, "done")]
    slots.offer(given[2:])
    await finish.wait_for(10)
    slots.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_deliveries_of_a_lost_lease_are_not_started_any_more(kind: str) -> None:
    gate, finish = Gate(), Finished()
    slots = runner(getattr(gate, kind), 1, finish)
    lost, kept = deliveries(3), deliveries(1)
    slots.offer([*lost, *kept])
    await until(lambda: len(gate.started) == 1)
    lost[0].lease.dropped = True
    gate.open.set()
    await until(lambda: len(gate.started) == 2)
    assert list(gate.started) == [1, 1]
    slots.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_every_delivery_runs_in_a_fresh_context_with_its_own_event(kind: str) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="fresh")
    found: list[tuple[str, bool]] = []

    def look(event: Event) -> None:
        found.append((variable.get(), current_event.get() is event))
        variable.set("left over")

    async def look_on_the_loop(event: Event) -> None:
        look(event)
        await asyncio.sleep(0)
        assert variable.get() == "left over"

    finish = Finished()
    slots = runner(look_on_the_loop if kind == "on_the_loop" else look, 2, finish)
    variable.set("of whoever offers")
    slots.offer(deliveries(6))
    await finish.wait_for(6)
    assert found == [("fresh", True)] * 6
    assert {verdict for _, verdict in finish.verdicts} == {DONE}
    slots.close()


async def test_a_stop_that_runs_out_of_patience_releases_what_it_cuts_short() -> None:
    gate, finish = Gate(), Finished()
    slots = runner(gate.on_the_loop, 2, finish)
    slots.offer(deliveries(2))
    await until(lambda: len(gate.started) == 2)
    slots.abort()
    await finish.wait_for(2)
    assert {verdict for _, verdict in finish.verdicts} == {RELEASED}
    assert slots.running == 0
    gate.open.set()


async def test_a_stop_also_cuts_short_a_coroutine_that_a_plain_handler_returned() -> None:
    began = asyncio.Event()

    async def work() -> None:
        began.set()
        await asyncio.Event().wait()

    def handle(event: Event) -> Any:
        return work()

    finish = Finished()
    slots = runner(handle, 1, finish)
    slots.offer(deliveries(1))
    await began.wait()
    assert slots.running == 1
    slots.abort()
    await finish.wait_for(1)
    assert finish.verdicts == [(1, RELEASED)]
    assert slots.running == 0
    slots.close()


@pytest.mark.parametrize("moment", ["before it returns", "while it waits"])
async def test_a_handler_that_cancels_its_slot_takes_no_other_delivery_along(moment: str) -> None:
    finish = Finished()

    async def handle(event: Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        if event.payload == 1:
            task.cancel()
        if event.payload > 1 or moment == "while it waits":
            await asyncio.sleep(0)

    slots = runner(handle, 1, finish)
    slots.offer(deliveries(5))
    await finish.wait_for(5)
    assert [seq for seq, _ in finish.verdicts] == [1, 2, 3, 4, 5]
    assert [outcome for seq, outcome in finish.outcomes if seq > 1] == ["done"] * 4


async def test_a_slot_that_is_cancelled_between_two_deliveries_leaves_none_behind() -> None:
    finish = Finished()

    async def handle(event: Event) -> None:
        if event.payload == 1:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_soon(task.cancel)
            block_for_a_slice()  # so that the slot lets others run before the next delivery

    slots = runner(handle, 1, finish)
    slots.offer(deliveries(3))
    await finish.wait_for(3)
    assert [seq for seq, _ in finish.verdicts] == [1, 2, 3]
    assert slots.running == 0


def block_for_a_slice() -> None:
    """Hold the event loop for longer than a slot may without a pause."""
    threading.Event().wait(0.01)


async def test_handlers_that_never_wait_do_not_keep_the_rest_of_the_program_from_running() -> None:
    handled: list[int] = []

    async def handle(event: Event) -> None:
        threading.Event().wait(0.001)
        handled.append(event.payload)

    slots = runner(handle, 2, Finished())
    slots.offer(deliveries(100))
    turns = 0
    while len(handled) < 100:
        turns += 1
        await asyncio.sleep(0)
    assert turns > 5


async def test_threads_are_made_when_they_are_needed_and_end_when_the_queue_is_closed() -> None:
    gate, finish = Gate(), Finished()
    before = set(threading.enumerate())
    slots = runner(gate.in_a_thread, 4, finish)
    slots.offer(deliveries(1))
    await until(lambda: len(gate.started) == 1)
    assert len(set(threading.enumerate()) - before) <= 2, "one handler, one thread (and one of this test)"
    gate.open.set()
    slots.offer(deliveries(30))
    await finish.wait_for(31)
    made = named(before)
    assert 1 <= len(made) <= 4
    slots.close()
    for thread in made:
        thread.join(5)
    assert not any(thread.is_alive() for thread in made)


def named(before: Iterable[threading.Thread]) -> list[threading.Thread]:
    """The threads of the queue that were made since."""
    return [thread for thread in threading.enumerate() if thread not in set(before) and "tests" in thread.name]


async def test_a_thread_survives_every_exception_of_its_handlers() -> None:
    def handle(event: Event) -> None:
        raise [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), BaseException()][event.payload % 4]

    finish = Finished()
    slots = runner(handle, 1, finish)
    slots.offer(deliveries(8))
    await finish.wait_for(8)
    assert {outcome for _, outcome in finish.outcomes} == {"retry"}
    slots.close()


def test_a_handler_that_outlives_the_event_loop_does_no_harm() -> None:
    gate = Gate()

    async def abandon() -> Runner:
        slots = runner(gate.in_a_thread, 1, Finished())
        slots.offer(deliveries(2))
        await until(lambda: len(gate.started) == 1)
        return slots

    slots = asyncio.run(abandon())
    gate.open.set()
    wait_until(lambda: len(gate.started) == 2)
    slots.close()
