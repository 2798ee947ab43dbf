"""What a run of ``eventbus torture`` is judged by: promises, what handlers and faults wrote down, what tables say.

Before it: ``history`` and ``postgres`` fill these in. After it: ``checker`` judges them. Imports nothing of the bus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

FOREVER: Final = 2**63
SUCCESSES: Final = frozenset({"done", "discard"})


@dataclass(frozen=True, slots=True)
class Promise:
    """One queue and what is promised of it. Every published event belongs into it."""

    queue: str
    by_event_id: bool = False
    """An event id that was published twice is one event."""
    effects: bool = False
    """Successes are rows of the effect table, exactly one of each event id."""
    ordered: bool = False
    parks: bool = False
    """Nothing of a key passes a dead letter."""
    max_attempts: int = 3


@dataclass(frozen=True, slots=True)
class Published:
    """A committed event, as the business table says. ``sequence`` is the order in its key."""

    token: str
    event_id: str
    key: str | None
    sequence: int
    due: int
    """Nobody may see it earlier."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a handler for one event. ``told`` is none when it never came to its end."""

    queue: str
    token: str
    event_id: str
    attempt: int
    pid: int
    name: str
    """Unique; an effect names it."""
    started: int
    ended: int = FOREVER
    told: str | None = None

    def __str__(self) -> str:
        end = "…" if self.ended == FOREVER else f"{self.ended / 1e9:.4f}"
        when = f"{self.started / 1e9:.4f}-{end}"
        return f"[{self.queue} {self.token} attempt {self.attempt} pid {self.pid} {when} {self.told}]"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done to a process, or, without ``pid``, to connections of any of them."""

    kind: str
    at: int
    until: int
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class History:
    """What processes and faults wrote down. ``exits``: the exit codes of those that were asked to stop, by pid."""

    calls: Sequence[Call]
    faults: Sequence[Fault] = ()
    exits: Sequence[tuple[int, int]] = ()
    lease: int = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Tables:
    """What the database says at the end."""

    published: Mapping[str, Published]
    delivered: Counter[tuple[str, str]]
    """Deliveries by queue and token."""
    undone: Sequence[tuple[str, str, str]] = ()
    """Queue, token and place of what is neither done nor dead."""
    letters: Sequence[tuple[str, str, int]] = ()
    """Queue, token and attempts of the dead letters."""
    effects: Sequence[tuple[str, str, str]] = ()
    """Queue, event id and call."""
