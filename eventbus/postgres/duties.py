"""The upkeep that plugins bring along: each duty is done by one worker at a time, as often as it asks for.

Before it: a worker is ready. After it: nothing. Whose turn it is, is a row in ``duties``, by the database's clock, so
that no connection has to hold a lock meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import psycopg

from eventbus.errors import Unavailable
from eventbus.plugins.values import Duty

log = logging.getLogger("eventbus")

_LONGEST_PAUSE: Final = 60.0
"""Seconds between two looks whether a duty is due."""
_TURN: Final = "SELECT {schema}.take_duty(%s, %s)"

Rows = Callable[..., Awaitable[Sequence[tuple[Any, ...]]]]
Begin = Callable[[float | None, Callable[[], Awaitable[None]], str], None]


class DutyWatch:
    """Does one duty of one plugin, whenever it is this worker's turn."""

    def __init__(self, plugin: str, duty: Duty, rows: Rows) -> None:
        self._name = f"{plugin}/{duty.name}"
        self._duty = duty
        self._rows = rows
        self._failing = False

    async def look(self) -> None:
        """Do it if it is due. What fails is one line in the log, and one when it works again."""
        try:
            [(ours,)] = await self._rows(_TURN, (self._name, self._duty.every))
            if not ours:
                return
            removed: object = await self._duty.run(self._rows)
        except (psycopg.Error, Unavailable) as error:
            if not self._failing:
                log.warning("the duty %s failed, and is tried again: %s", self._name, " ".join(str(error).split()))
            self._failing = True
            return
        if self._failing:
            log.info("the duty %s works again", self._name)
        self._failing = False
        if isinstance(removed, int) and removed:
            log.debug("the duty %s removed %d rows", self._name, removed, extra={"removed": removed})


def begin_duties(duties: Sequence[tuple[str, Duty]], rows: Rows, begin: Begin, random: Callable[[], float]) -> None:
    """Look after them in the background. ``random`` keeps workers that start together from looking together."""
    for plugin, duty in duties:
        pause = min(_LONGEST_PAUSE, duty.every) * (0.5 + random())
        begin(pause, DutyWatch(plugin, duty, rows).look, plugin)
