"""What goes on beside the work of one worker: its plugins' hooks and background actions, receivers of signals, pages.

Before it: a worker is made. After it: everything that plugins began has ended. Nothing here fails the worker once it
has started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from eventbus import signals
from eventbus.consuming.reporting import Reporter
from eventbus.plugins.values import WorkerHandle
from eventbus.runtime.pages import PageServer
from eventbus.settings import Settings

log = logging.getLogger("eventbus")

Action = Callable[[], Awaitable[None]]

_PATIENCE: Final = 5.0
"""Seconds that a stop waits for actions that are under way, and for async receivers."""
_HASTE: Final = 1.0
"""Seconds for everything, if the stop is forced."""


class Background:
    """The actions that plugins have begun. They may be begun before there is an event loop to run them."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._early: list[tuple[float | None, Action, str]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._started = False

    def begin(self, seconds: float | None, action: Action, name: str) -> None:
        """Await an action: again and again, ``seconds`` after each end, or once."""
        if not self._started:
            self._early.append((seconds, action, name))
            return
        task = asyncio.get_running_loop().create_task(self._run(seconds, action, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def start(self) -> None:
        """Run what was begun, and what will be."""
        self._started = True
        for each in self._early:
            self.begin(*each)
        self._early.clear()

    async def stop(self, seconds: float) -> None:
        """Let what is under way end, that long at most, and repeat nothing."""
        self._stopping.set()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)
        for task in list(self._tasks):
            task.cancel()

    async def _run(self, seconds: float | None, action: Action, name: str) -> None:
        while True:
            if seconds is not None and await self._stopped_within(seconds):
                return
            try:
                await action()
            except BaseException as error:
                if self._reporter.plugins.complaints.goes_on(name, "a background action", error):
                    raise
            if seconds is None:
                return

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True


class Life:
    """Tells of the life of one worker. ``close`` disconnects the plugins."""

    def __init__(
        self,
        settings: Settings,
        reporter: Reporter,
        handle: WorkerHandle,
        background: Background,
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._reporter = reporter
        self._handle = handle
        self._background = background
        self._close = close
        self._pages: PageServer | None = None
        self._receiving: asyncio.Task[None] | None = None

    async def starting(self) -> None:
        """Before anything is connected. Raises :class:`~eventbus.ConfigurationError` for what cannot be served."""
        self._receiving = asyncio.create_task(self._reporter.receivers.run(), name="receivers")
        self._serve()
        self._reporter.send(signals.worker_starting, queues=list(self._handle.queues))
        await self._tell("eventbus_worker_starting")

    async def ready(self) -> None:
        """The worker is registered and about to claim."""
        self._background.start()
        await self._tell("eventbus_worker_ready")
        self._reporter.send(signals.worker_ready, worker_id=self._handle.worker_id, queues=list(self._handle.queues))

    async def draining(self) -> None:
        """The worker was told to stop."""
        self._reporter.send(signals.worker_draining, worker_id=self._handle.worker_id)
        await self._tell("eventbus_worker_draining")

    async def stopped(self, code: int, *, forced: bool) -> None:
        """Everything is settled; the process ends with this code."""
        try:
            async with asyncio.timeout(_HASTE if forced else 3 * _PATIENCE):
                await self._background.stop(_PATIENCE)
                await self._tell("eventbus_worker_stopped", code=code)
                self._reporter.send(signals.worker_stopped, worker_id=self._handle.worker_id, code=code)
                await self._reporter.receivers.finish(_PATIENCE)
        except TimeoutError:
            log.warning("plugins did not end in time and were left behind")

    async def end(self) -> None:
        """However the worker ended."""
        if self._pages is not None:
            self._pages.stop()
        await self._background.stop(0.0)
        if self._receiving is not None:
            self._receiving.cancel()
        await self._close()

    async def _tell(self, hook: str, **given: Any) -> None:
        await self._reporter.plugins.live(hook, worker=self._handle, **given)

    def _serve(self) -> None:
        if self._settings.http_port is None:
            return
        plugins = self._reporter.plugins
        pages = plugins.pages(self._handle)
        self._pages = PageServer(self._settings.http_host, self._settings.http_port, pages, plugins.complaints)
        self._pages.start()
