"""Fills new queues that start with the earliest event, in small steps between those of the relay.

Before it: a queue was declared with ``start="earliest"``. After it: the queue has everything that was relayed before it
began, and the relay feeds it like any other. Any worker may do the next step; one that dies leaves whole steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from eventbus.publishing.routing import resolve
from eventbus.publishing.ticks import RelayEngine

log = logging.getLogger("eventbus")

_LOOK_SECONDS = 5.0
"""From one look for filling queues to the next while there are none."""
_BUSY_PAUSE = 0.05


class Filling:
    """The queues that are filling, one step at a time, in turn. ``clock``: monotonic seconds.

    One step per tick: neither a busy relay nor a queue with a long past starves the other.
    """

    def __init__(
        self,
        engine: RelayEngine,
        fed: Callable[[Sequence[int]], None],
        clock: Callable[[], float],
        relayed: Callable[[Mapping[int, int]], None] = lambda _: None,
    ) -> None:
        self.queues: dict[int, str] = {}
        """Their names by number; the first one is the next."""
        self._engine = engine
        self._fed = fed
        self._relayed = relayed
        self._clock = clock
        self._look_at = 0.0

    async def step(self, limit: int) -> float | None:
        """The next step, looking at ``limit`` events at most; seconds to the one after it, ``None`` without one."""
        if not self.queues:
            if self._clock() < self._look_at:
                return None
            self.queues = dict(await self._engine.filling())
            self._look_at = self._clock() + _LOOK_SECONDS
            if not self.queues:
                return None
        queue_id, name = next(iter(self.queues.items()))
        fill = await self._engine.fill(queue_id, limit)
        if fill.deliveries:
            self._fed([queue_id])
            self._relayed({queue_id: fill.deliveries})
        match fill.state:
            case "busy" | "paused":
                return _BUSY_PAUSE
            case "unknown":
                await resolve(self._engine, fill.unknown)
            case "more":
                self.queues[queue_id] = self.queues.pop(queue_id)
            case "filled" | "active":
                del self.queues[queue_id]
                self._look_at = 0.0  # others may have begun meanwhile
                if fill.state == "filled":
                    log.info("queue %s has everything that was relayed before it began", name, extra={"queue": name})
            case _:
                assert_never(fill.state)
        return 0.0
