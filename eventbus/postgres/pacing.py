"""How a long change is made in many short transactions: how large they are, how fast they follow, when they end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from threading import Event
from typing import Final

from eventbus.postgres.choosing import InvalidChoice

BATCH: Final = 500
_SMOOTH_SECONDS: Final = 0.1
_SLOWEST: Final = 0.001
_LEFT_TO_OTHERS: Final = 0.5


class Pace:
    """At most ``rate`` events per second, smoothly, until ``stopped`` is set; without a rate as fast as it goes.

    The transactions of a redrive or a replay keep the relay out while they last, so between two of them there is
    always half as much time as the one before took. A rate that was missed is not caught up with.
    """

    def __init__(
        self,
        rate: float | None = None,
        *,
        batch: int = BATCH,
        progress: Callable[[int], None] = lambda _: None,
        stopped: Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``progress`` gets the size of each transaction; raises :class:`InvalidChoice` for a rate that is none."""
        if rate is not None and not (math.isfinite(rate) and rate >= _SLOWEST):
            raise InvalidChoice(f"a rate of {rate:g} events per second is not possible; {_SLOWEST} is the lowest")
        self._rate = rate
        self._progress = progress
        self._clock = clock
        self._began = clock()
        self.batch = batch if rate is None else max(1, min(batch, int(rate * _SMOOTH_SECONDS)))
        """The most events of one transaction."""
        self.stopped = stopped or Event()
        """Whoever sets it ends the change after the transaction that is under way."""

    def goes_on(self, count: int, *, finished: bool) -> bool:
        """After a transaction with ``count`` events: wait until the next one may begin; false if none shall."""
        self._progress(count)
        if finished:
            return False
        now = self._clock()
        least = (now - self._began) * _LEFT_TO_OTHERS
        wait = least if self._rate is None else max(least, self._began + count / self._rate - now)
        stopped = self.stopped.wait(wait)
        self._began = self._clock()
        return not stopped
