"""One attempt at a time to reach a database that is away, for all connections of a worker to it.

Before it: whoever needs a connection asks for a turn. After it: ``connecting`` makes one attempt with it. While all is
well every turn is free. Once an attempt has failed or a connection broke, the breaker is open: one attempt at a time
is made, the probe, by whoever comes first when the back-off is over; the others wait for what comes of it without
connecting, and all go on when it succeeds. Nothing here talks to a database.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import psycopg

from eventbus.errors import Unavailable
from eventbus.postgres.outage import Outage

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
_PROBE_SECONDS: Final = 10.0
"""A probe that has lasted longer keeps nobody else from trying."""
_URGENT_SECONDS: Final = 1.0
"""The same for those who are in a hurry."""


class Backoff:
    """How long to wait after failures: 0.1 s doubling to ``longest``, less up to a half. ``random``: from 0 to 1."""

    def __init__(self, random: Callable[[], float] = random.random, longest: float = LONGEST_PAUSE) -> None:
        self._random = random
        self._longest = longest
        self.failures = 0
        """How many there were in a row."""

    def pause(self) -> float:
        """Seconds from the last failure to the next attempt."""
        ceiling = min(self._longest, FIRST_PAUSE * 2.0 ** min(max(0, self.failures - 1), 10))
        return ceiling * (0.5 + self._random() / 2)


class Turn:
    """The right to one attempt, as a context manager around it.

    An attempt that ends without an error has succeeded; with an error of the driver it has failed; with another one
    (it was cancelled) nothing is known, and the next one tries.
    """

    def __init__(self, breaker: Breaker, since: float, opening: int | None) -> None:
        self.since = since
        self.opening = opening
        """Which outage it probes, by number; None: it was free."""
        self._breaker = breaker

    def __enter__(self) -> None:
        """Begin the attempt."""

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._breaker.succeeded(self)
        elif isinstance(error, psycopg.Error):
            self._breaker.failed(self)
        else:
            self._breaker.abandoned(self)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """Somebody who wants a turn. ``until`` is when it stops waiting for one."""

    wake: Callable[[], None]
    until: float
    urgent: bool = False
    given_up: Callable[[], bool] = lambda: False


class Breaker:
    """Guards the way to one DSN. For any thread, and for tasks of any loop. ``clock`` in monotonic seconds.

    ``outage`` is where the connections that it guards report whether they work; more breakers may share one.
    ``longest`` is the longest pause between two probes, in seconds.
    """

    def __init__(
        self,
        outage: Outage,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
        longest: float = LONGEST_PAUSE,
    ) -> None:
        self.outage = outage
        self._clock = clock
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []
        self._open = False
        self._opening = 0
        self._closed_at = -math.inf
        self._backoff = Backoff(random, longest)
        self._not_before = 0.0
        self._probe: Turn | None = None

    async def turn(self, patience: float = math.inf) -> Turn:
        """Wait for a turn; the attempt follows at once. Raises :class:`Unavailable` after ``patience`` seconds."""
        news = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(news.set)

        with self._waiting(_Waiter(wake, self._clock() + patience)) as waiter:
            while not isinstance(answer := self._look(waiter), Turn):
                with suppress(TimeoutError):
                    async with asyncio.timeout(answer):
                        await news.wait()
                news.clear()
        return answer

    def turn_blocking(
        self, patience: float = math.inf, *, urgent: bool = False, given_up: Callable[[], bool] = lambda: False
    ) -> Turn:
        """The same for threads; also raises :class:`Unavailable` when ``given_up`` is true, see ``nudge``.

        While somebody ``urgent`` waits, nobody else makes the next probe.
        """
        news = threading.Event()
        with self._waiting(_Waiter(news.set, self._clock() + patience, urgent, given_up)) as waiter:
            while not isinstance(answer := self._look(waiter), Turn):
                news.wait(answer)
                news.clear()
        return answer

    def nudge(self) -> None:
        """Let everybody who waits see whether it has given up."""
        with self._lock:
            waiters = tuple(self._waiters)
        for waiter in waiters:
            waiter.wake()

    def broke(self, proven_at: float | None = None) -> None:
        """A connection that stood is lost. ``proven_at``: when it worked last, by our clock; None: just now.

        If it worked last before the end of the last outage, then it was that outage that cut it, and means nothing.
        """
        with self._lock:
            if not self._open and (proven_at is None or proven_at >= self._closed_at):
                self._trip()

    def succeeded(self, turn: Turn) -> None:
        """An attempt has led to a connection that answers. Closes the breaker if it was a probe of this outage."""
        with self._lock:
            if self._open and turn.opening == self._opening:
                self._open = False
                self._probe = None
                self._closed_at = self._clock()
        self.nudge()

    def failed(self, turn: Turn) -> None:
        """An attempt has failed. Those that began before the last outage ended, or before this one, mean nothing."""
        with self._lock:
            if turn is self._probe:
                self._probe = None
                self._back_off()
            elif not self._open and turn.since >= self._closed_at:
                self._trip()
        self.nudge()

    def abandoned(self, turn: Turn) -> None:
        """An attempt was given up before anything came of it; somebody else may try at once."""
        with self._lock:
            if turn is self._probe:
                self._probe = None
        self.nudge()

    def _trip(self) -> None:
        self._open = True
        self._opening += 1
        self._backoff.failures = 0
        self._back_off()

    def _back_off(self) -> None:
        self._backoff.failures += 1
        self._not_before = self._clock() + self._backoff.pause()

    def _look(self, waiter: _Waiter) -> Turn | float:
        """A turn, or after how many seconds to look again if nobody wakes us before."""
        with self._lock:
            now = self._clock()
            if waiter.given_up():
                raise Unavailable("there is no connection to the database, and nobody waits for one any more")
            if not self._open:
                return Turn(self, now, None)
            ready_at = self._ready_at(waiter)
            if ready_at <= now:
                self._probe = Turn(self, now, self._opening)
                return self._probe
            if waiter.until <= now:
                raise Unavailable("the database is away; this worker tries to reach it until it is back")
            return min(ready_at, waiter.until, now + _PROBE_SECONDS) - now

    def _ready_at(self, waiter: _Waiter) -> float:
        if not waiter.urgent and any(other.urgent for other in self._waiters):
            return math.inf
        if self._probe is None:
            return self._not_before
        return self._probe.since + (_URGENT_SECONDS if waiter.urgent else _PROBE_SECONDS)

    @contextmanager
    def _waiting(self, waiter: _Waiter) -> Iterator[_Waiter]:
        with self._lock:
            self._waiters.append(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters.remove(waiter)
            if waiter.urgent:
                self.nudge()  # the others may probe now
