"""What the model keeps, one class per table of the engine, and what its operations answer.

All of it is plain data: a model is copied by ``copy.deepcopy``. Times are seconds by the one clock that the caller
brings; a token and a worker are numbers, written as UUIDs because programs see UUIDs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

MEBIBYTE: Final = 1024 * 1024
NOBODY: Final = UUID(int=0)


class LeaseLost(Exception):
    """The worker is not live, or does not hold the delivery any more: nothing was written. EB001, EB003."""


class AlreadyCompleted(Exception):
    """Another delivery of the same event has completed its execution: the transaction must roll back. EB004."""


class Waits(Exception):
    """The database would wait here for a transaction that is open; the model has nobody to wait for."""


@dataclass(frozen=True, slots=True)
class Event:
    """A row of the outbox. ``size``: bytes of the payload as text."""

    id: int
    event_id: str
    topic: str
    payload: str
    key: str | None
    headers: Mapping[str, str] | None
    priority: int
    published_at: float

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return len(self.payload.encode())


@dataclass(frozen=True, slots=True)
class Scheduled:
    """An event that is published when it is due; ``id`` counts the scheduled ones."""

    id: int
    due_at: float
    event: Event


@dataclass(slots=True)
class Transaction:
    """What a publisher has written and not committed."""

    events: list[Event] = field(default_factory=list)
    scheduled: list[Scheduled] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    savepoints: list[tuple[int, list[Scheduled], int]] = field(default_factory=list)


@dataclass(slots=True)
class Queue:
    """A queue and how it is split into lanes."""

    id: int
    name: str
    patterns: frozenset[str]
    kind: str = "plain"
    lanes: int = 1
    tracking: str = "none"
    when_exhausted: str = "park"

    @property
    def ordered(self) -> bool:
        """Whether the events of a key are handled one after the other."""
        return self.kind == "ordered"


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event in one lane of one queue."""

    queue_id: int
    lane: int
    seq: int
    event: Event


@dataclass(slots=True)
class Range:
    """A claim. ``progress``: what is recorded of single deliveries; ``settled``: none while it is open."""

    id: int
    token: UUID
    worker: UUID
    queue_id: int
    lane: int
    lo: int
    hi: int
    progress: dict[int, str] = field(default_factory=dict)
    settled: str | None = None


@dataclass(slots=True)
class Exceptional:
    """A delivery that did not go straight, or, with ``range_hi``, a released range that never started."""

    id: int
    queue_id: int
    lane: int
    seq: int
    due_at: float
    event: Event | None = None
    range_hi: int | None = None
    key: str | None = None
    state: str = "waiting"
    attempts: int = 0
    crashes: int = 0
    alone: bool = False
    finished: bool = False
    token: UUID | None = None
    worker: UUID | None = None
    redriven_from: int | None = None
    first_error: Any = None
    last_error: Any = None


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter. ``blocks``: later events of its key wait until it is redriven or discarded."""

    id: int
    queue_id: int
    lane: int
    seq: int
    event: Event
    attempts: int
    crashes: int
    blocks: bool
    reason: str | None
    died_at: float
    redriven_from: int | None = None
    first_error: Any = None
    last_error: Any = None


@dataclass(slots=True)
class Execution:
    """What is known of one event in one queue; ``owner``: the outbox id of the delivery that runs it."""

    owner: int | None
    completed_at: float | None = None


@dataclass(slots=True)
class Worker:
    """A worker. ``started``: the highest started seq of each open claim, as its last heartbeat said."""

    heartbeat_at: float
    live: bool = True
    started: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Pause:
    """The pause of one source. ``until`` none: without end; ``probe_until``: a probe is out that long."""

    reason: str
    until: float | None
    seconds: float | None
    probe_seconds: float | None
    probe_until: float | None = None
    probe_token: UUID | None = None
    probe_by: UUID | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """What a step of the relay did; see ``tick`` in the engine."""

    state: str
    more: bool = False
    events: int = 0
    deliveries: int = 0
    fed: Sequence[int] = ()
    unknown: Sequence[str] = ()
    due_in: float | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """One claimed range and its events. Of what was parked there is nothing."""

    id: int
    token: UUID
    queue_id: int
    seqs: Sequence[int]
    event_ids: Sequence[str]
    lane: int
    payloads: Sequence[Any]
    keys: Sequence[str | None]
    twins: Sequence[str | None]

    @property
    def lo(self) -> int:
        """First delivery that is to be handled."""
        return self.seqs[0]

    @property
    def hi(self) -> int:
        """Last delivery that is to be handled."""
        return self.seqs[-1]


@dataclass(frozen=True, slots=True)
class Held:
    """One exception that ``claim_due`` gave, or that ``detach`` left."""

    id: int
    token: UUID
    attempts: int = 0
    crashes: int = 0
    event_id: str | None = None
    payload: Any = None
    key: str | None = None
    twin: str | None = None
    redriven: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """What a claim is told of a pause: ``paused``, ``probe`` or ``probing``, and for how many seconds."""

    state: str
    seconds: float | None = None
