"""The values that travel between the stations of the line: what was claimed, and what became of it.

Before it: the storage engine hands out claims. After it: the consumer turns each delivery into an outcome and
the engine settles it. Users meet three of the outcomes as return values of a handler: :class:`Retry`,
:class:`Discard` and :class:`DeadLetter`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Done:
    """The handler finished; the delivery never comes back."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again later. ``after`` is in seconds; ``None`` lets the subscription's retry policy decide.

    Counts as a failed attempt. At the last attempt of the policy it becomes a dead letter.
    """

    after: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the event for this queue on purpose; settles as done and is counted apart."""

    reason: str | None = None


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Give up now, whatever attempts are left; the whole event is kept with the reason."""

    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """The delivery was given back: it never started, or a stop cut it short. Counts no attempt."""


Outcome = Done | Retry | Discard | DeadLetter | Released
