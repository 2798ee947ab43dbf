"""Slots for plain handlers: threads.

Every event gets a fresh context, in which ``current_event`` is set and nothing else is left over. Nothing can stop a
thread, so a handler that outlasts its timeout loses the thread: another one takes its place, and it ends when the
handler does.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eventbus.consuming.execution import Execution, ThreadCall, Unfinished
from eventbus.consuming.overruns import Overruns
from eventbus.consuming.slots import Finish
from eventbus.event import Event, current_event
from eventbus.transport import RELEASED, Delivery

_SHORTEST_LOOK = 0.005
"""Seconds between two looks for calls that outlast their timeout."""


class ThreadRunner:
    """Plain handlers. Threads are made as they are needed, at most ``slots``, and stay until ``close``."""

    def __init__(self, execution: Execution, slots: int, finish: Finish, name: str) -> None:
        self.made_room: Callable[[], None] = lambda: None
        self._execution = execution
        self._slots = slots
        self._finish = finish
        self._names = (f"{name}-{number}" for number in itertools.count())
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: deque[tuple[Any, Any, bool]] = deque()
        """What was handled, what came of it, and whether its thread had been replaced."""
        self._threads: dict[int, threading.Thread] = {}
        """Those that take work, by number."""
        self._unfinished = 0
        self._signalled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaited: set[asyncio.Task[None]] = set()
        self._stubborn: set[asyncio.Task[Any]] = set()
        """Of the awaited, those that go on although they were cancelled."""
        self._replaced: set[int] = set()
        """Threads whose handlers go on after their timeout, and in whose place there is another one."""
        self._hand_over = threading.Lock()
        self._timeout = execution.subscription.timeout
        self._watch: asyncio.TimerHandle | None = None
        self._overruns = Overruns(execution.subscription.name, self._timeout)
        execution.overran = self._overran

    @property
    def running(self) -> int:
        return max(0, self._unfinished - self._overruns.replaced - self._inbox.qsize())

    @property
    def waiting(self) -> int:
        return self._inbox.qsize()

    def offer(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self._put(delivery)
        self._fill()

    def resume(self, delivery: Delivery) -> None:
        self.offer((delivery,))

    def _put(self, work: Any) -> None:
        self._unfinished += 1
        self._inbox.put(work)

    def _fill(self) -> None:
        """Make threads for what is to be done, if slots are free."""
        self._loop = asyncio.get_running_loop()
        for _ in range(min(self._slots, self._unfinished - self._overruns.replaced) - len(self._threads)):
            thread = threading.Thread(target=self._serve, name=next(self._names), daemon=True)
            thread.start()
            assert thread.ident is not None
            self._threads[thread.ident] = thread
        if self._timeout is not None and self._watch is None:
            self._look_in(self._timeout)

    def _look_in(self, seconds: float) -> None:
        assert self._loop is not None
        if self._unfinished > self._overruns.replaced:
            self._watch = self._loop.call_later(max(seconds, _SHORTEST_LOOK), self._look)

    def _look(self) -> None:
        """Find calls that outlast their timeout, and look again when the next one may."""
        assert self._timeout is not None
        self._watch = None
        now = time.monotonic()
        left = self._timeout
        for number, call in list(self._execution.thread_calls.items()):
            if call.since + self._timeout > now:
                left = min(left, call.since + self._timeout - now)
            elif not call.reported:
                self._replace(number, call)
        self._look_in(left)
        self._fill()

    def _replace(self, number: int, call: ThreadCall) -> None:
        """This thread is lost for as long as its handler goes on."""
        with self._hand_over:
            if self._execution.thread_calls.get(number) is not call:
                return  # it has just ended
            call.reported = True
            if self._overruns.report(call.deliveries, f"thread {call.thread}"):
                self._replaced.add(number)
                del self._threads[number]
                self.made_room()

    def withdraw(self) -> list[Delivery]:
        taken = []
        while True:
            try:
                work = self._inbox.get_nowait()
            except queue.Empty:
                break
            if work is not None:
                taken.append(work)
        self._unfinished -= len(taken)
        return taken

    def abort(self) -> None:
        self._execution.aborting = True
        for task in self._awaited:
            task.cancel()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for _ in self._threads:
            self._inbox.put(None)

    def _serve(self) -> None:
        """The life of one thread."""
        outbox, replaced, number = self._outbox, False, threading.get_ident()
        while not replaced and (work := self._inbox.get()) is not None:
            result = self._handle(work)
            if self._timeout is not None:
                with self._hand_over:
                    replaced = number in self._replaced
                    self._replaced.discard(number)
            outbox.append((work, result, replaced))
            if not self._signalled:
                self._signalled = True
                self._signal()

    def _handle(self, delivery: Any) -> Any:
        """Handle one delivery in this thread."""
        self._execution.tenure.wait_blocking()
        lease = delivery.lease
        if delivery.seq > lease.started:  # noqa: PLR1730 - max() costs more, and this is per event
            lease.started = delivery.seq
        if lease.dropped:
            return RELEASED
        context = contextvars.Context()
        context.run(current_event.set, delivery.event)
        delivery.began = time.monotonic()
        verdict = context.run(self._execution.handle_blocking, delivery)
        delivery.spent = time.monotonic() - delivery.began
        return verdict

    def _signal(self) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._collect)
        except RuntimeError:
            self._signalled = False  # the loop has ended; the lease will be taken over

    def _collect(self) -> None:
        self._signalled = False
        while self._outbox:
            work, result, replaced = self._outbox.popleft()
            if replaced:
                self._overruns.ended()
            if isinstance(result, Unfinished):
                context = contextvars.Context()
                context.run(current_event.set, self._event_of(work))
                task = asyncio.get_running_loop().create_task(self._await(work, result), context=context)
                self._awaited.add(task)
                task.add_done_callback(self._awaited.discard)
            else:
                self._unfinished -= 1
                self._conclude(work, result)

    async def _await(self, work: Any, unfinished: Unfinished) -> None:
        result = None
        try:
            result = await self._handle_returned(work, unfinished)
        finally:
            task = asyncio.current_task()
            if task in self._stubborn:
                self._stubborn.discard(task)
                self._overruns.ended()
            self._unfinished -= 1
            self._conclude(work, result)

    def _overran(self, task: asyncio.Task[Any], deliveries: Sequence[Delivery]) -> None:
        """What a handler left unfinished goes on although it was cancelled."""
        if self._overruns.report(deliveries, f"task {task.get_name()}"):
            self._stubborn.add(task)
            self._fill()
            self.made_room()

    def _event_of(self, delivery: Any) -> Event | None:
        event: Event | None = delivery.event
        return event

    async def _handle_returned(self, delivery: Any, unfinished: Any) -> Any:
        verdict = await self._execution.handle_returned(delivery, unfinished)
        delivery.spent = time.monotonic() - delivery.began
        return verdict

    def _conclude(self, delivery: Any, verdict: Any) -> None:
        """Tell what came of one delivery; without a verdict, its task was cancelled from outside."""
        self._finish(delivery, verdict or RELEASED)
