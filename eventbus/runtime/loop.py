"""Runs a worker's event loop from its first step to its last, whatever handlers do to it.

``asyncio.run`` is not enough: a task that a handler has started ends it by raising SystemExit, and a handler that
swallows its cancellation, or work that it gave to a thread, keeps it from ever returning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger("eventbus")

_PATIENCE = 0.5
"""Seconds that tasks get in the end to notice that they are cancelled."""

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run ``main`` in a new event loop and return what it returns; for a thread that has no loop running.

    SystemExit and KeyboardInterrupt that come out of any other task are logged and end nothing. Tasks that are left
    in the end are cancelled, and abandoned if that does not help.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        return _complete(loop, loop.create_task(main))
    finally:
        _cancel_what_is_left(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _complete(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Result]) -> Result:
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:
            if task.done():
                raise
            log.error(  # noqa: TRY400 - the task has kept the traceback for whoever awaits it
                "a task that a handler started raised %s; the worker goes on", type(error).__name__
            )


def _cancel_what_is_left(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        _complete(loop, loop.create_task(_wait_for(tasks)))
    _complete(loop, loop.create_task(loop.shutdown_asyncgens()))


async def _wait_for(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=_PATIENCE)
