"""Slots for async handlers: tasks of the event loop.

Every event gets a fresh context, in which ``current_event`` is set and nothing else is left over.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, TypeVar

from eventbus.consuming.execution import Execution
from eventbus.consuming.overruns import Overruns
from eventbus.consuming.slots import Finish
from eventbus.event import Event, current_event
from eventbus.transport import Delivery

SLICE = 0.005
"""Seconds that a slot may go on without letting the rest of the event loop run."""

Result = TypeVar("Result")


class TaskRunner:
    """Async handlers. A slot is one task that handles one delivery after the other."""

    def __init__(self, execution: Execution, slots: int, finish: Finish) -> None:
        self.made_room: Callable[[], None] = lambda: None
        self._running = 0
        self._execution = execution
        self._slots = slots
        self._finish = finish
        self._waiting: deque[Delivery] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._replaced: set[asyncio.Task[Any]] = set()
        subscription = execution.subscription
        self._overruns = Overruns(subscription.name, subscription.timeout)
        execution.overran = self._overran

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def offer(self, deliveries: Iterable[Delivery]) -> None:
        self._waiting.extend(deliveries)
        self._fill()

    def resume(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        slot = asyncio.current_task()
        if slot is None or slot not in self._tasks or slot in self._replaced:
            self._fill()

    def _fill(self) -> None:
        """Make tasks for what waits, if slots are free."""
        self._open(len(self._waiting))

    def _open(self, wanted: int) -> None:
        free = self._slots - (len(self._tasks) - len(self._replaced))
        if free <= 0 or not wanted:
            return
        loop = asyncio.get_running_loop()
        for _ in range(min(free, wanted)):
            task = loop.create_task(self._slot(), context=contextvars.Context())
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._replaced.discard(task)
        self._fill()  # a handler may have cancelled its slot after it had returned

    def withdraw(self) -> list[Delivery]:
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    def abort(self) -> None:
        self._execution.aborting = True
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        """Slots end by themselves."""

    async def _slot(self) -> None:
        waiting, handle, finish, replaced = self._waiting, self._execution.handle, self._finish, self._replaced
        task = asyncio.current_task()
        assert task is not None
        tenure = self._execution.tenure
        slice_end = (now := time.monotonic()) + SLICE
        while waiting:
            if now > tenure.until:
                now = await tenure.wait()
                continue
            delivery = waiting.popleft()
            lease = delivery.lease
            if lease.dropped:
                continue
            if delivery.seq > lease.started:  # noqa: PLR1730 - max() costs more, and this is per event
                lease.started = delivery.seq
            self._running += 1
            delivery.began = now
            verdict = await in_fresh_context(handle(delivery), delivery.event)
            now = time.monotonic()
            delivery.spent = now - delivery.began
            if replaced and task in replaced:
                self._overruns.ended()
                finish(delivery, verdict)
                return
            self._running -= 1
            finish(delivery, verdict)
            if task.cancelling():
                await forget_cancellation(task)
            if now > slice_end:
                await asyncio.sleep(0)
                slice_end = (now := time.monotonic()) + SLICE

    def _overran(self, task: asyncio.Task[Any], deliveries: Sequence[Delivery]) -> None:
        """The handler of this slot goes on although it was cancelled; when it ends, so does the slot."""
        if self._overruns.report(deliveries, f"task {task.get_name()}"):
            self._replaced.add(task)
            self._running -= 1
            self._fill()
            self.made_room()


@types.coroutine
def in_fresh_context(coroutine: Coroutine[Any, Any, Result], event: Event | None) -> Generator[Any, Any, Result]:
    """Run a coroutine to its end inside the current task, each step of it in one fresh context."""
    context = contextvars.Context()
    context.run(current_event.set, event)
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        try:
            yielded = context.run(step, value)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        try:
            value = yield yielded
            step = coroutine.send
        except BaseException as error:  # noqa: BLE001 - handed to the coroutine, which decides
            value = error
            step = coroutine.throw


async def forget_cancellation(task: asyncio.Task[Any]) -> None:
    """A handler cancelled its own task, or a stop did: neither may hit the next delivery of this slot."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while task.cancelling():
        task.uncancel()
