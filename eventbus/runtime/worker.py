"""One worker: the relay, the consumer and what keeps them going, from start to the last settled lease.

Before it: a bus with subscriptions. After it: an exit code. Knows no database; a station builds the parts.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from eventbus.consuming.consumer import Consumer
from eventbus.errors import BusPaused, Unavailable
from eventbus.publishing.relay import Relay
from eventbus.runtime.life import Life

log = logging.getLogger("eventbus")

_SETTLE_PATIENCE = 5.0
"""Seconds that the last settlements may take after the handlers have ended."""
_FORCED_PATIENCE = 1.0
_LAST_RESORT = 5.0
"""Seconds from the second signal to the end of a process whose event loop is blocked."""
_QUIET_LOOK = 0.02
_UNDONE_LOOK = 0.2
_PYTHONS_DEFAULTS: Final = (700, 2_000)
"""Of 3.11 and 3.12, and of what came later."""
_RARER: Final = 50_000
"""Objects that come to be without going, until the youngest are searched for cycles."""


class Heart(Protocol):
    """Keeps the worker's lease from its own thread."""

    def start(self) -> None:
        """Beat until ``stop``."""

    def stop(self) -> None:
        """Beat no more."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What one worker is made of.

    ``open`` registers it, ``hear`` listens for wake-ups, ``leave`` says goodbye, ``close`` disconnects. ``undone``
    tells whether other workers or publishers are in the middle of something in these queues. ``maintain`` cleans up,
    and never ends by itself.
    """

    relay: Relay
    consumer: Consumer
    heart: Heart
    open: Callable[[], Awaitable[None]]
    hear: Callable[[], Coroutine[Any, Any, None]] | None
    maintain: Callable[[], Coroutine[Any, Any, None]] | None
    undone: Callable[[Sequence[int]], Awaitable[bool]]
    leave: Callable[[], Awaitable[None]]
    life: Life
    close: Callable[[], Awaitable[None]]


