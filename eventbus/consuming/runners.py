"""The slots in which handlers run: tasks of the event loop for async ones, threads for plain ones.

Before them: the consumer offers claimed deliveries. After them: ``finish`` gets each delivery with its verdict, on
the event loop. Every event gets a fresh context, in which ``current_event`` is set and nothing else is left over.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Protocol

from eventbus.consuming.execution import Execution, Unfinished
from eventbus.event import current_event
from eventbus.transport import RELEASED, Delivery, Verdict

Finish = Callable[[Delivery, Verdict], None]

_SLICE = 0.005
"""Seconds that a slot may go on without letting the rest of the event loop run."""


class Runner(Protocol):
    """Slots of one queue in one process."""

    @property
    def running(self) -> int:
        """Handlers that are running now."""

    @property
    def waiting(self) -> int:
        """Deliveries offered and not started."""

    def offer(self, deliveries: Iterable[Delivery]) -> None:
        """Run these when slots are free, in this order. On the event loop only."""

    def withdraw(self) -> list[Delivery]:
        """Take back all that have not started."""

    def abort(self) -> None:
        """Cut short what is running, as far as that is possible: its verdict becomes released."""

    def close(self) -> None:
        """Let idle threads end."""


class TaskRunner:
    """Async handlers. A slot is one task that handles one delivery after the other."""

    def __init__(self, execution: Execution, slots: int, finish: Finish) -> None:
        self._running = 0
        self._execution = execution
        self._slots = slots
        self._finish = finish
        self._waiting: deque[Delivery] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def offer(self, deliveries: Iterable[Delivery]) -> None:
        self._waiting.extend(deliveries)
        self._fill()

    def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(min(self._slots - len(self._tasks), len(self._waiting))):
            task = loop.create_task(self._slot(), context=contextvars.Context())
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
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
        waiting, handle, finish = self._waiting, self._execution.handle, self._finish
        task = asyncio.current_task()
        assert task is not None
        slice_end = time.monotonic() + _SLICE
        while waiting:
            delivery = waiting.popleft()
            lease = delivery.lease
            if lease.dropped:
                continue
            if delivery.seq > lease.started:  # noqa: PLR1730 - max() costs more, and this is per event
                lease.started = delivery.seq
            self._running += 1
            verdict = await _in_fresh_context(handle(delivery), delivery)
            self._running -= 1
            finish(delivery, verdict)
            if task.cancelling():
                await _forget_cancellation(task)
            if time.monotonic() > slice_end:
                await asyncio.sleep(0)
                slice_end = time.monotonic() + _SLICE


@types.coroutine
def _in_fresh_context(coroutine: Coroutine[Any, Any, Verdict], delivery: Delivery) -> Generator[Any, Any, Verdict]:
    """Run a coroutine to its end inside the current task, each step of it in one fresh context."""
    context = contextvars.Context()
    context.run(current_event.set, delivery.event)
    step: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        try:
            yielded = context.run(step, value)
        except StopIteration as stop:
            verdict: Verdict = stop.value
            return verdict
        try:
            value = yield yielded
            step = coroutine.send
        except BaseException as error:  # noqa: BLE001 - handed to the coroutine, which decides
            value = error
            step = coroutine.throw


async def _forget_cancellation(task: asyncio.Task[None]) -> None:
    """A handler cancelled its own task, or a stop did: neither may hit the next delivery of this slot."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while task.cancelling():
        task.uncancel()


class ThreadRunner:
    """Plain handlers. Threads are made as they are needed, at most ``slots``, and stay until ``close``."""

    def __init__(self, execution: Execution, slots: int, finish: Finish, name: str) -> None:
        self._execution = execution
        self._slots = slots
        self._finish = finish
        self._name = name
        self._inbox: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._outbox: deque[tuple[Delivery, Verdict | Unfinished]] = deque()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        self._signalled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaited: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        return max(0, self._unfinished - self._inbox.qsize())

    @property
    def waiting(self) -> int:
        return self._inbox.qsize()

    def offer(self, deliveries: Iterable[Delivery]) -> None:
        self._loop = asyncio.get_running_loop()
        for delivery in deliveries:
            self._unfinished += 1
            self._inbox.put(delivery)
        for _ in range(min(self._slots, self._unfinished) - len(self._threads)):
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def withdraw(self) -> list[Delivery]:
        taken = []
        while True:
            try:
                delivery = self._inbox.get_nowait()
            except queue.Empty:
                break
            if delivery is not None:
                taken.append(delivery)
        self._unfinished -= len(taken)
        return taken

    def abort(self) -> None:
        self._execution.aborting = True
        for task in self._awaited:
            task.cancel()

    def close(self) -> None:
        for _ in self._threads:
            self._inbox.put(None)

    def _serve(self) -> None:
        """The life of one thread."""
        handle, outbox = self._execution.handle_blocking, self._outbox
        while (delivery := self._inbox.get()) is not None:
            lease = delivery.lease
            if delivery.seq > lease.started:  # noqa: PLR1730 - max() costs more, and this is per event
                lease.started = delivery.seq
            context = contextvars.Context()
            context.run(current_event.set, delivery.event)
            outbox.append((delivery, RELEASED if lease.dropped else context.run(handle, delivery)))
            if not self._signalled:
                self._signalled = True
                self._signal()

    def _signal(self) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._collect)
        except RuntimeError:
            self._signalled = False  # the loop has ended; the lease will be taken over

    def _collect(self) -> None:
        self._signalled = False
        while self._outbox:
            delivery, result = self._outbox.popleft()
            if isinstance(result, Verdict):
                self._unfinished -= 1
                self._finish(delivery, result)
            else:
                context = contextvars.Context()
                context.run(current_event.set, delivery.event)
                task = asyncio.get_running_loop().create_task(self._await(delivery, result), context=context)
                self._awaited.add(task)
                task.add_done_callback(self._awaited.discard)

    async def _await(self, delivery: Delivery, result: Unfinished) -> None:
        verdict = RELEASED
        try:
            verdict = await self._execution.handle_returned(delivery, result)
        finally:
            self._unfinished -= 1
            self._finish(delivery, verdict)
