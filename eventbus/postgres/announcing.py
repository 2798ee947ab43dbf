"""Tells plugins and signals what happens to a worker's database, relay and neighbours.

Before it: a thread or a loop of the worker has noticed. After it: hooks and signals, on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from uuid import UUID

from eventbus import signals
from eventbus.consuming.reporting import Reporter
from eventbus.postgres.outage import Outage

log = logging.getLogger("eventbus")

_DECIDES_WITHIN: Final = 2.0
"""Seconds that the source of a pause has to say what follows from a probe."""

OnLoop = Callable[[Callable[[], None]], None]
Begin = Callable[[float | None, Callable[[], Awaitable[None]], str], None]


class Announcer:
    """``on_loop`` calls something on the worker's event loop, from any thread. ``begin`` does so in the background."""

    def __init__(self, reporter: Reporter, on_loop: OnLoop, begin: Begin) -> None:
        self.look_up: Callable[[], Awaitable[Mapping[int, str]]] | None = None
        """Asks for the names of all queues by their numbers."""
        self.end: Callable[[int, UUID], Awaitable[bool]] | None = None
        """Ends the pause that this probe has tried."""
        self._reporter = reporter
        self._on_loop = on_loop
        self._begin = begin
        self._names: dict[int, str] = {}

    def outage(self) -> Outage:
        """An outage that is told of."""
        return Outage(
            lambda reason: self._on_loop(functools.partial(self._began, reason)),
            lambda seconds: self._on_loop(functools.partial(self._ended, seconds)),
        )

    def relayed(self, counts: Mapping[int, int]) -> None:
        """The relay has moved events into queues, of this or other workers."""
        if not self._reporter.wants_relayed:
            return
        if counts.keys() <= self._names.keys():
            self._reporter.relayed({self._names[number]: count for number, count in counts.items()})
        else:
            self._begin(None, functools.partial(self._name, counts), "relayed")

    def end_probe(self, queue_id: int, name: str, token: UUID) -> None:
        """A probe was handled well: its pause ends, if whoever paused the queue does not decide otherwise soon."""

        async def end() -> None:
            await asyncio.sleep(_DECIDES_WITHIN)
            if self.end is not None and await self.end(queue_id, token):
                log.info("queue %s goes on: its probe was handled, and nobody else ends the pause", name)

        self._begin(None, end, "pauses")

    def took_over(self, workers: int, deliveries: int) -> None:
        """This worker has the deliveries of silent ones now."""
        self._reporter.tell("eventbus_took_over", workers=workers, deliveries=deliveries)
        self._reporter.send(signals.took_over, workers=workers, deliveries=deliveries)

    async def _name(self, counts: Mapping[int, int]) -> None:
        if self.look_up is not None and not counts.keys() <= self._names.keys():
            self._names.update(await self.look_up())
        known = {self._names[number]: count for number, count in counts.items() if number in self._names}
        self._reporter.relayed(known)

    def _began(self, reason: str) -> None:
        self._reporter.tell("eventbus_outage_began", reason=reason)
        self._reporter.send(signals.outage_began, reason=reason)

    def _ended(self, seconds: float) -> None:
        self._reporter.tell("eventbus_outage_ended", seconds=seconds)
        self._reporter.send(signals.outage_ended, seconds=seconds)
