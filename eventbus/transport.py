"""The seam between the line and the storage engine: the values that cross it, and what an engine must do.

Before it: publishing has committed events. After it: the relay moves them into queues, the consumer claims, handles
and settles them. Users meet three of the outcomes as return values of a handler: :class:`Retry`, :class:`Discard`
and :class:`DeadLetter`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from uuid import UUID

from eventbus.errors import Unavailable
from eventbus.event import Event


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


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome as the engine stores it. ``delay`` in seconds; ``error`` is the failure as JSON types."""

    outcome: Literal["done", "retry", "dead", "released", "deferred", "parked"]
    """``deferred``: again after ``delay``, without counting an attempt. ``parked``: an earlier event of its key is not
    done."""
    delay: float = 0.0
    reason: str | None = None
    error: Mapping[str, Any] | None = None
    kind: Literal["duplicate", "discarded"] | None = field(default=None, compare=False)
    """Why it is done although no handler ended well."""
    say: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Logs it, if it stands; None: that is done."""


DONE = Verdict("done")
DUPLICATE = Verdict("done", kind="duplicate")
RELEASED = Verdict("released")
PARKED = Verdict("parked")
MISSING = Verdict("dead", reason="event missing: the outbox no longer has it")


@dataclass(slots=True, eq=False)
class Lease:
    """What a worker holds and must settle: a range of one lane, or (with ``exception_id``) one exception."""

    queue_id: int
    token: UUID
    opened_at: float
    """Monotonic seconds."""
    claim_id: int = 0
    lo: int = 0
    hi: int = 0
    exception_id: int = 0
    crashes: int = 0
    ordered: bool = False
    """Of its deliveries with the same key, one runs after the other."""
    size: int = 0
    """Payload bytes in memory."""
    unfinished: int = 0
    started: int = 0
    """Highest seq whose handler was started; ``lo - 1`` before the first."""
    done: list[int] = field(default_factory=list)
    """Finished seqs that the engine has not been told of."""
    verdicts: list[tuple[int, Verdict]] = field(default_factory=list)
    """Everything but done, by seq, that the engine has not been told of."""
    recorded: set[int] = field(default_factory=set)
    """Seqs that the engine has been told of while the claim stayed open."""
    offered: dict[int, Delivery] = field(default_factory=dict)
    """Those of an ordered claim that a runner has: waiting for a slot, or running."""
    executed: list[tuple[str, int]] = field(default_factory=list)
    """Event ids and replays of the executions that its settlement completes, where they are recorded."""
    probe: bool = False
    """Its one delivery is let through although the queue is paused, to see whether the pause can end."""
    observed: dict[int, Delivery] = field(default_factory=dict)
    """Its deliveries by seq, if somebody wants to know what comes of each."""
    every: int = 0
    """How many calls that are fast each of ``sample`` stands for; 0 if nobody wants to know how long they take."""
    sample: Sequence[Delivery] = ()
    kept: list[Delivery] = field(default_factory=list)
    """Of a sampled lease, those that were slow or did not simply end well."""
    kinds: dict[int, Verdict] = field(default_factory=dict)
    """What is done although no handler ended well, by seq."""
    dropped: bool = False
    """The worker lost it; whatever its handlers return is discarded."""


Twin = Literal["completed", "pending"] | None
"""What another delivery of the same event has come to in this queue, if its executions are recorded."""


class Delivery:
    """One event on its way to one handler call."""

    __slots__ = ("began", "error", "event", "following", "lease", "seq", "spent", "twin")

    def __init__(self, event: Event | None, lease: Lease, seq: int, twin: Twin = None) -> None:
        self.event = event
        """``None`` when the outbox no longer has the event; settles as a dead letter."""
        self.lease = lease
        self.seq = seq
        self.twin = twin
        self.following: Delivery | None = None
        """The next event of the same key, in an ordered queue: it starts when this one is done."""
        self.began = 0.0
        """When its handler was called, in monotonic seconds."""
        self.spent = 0.0
        """Seconds that the handler took."""
        self.error: BaseException | None = None
        """What the handler raised, until the consumer knows."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing more of a queue can be claimed now. ``seconds``: when to ask again, ``None`` if only a resume ends it.

    ``waiting``: something of it waits, retries that are not due yet included.
    """

    seconds: float | None
    waiting: bool


@dataclass(frozen=True, slots=True)
class Claimed:
    """What one claim brought: deliveries per queue, and the queues that have more.

    Of an ordered queue only the first delivery of each key is listed; the others follow it. ``busy`` are the queues
    that another worker was claiming from, ``held`` those whose rest waits for a claim that is open. Of a queue in
    ``paused`` the probe is listed at most; one in ``probing`` could have one, if there were anything fresh.
    """

    deliveries: Mapping[int, Sequence[Delivery]]
    more: frozenset[int] = frozenset()
    busy: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    paused: Mapping[int, Pause] = field(default_factory=dict)
    probing: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Due:
    """When the next exceptions of a queue are due, in seconds from now; ``None`` when none waits."""

    due_in: float | None
    crashed_in: float | None


@dataclass(frozen=True, slots=True)
class ClaimedDue:
    """Exceptions that were due, and what comes next in each queue that was looked at and is not ``paused``."""

    deliveries: Mapping[int, Sequence[Delivery]]
    next: Mapping[int, Due]
    paused: Mapping[int, Pause] = field(default_factory=dict)
    probing: frozenset[int] = frozenset()


class ConsumerEngine(Protocol):
    """What the consumer needs. Every call raises :class:`eventbus.errors.Unavailable` when the database is away.

    :class:`LeaseLost` says that other workers took this one over: forget everything and ``register`` again.
    """

    async def register(self) -> None:
        """Become a live worker under a new incarnation id."""

    async def unregister(self) -> None:
        """Leave. What is still held comes back as crashed."""

    async def claim(self, rooms: Mapping[int, int], max_bytes: int) -> Claimed:
        """Claim the next range of each queue, at most ``rooms[queue]`` events each; 0 only asks whether it is paused.

        Of a queue whose pauses may be over by now, at most one: the probe, for which all other workers wait.
        """

    async def claim_due(self, rooms: Mapping[int, int], max_bytes: int, *, alone: bool) -> ClaimedDue:
        """Claim exceptions that are due, as ``claim`` does. ``alone``: one that was running when a worker died."""

    async def settle(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Settle finished leases; returns those that were lost, of which nothing was written."""

    async def record_progress(self, lease: Lease) -> bool:
        """Tell the engine of ``lease.done`` and ``lease.verdicts`` and empty them; false when the lease was lost."""

    async def detach(self, lease: Lease, seqs: Sequence[int]) -> Mapping[int, int] | None:
        """Settle an ordered claim while ``seqs`` still run, with ``lease.done`` and ``lease.verdicts``; empties them.

        What still runs is held as an exception each: their numbers by seq, 0 for one that has committed meanwhile. What
        has no outcome comes back as never started. ``None``: the lease was lost, and nothing was written.
        """

    async def release_unknown(self, known: Collection[Lease], *, thorough: bool) -> int:
        """Give back what the database says we hold and ``known`` does not contain; returns how many deliveries.

        ``thorough``: a reply may have been lost, or the server crashed; look at everything this worker ever claimed.
        """

    async def pause(
        self, queue_id: int, source: str, reason: str, seconds: float | None, probe_seconds: float | None
    ) -> bool:
        """Pause a queue for all workers, or pause it anew; each ``source`` has one pause, which only it resumes.

        ``seconds``: how long, ``None`` until it is resumed. With ``probe_seconds`` it does not end by itself then: one
        event is claimed as a probe (:attr:`Lease.probe`), and the source resumes or pauses again within that time,
        or the pause begins again. Running handlers go on. Raises ``ValueError`` for the source ``manual``, which is
        the operator's; after :class:`~eventbus.errors.Unavailable` it may be paused or not. False: the queue is gone.
        """

    async def resume(self, queue_id: int, source: str) -> bool:
        """End the pause of one source; false: there was none. Raises as ``pause`` does."""

    async def free_probe(self, queue_id: int, source: str, token: UUID) -> bool:
        """The probe with this lease's token has told nothing: let another be taken at once. False: it is too late."""

    async def recover(self) -> None:
        """Wait, with back-off, until claiming can work again."""

    async def recover_settling(self) -> None:
        """Wait, with back-off, until settling can work again."""


class LeaseLost(Exception):
    """This worker was taken over."""


class StatementCancelled(Unavailable):
    """The server cancelled a statement, by a timeout or an administrator; smaller steps may pass."""
