"""Counts the failures of one queue in one process. Nothing is done here for a call that succeeds.

Before it: a handler has failed. After it: the circuit decides. How many calls succeeded follows from how many have
finished, which the worker counts anyway. With several handlers at once, calls end in another order than they began in:
slow failures of a queue that does well come in a row. So a failure counts in a row only if, as far as is known, no call
has succeeded since it began.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from eventbus_circuit_breaker.options import Options

_MARKS: Final = 10
"""Into so many parts the window is cut; how far back it reaches is exact to one of them."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What had been counted at one moment."""

    at: float
    finished: int
    counted: int


class Tally:
    """Failures in a row, and their share of a window. ``finished``: calls that ended so far, failures included.

    All times are monotonic seconds; ``finished`` may have been more than 0 when it began.
    """

    def __init__(self, options: Options, finished: int, now: float) -> None:
        self._options = options
        self._begun_with = finished
        self._told = 0
        """Failed calls, counted or not."""
        self._counted = 0
        self._row = 0
        self._successes = 0
        self._fruitless_since = now
        """No success is known since then."""
        self._marks: deque[Mark] = deque([Mark(now, finished, 0)])

    @property
    def row(self) -> str | None:
        """What to say of the failures in a row, if they are enough."""
        if self._row < self._options.failures:
            return None
        return f"{self._row} failures in a row" if self._row > 1 else "a failure"

    @property
    def successes(self) -> int:
        """Calls that ended well before the last look or failure."""
        return self._successes

    def failed(self, began: float, finished: int, now: float, *, counts: bool) -> None:
        """One call has failed, which is among ``finished``. One that does not count breaks no row either."""
        self._told += 1
        self.look(finished, now)
        if counts:
            self._counted += 1
            self._row += began >= self._fruitless_since

    def look(self, finished: int, now: float) -> int:
        """How many calls ended well by now. The more looks, the better it is known when."""
        successes = finished - self._begun_with - self._told
        if successes > self._successes:
            self._successes, self._fruitless_since, self._row = successes, now, 0
        if now - self._marks[-1].at >= self._options.window / _MARKS:
            self._marks.append(Mark(now, finished, self._counted))
        while len(self._marks) > 1 and self._marks[1].at <= now - self._options.window:
            self._marks.popleft()
        return successes

    def share(self, finished: int, running: int) -> str | None:
        """What to say of the share of the window, if it is too high. Calls that run count as good ones."""
        options, oldest = self._options, self._marks[0]
        failures, calls = self._counted - oldest.counted, finished - oldest.finished + running
        if options.ratio is None or calls < options.least_calls or failures < options.ratio * calls:
            return None
        return f"{failures} of {calls} calls failed within {options.window:g} s"
