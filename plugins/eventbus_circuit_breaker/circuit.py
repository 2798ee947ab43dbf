"""The breaker of one queue as one process sees it: a state, and what to do about a failure. Decides, and does nothing.

::

    closed ──enough failures──► doubtful ──all that ran failed, too──► open ──a probe succeeded──► closed
       ▲                           │                                  ▲  │
       └────── a call succeeded ───┘                                  └──┘ a probe failed: longer

Whether the queue is open is a matter of the database, where all processes see it; this is what one of them knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from eventbus.plugins import Failure
from eventbus_circuit_breaker.options import Options
from eventbus_circuit_breaker.tally import Tally

_SPREAD: Final = 0.1
"""Events that are postponed come back within this share of the pause after its end, not all at once."""

State = Literal["closed", "doubtful", "open"]
Step = Literal["doubt", "open", "reopen"]


@dataclass(frozen=True, slots=True)
class Load:
    """What the worker knows of a queue: calls that ended so far, those that failed included, and calls that run."""

    finished: int
    running: int


@dataclass(frozen=True, slots=True)
class Reaction:
    """What to do about a failure. ``postpone``: seconds until its event runs again, without an attempt counted."""

    postpone: float | None = None
    step: Step | None = None


NOTHING: Final = Reaction()


class Circuit:
    """One queue. ``random`` returns numbers from 0 to 1; all times are monotonic seconds."""

    def __init__(self, options: Options, random: Callable[[], float], finished: int, now: float) -> None:
        self._options = options
        self._random = random
        self._tally = Tally(options, finished, now)
        self._successes = 0
        """When it became doubtful."""
        self.state: State = "closed"
        self.since = now
        """When it came to that state here."""
        self.until = now
        """When the pause ends, if it is open; when to open without more proof, if it is doubtful."""
        self.trips = 0
        """How often in a row it was opened, if it is open."""
        self.reason = ""
        """Why it became doubtful, or opened."""

    def failed(self, failure: Failure, load: Load, now: float, *, counts: bool) -> Reaction:
        """A call has failed, which is among ``load.finished``."""
        if self.state == "open" and not failure.probe and failure.started_at > self.since:
            self.close(load.finished - 1, now)  # it could only begin because another process has closed it
        self._tally.failed(failure.started_at, load.finished, now, counts=counts)
        if not counts:
            return NOTHING
        if failure.probe:
            self.reason = "the probe failed"
            self.open(self._options.pause(self.trips + 1), self.trips + 1, now)
            return Reaction(self._postponed(now), "reopen")
        if self.state != "closed":
            return Reaction(self._postponed(now))
        return Reaction(step=self._next_step(load, now))

    def _next_step(self, load: Load, now: float) -> Step | None:
        if reason := self._tally.row:
            self.state, self.since, self.until = "doubtful", now, now + self._options.patience
            self._successes = self._tally.successes
            self.reason = reason
            return "doubt"
        if reason := self._tally.share(load.finished, load.running):
            self.reason = reason
            self.open(self._options.first_pause, 1, now)
            return "open"
        return None

    def _postponed(self, now: float) -> float:
        """Seconds until an event may run again that failed while the queue is not to be used."""
        pause = self._options.first_pause if self.state == "doubtful" else max(0.0, self.until - now)
        return pause + self._random() * _SPREAD * max(pause, self._options.first_pause)

    def doubt(self, load: Load, now: float) -> Literal["wait", "open", "close"]:
        """What to do while it is doubtful.

        With several handlers at once, quick failures overtake slow successes: so the calls that run get their chance.
        """
        if self._tally.look(load.finished, now) > self._successes:
            self.state, self.since = "closed", now
            return "close"
        if load.running and now < self.until:
            return "wait"
        self.open(self._options.first_pause, 1, now)
        return "open"

    def open(self, seconds: float, trips: int, now: float) -> None:
        """The queue is paused for so many seconds more. Calls that began before are stragglers from now on."""
        self.state, self.since, self.until, self.trips = "open", now, now + seconds, trips

    def close(self, finished: int, now: float) -> None:
        """It is open no more, and everything is counted anew."""
        self.state, self.since, self.until, self.trips = "closed", now, now, 0
        self._tally = Tally(self._options, finished, now)

    def look(self, finished: int, now: float) -> None:
        """Note how many calls have ended by now; about once a second."""
        self._tally.look(finished, now)
