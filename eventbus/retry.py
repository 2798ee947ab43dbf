"""How long a failed delivery waits before its next attempt, and when it gives up.

Pure arithmetic. Before it: the consumer has an outcome that asks for another attempt. After it: the engine writes
the delivery with the moment at which it is due, or a dead letter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from eventbus.errors import ConfigurationError

LONGEST_WAIT: Final = 365 * 86_400.0
"""No wait is longer than this many seconds, whoever asks for it."""

_SHORTEST_FIRST: Final = 0.001
_MOST_ATTEMPTS: Final = 1_000_000
_SPREAD: Final = 0.9


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential waits with jitter, in seconds: ``first``, ``first * factor``, … and never more than ``cap``.

    With ``jitter`` each wait is drawn evenly from a tenth of that value to 1.9 times it, still never more than
    ``cap``: the average stays the exponential one until the cap is near, retries that failed together spread out,
    and no wait is zero. Without it each wait is exactly that value.

    ``max_attempts`` counts calls of the handler, the first included: 1 means no retry. Raises
    :class:`~eventbus.errors.ConfigurationError` for numbers that cannot work.
    """

    max_attempts: int = 5
    first: float = 1.0
    factor: float = 2.0
    cap: float = 300.0
    jitter: bool = True

    def __post_init__(self) -> None:
        if not _is_whole(self.max_attempts) or not 1 <= self.max_attempts <= _MOST_ATTEMPTS:
            raise _refusal("max_attempts", self.max_attempts, f"a whole number from 1 to {_MOST_ATTEMPTS:,}")
        if not _is_number(self.first) or not _SHORTEST_FIRST <= self.first <= LONGEST_WAIT:
            raise _refusal("first", self.first, f"seconds from {_SHORTEST_FIRST} to {LONGEST_WAIT:,.0f}")
        if not _is_number(self.factor) or not 1 <= self.factor < math.inf:
            raise _refusal("factor", self.factor, "a number from 1 up; 1 makes all waits equal")
        if not _is_number(self.cap) or not self.first <= self.cap <= LONGEST_WAIT:
            raise _refusal("cap", self.cap, f"seconds from first ({self.first:g}) to {LONGEST_WAIT:,.0f}")
        if not isinstance(self.jitter, bool):
            raise _refusal("jitter", self.jitter, "True or False")

    def delay(self, failed_attempts: int, random: Callable[[], float]) -> float:
        """Seconds to wait after the ``failed_attempts``-th failure; above zero and at most ``cap``, whatever the count.

        ``random`` returns a number from 0 to 1; it is not called without ``jitter``. A count below 1 is read as 1.
        """
        wait = self._exponential(failed_attempts)
        if not self.jitter:
            return wait
        shortest, longest = wait * (1 - _SPREAD), min(self.cap, wait * (1 + _SPREAD))
        return min(max(shortest, shortest + (longest - shortest) * random()), longest)

    def longest_path(self) -> float:
        """Seconds that an event waits at most, over all its attempts, before it gives up."""
        path = 0.0
        for failed in range(1, self.max_attempts):
            wait = self.delay(failed, _highest)
            if wait >= self.cap:
                return path + (self.max_attempts - failed) * wait
            path += wait
        return path

    def exhausted(self, failed_attempts: int) -> bool:
        """True when no attempt is left after ``failed_attempts`` failures."""
        return failed_attempts >= self.max_attempts

    def _exponential(self, failed_attempts: int) -> float:
        try:
            return float(min(self.cap, self.first * float(self.factor) ** (max(failed_attempts, 1) - 1)))
        except OverflowError:
            return float(self.cap)


def _highest() -> float:
    return 1.0


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refusal(option: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"RetryPolicy({option}={value!r}): {option} must be {wanted}")