class Worker:
    """Runs the parts until a signal, ``stop`` or, with ``until_idle``, until nothing is left to do."""

    def __init__(self, parts: Parts, *, drain_timeout: float, until_idle: bool = False) -> None:
        self._parts = parts
        self._drain_timeout = drain_timeout
        self._until_idle = until_idle
        self._stop = asyncio.Event()
        self._forced = asyncio.Event()
        self._ready = asyncio.Event()

    def stop(self) -> None:
        """Stop gracefully; a second call stops now. On the event loop."""
        if self._stop.is_set():
            log.warning("stopping now")
            self._forced.set()
        self._stop.set()

    async def ready(self) -> None:
        """Wait until the worker is registered and consumes."""
        await self._ready.wait()

    async def run(self) -> int:
        """Work until stopped; returns the exit code.

        0 after a graceful stop. 1 after a forced one, a defect, or when not everything that was done could be settled
        and will be done again; with ``until_idle`` also when the bus is paused. To cancel it is a forced stop, too.
        Raises what ``open`` raises: a configuration that cannot work, or :class:`Unavailable`.
        """
        with _Signals(self.stop), rarer_collections():
            try:
                await self._parts.life.starting()
                if not await self._first_of(self._parts.open()):
                    return 0
                return await self._work()
            finally:
                await self._parts.life.end()
                await self._parts.close()

    async def _first_of(self, opening: Awaitable[None]) -> bool:
        """Wait for the parts to open; false when a stop came first."""
        task = asyncio.ensure_future(opening)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.wait({task})

    async def _work(self) -> int:
        parts = self._parts
        parts.heart.start()
        await parts.life.ready()
        settling = asyncio.create_task(parts.consumer.settle(), name="settle")
        tasks = {
            settling,
            asyncio.create_task(parts.relay.run(), name="relay"),
            asyncio.create_task(parts.consumer.fetch(), name="fetch"),
            asyncio.create_task(self._stop.wait(), name="stop"),
        }
        if parts.hear is not None:
            tasks.add(asyncio.create_task(parts.hear(), name="listen"))
        if parts.maintain is not None:
            tasks.add(asyncio.create_task(parts.maintain(), name="maintain"))
        if self._until_idle:
            tasks.add(asyncio.create_task(self._watch_idle(), name="until-idle"))
        self._ready.set()
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._forced.set()  # whoever cancels does not want to wait
            await self._shut_down(settling, tasks, defect=False)
            raise
        return await self._shut_down(settling, tasks, defect=_defect(ended))

    async def _shut_down(
        self, settling: asyncio.Task[None], tasks: Iterable[asyncio.Task[Any]], *, defect: bool
    ) -> int:
        telling = asyncio.create_task(self._parts.life.draining(), name="draining")
        settled = await self._drain(settling)
        if self._forced.is_set():
            telling.cancel()
        await asyncio.wait({telling})
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        forced = self._forced.is_set()
        code = 1 if defect or forced or not settled else 0
        await self._parts.life.stopped(code, forced=forced)
        self._parts.heart.stop()  # a heartbeat after the goodbye would bring the worker back
        await self._say_goodbye()
        return code

    async def _drain(self, settling: asyncio.Task[None]) -> bool:
        """Stop the relay and the consumer; false when not everything could be settled in time."""
        self._parts.relay.stop()
        drain = asyncio.create_task(self._parts.consumer.drain(self._drain_timeout))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({drain, forced}, return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            drain.cancel()
            await asyncio.wait({drain})
            await self._parts.consumer.drain(0.0)
        forced.cancel()
        _, late = await asyncio.wait(
            {settling}, timeout=_FORCED_PATIENCE if self._forced.is_set() else _SETTLE_PATIENCE
        )
        if late:
            log.error("could not settle everything before the stop; other workers take over what is left")
        return not late

    async def _say_goodbye(self) -> None:
        try:
            async with asyncio.timeout(_FORCED_PATIENCE):
                await self._parts.leave()
        except (Unavailable, TimeoutError):
            log.warning("could not sign off; other workers notice by the missing heartbeat")

    async def _watch_idle(self) -> None:
        """End when all is done: the relay has nothing fresh and every queue is empty, twice with nothing in between.

        That counts what others hold: handlers that run elsewhere, what a dead worker has left, open publishers.
        """
        relay, consumer = self._parts.relay, self._parts.consumer
        while True:
            await self._until_quiet()
            if await self._undone():
                await asyncio.sleep(_UNDONE_LOOK)
                continue
            before = (relay.delivered, consumer.handled)
            ticks = relay.idle_ticks
            while relay.idle_ticks <= ticks + 1 and not relay.paused:
                relay.wake()  # again and again: it may be in the middle of falling asleep
                await asyncio.sleep(_QUIET_LOOK)
            consumer.wake()
            await self._until_quiet()
            if before == (relay.delivered, consumer.handled) and not await self._undone():
                return

    async def _until_quiet(self) -> None:
        """Wait until every queue was found empty; raises when that cannot come to pass."""
        relay, consumer = self._parts.relay, self._parts.consumer
        while not (consumer.quiet or relay.paused or consumer.halted):  # noqa: ASYNC110 - for commands that end
            await asyncio.sleep(_QUIET_LOOK)
        if halted := consumer.halted:
            names = ", ".join(sorted(halted))
            raise BusPaused(f"paused with work left: {names}; to let it go on: eventbus queues resume NAME")
        if relay.paused:
            raise BusPaused("the bus is paused, so that nothing gets done; `eventbus resume` starts it again")

    async def _undone(self) -> bool:
        try:
            return await self._parts.undone(list(self._parts.consumer.queues))
        except Unavailable:
            return True


def _defect(ended: set[asyncio.Task[Any]]) -> bool:
    """Whether a loop of the worker ended by an error, which is then logged."""
    failed = [task for task in ended if not task.cancelled() and task.exception() is not None]
    for task in failed:
        if isinstance(task.exception(), BusPaused):
            log.error("%s", task.exception())
        else:
            log.critical("the %s loop failed; stopping", task.get_name(), exc_info=task.exception())
    return bool(failed)


@contextmanager
def rarer_collections() -> Iterator[None]:
    """Let Python look for garbage in cycles a little less often, unless the program has decided that itself.

    Thousands of events wait in memory, none of them in a cycle: at Python's default the search takes a sixth of
    a drain. See docs/performance.md.
    """
    before = gc.get_threshold()
    if before[0] in _PYTHONS_DEFAULTS:
        gc.set_threshold(_RARER, *before[1:])
    try:
        yield
    finally:
        if gc.get_threshold()[0] == _RARER:
            gc.set_threshold(*before)


class _Signals:
    """SIGTERM and SIGINT call ``stop`` while the block runs; outside the main thread nothing is installed.

    They are received between any two steps of the interpreter, so that a handler that blocks the event loop cannot
    keep the second one from ending the process.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._previous: dict[signal.Signals, Any] = {}
        self._received = 0
        self._last_resort: threading.Timer | None = None

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()

        def receive(_number: int, _frame: object) -> None:
            self._received += 1
            loop.call_soon_threadsafe(self._stop)
            if self._received == 2:
                self._last_resort = threading.Timer(_LAST_RESORT, os._exit, (1,))
                self._last_resort.daemon = True
                self._last_resort.start()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, receive)

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        if self._last_resort is not None:
            self._last_resort.cancel()
