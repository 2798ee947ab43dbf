"""What hooks get and what they give: the values that cross the border between the bus and its plugins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol
from uuid import UUID

from eventbus.event import Event
from eventbus.settings import Settings

OutcomeName = Literal["done", "duplicate", "discarded", "retry", "dead", "released", "deferred", "parked"]
"""What came of a delivery.

``duplicate``: not handled, because a copy of the event had been in this queue. ``released``: given back before the
handler ended, no attempt counted. ``deferred``: again later, no attempt counted. ``parked``: an earlier event of its
key is not done.
"""


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """One queue of this process, as its subscription says. ``batch`` None: its handler gets one event at a time."""

    name: str
    patterns: tuple[str, ...]
    handler: str
    """The function, ``module.qualified_name``."""
    is_async: bool
    idempotent: bool
    transactional: bool
    ordered: bool
    batch: int | None
    concurrency: int
    timeout: float | None
    """Seconds."""
    max_attempts: int
    discard_on: tuple[type[BaseException], ...] = ()
    """What it raises to drop an event."""


@dataclass(slots=True)
class Call:
    """One call of a handler, while it goes on. ``events`` has one element unless the handler takes batches."""

    queue: str
    events: Sequence[Event]
    outcomes: Sequence[Any] = ()
    """After the handler returned: one for each event, a :class:`Done`, :class:`Retry`, :class:`Discard`,
    :class:`DeadLetter` or an exception. Empty while it runs and when it raised."""

    @property
    def event(self) -> Event:
        """The first event."""
        return self.events[0]


@dataclass(frozen=True, slots=True)
class Failure:
    """A handler's call that failed for one event, before the bus has stored anything of it."""

    queue: str
    event: Event
    error: BaseException | None
    """What it raised; None if it returned :class:`Retry` or :class:`DeadLetter`."""
    outcome: Literal["retry", "dead"]
    """What becomes of it unless a plugin postpones it."""
    probe: bool
    """It was the one event that tried a paused queue."""
    started_at: float = 0.0
    """When the handler was called, in ``time.monotonic()`` seconds; of a batch, the whole call."""


@dataclass(frozen=True, slots=True)
class Postpone:
    """Run it again after ``seconds``, without counting this attempt."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one delivery, stored."""

    queue: str
    event: Event | None
    """None if the outbox no longer had it."""
    outcome: OutcomeName
    attempt: int
    started_at: float
    """When the handler was called, in ``time.monotonic()`` seconds; 0 if it was not."""
    seconds: float
    """How long the handler took; of a batch, the whole call."""
    probe: bool = False
    delay: float = 0.0
    """Seconds until a retry or a deferred delivery is due."""
    reason: str | None = None
    error: Mapping[str, Any] | None = None
    """``type``, ``message`` and ``traceback`` as text."""


class Timing(NamedTuple):
    """How long one call of a handler took. ``calls``: for how many calls of its group it stands."""

    published_at: datetime | None
    """By the database's clock; None unless this was the first attempt of an event that nobody replayed or delayed."""
    started_at: float
    """``time.monotonic()`` seconds."""
    seconds: float
    calls: int = 1


def by_calls(timings: Iterable[Timing]) -> Mapping[int, Sequence[Timing]]:
    """Those that stand for equally many calls together, so that a histogram can take each group at once."""
    groups: dict[int, list[Timing]] = {}
    for timing in timings:
        groups.setdefault(timing.calls, []).append(timing)
    return groups


class Counted(Protocol):
    """What came of a group of deliveries of one queue, in numbers."""

    @property
    def counts(self) -> Mapping[OutcomeName, int]:
        """How many of each outcome."""

    @property
    def calls(self) -> int:
        """How many calls of the handler have come to an end: done, discarded, retried or given up."""

    @property
    def failures(self) -> int:
        """How many calls failed: those that are retried, were given up, or were postponed by a plugin."""

    @property
    def timings(self) -> Sequence[Timing]:
        """How long calls took: each that took longer than a millisecond or failed; of the others a sample.

        Of a claim of less than 40 deliveries it is all of them. The sum of their ``calls`` is that of the group.
        """


class Settled(Protocol):
    """A group of deliveries of one queue whose outcomes were stored together."""

    @property
    def queue(self) -> str:
        """Its name."""

    @property
    def counts(self) -> Mapping[OutcomeName, int]:
        """How many of each outcome; cheap."""

    @property
    def results(self) -> Sequence[Result]:
        """One per delivery; made when they are asked for."""

    @property
    def has_failures(self) -> bool:
        """Whether there is a retry or a dead letter among them; cheap."""


@dataclass(frozen=True, slots=True)
class Migration:
    """A step of a plugin's own tables: ``name`` (``0001_tables``) and SQL with ``{schema}`` for the bus's schema.

    The first line of the SQL is a comment that says what the step is for. Applied by ``eventbus migrate``, each step in
    one transaction, once, in the order of the names. A step is not changed once it is released.
    """

    name: str
    sql: str
    rights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What a role that consumes may do with the tables of this step: ``{"stats_minutes": ("SELECT", "INSERT")}``."""


@dataclass(frozen=True, slots=True)
class Duty:
    """Upkeep of the database, done by one worker at a time.

    ``run`` gets a function that runs SQL (``{schema}`` is filled in) and returns rows; it works in small steps and
    returns how many rows it removed. Each duty fails alone: that is one line in the log, and it is tried again after
    ``every`` seconds.
    """

    name: str
    every: float
    run: Callable[[Callable[..., Awaitable[Sequence[tuple[Any, ...]]]]], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a health check found. ``hint``: what to do about it."""

    level: Literal["ok", "degraded", "stalled"]
    code: str
    """Short and stable, for machines: ``circuit_open``."""
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a page answers. ``content_type`` as in HTTP."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the HTTP port of a worker. ``answer`` runs in a thread; it gets the query's parameters."""

    path: str
    answer: Callable[[Mapping[str, str]], Answer]
    title: str = ""


class WorkerHandle(Protocol):
    """The worker as a plugin sees it. On its event loop unless something else is said."""

    settings: Settings
    queues: Mapping[str, QueueFacts]

    @property
    def worker_id(self) -> UUID:
        """The incarnation under which the worker is registered; a worker that was taken over gets a new one."""

    async def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement in autocommit mode on a connection that plugins share; ``{schema}`` is filled in.

        Raises :class:`~eventbus.errors.Unavailable` when the database is away (it may have run or not).
        """

    def every(self, seconds: float, action: Callable[[], Awaitable[None]], name: str) -> None:
        """Await ``action`` again and again, that long after each end, until the worker has drained; isolated."""

    def soon(self, action: Callable[[], Awaitable[None]], name: str) -> None:
        """Await ``action`` once, in the background; a stop waits a few seconds for it. Isolated."""

    def wake(self, queue: str) -> None:
        """Look again whether the queue has something to claim, for a plugin that limits claims."""

    def hold(self, queue: str, seconds: float) -> None:
        """In this process only, and at once: nothing of the queue starts or is claimed for that long.

        What was claimed and has not started is given back.
        """

    async def pause(
        self, queue: str, source: str, reason: str, seconds: float | None, probe_seconds: float | None = None
    ) -> None:
        """Pause the queue for every worker, under the name ``source``, until the database's clock says so.

        ``seconds`` None: until it is resumed. ``probe_seconds``: when the time is over, one event in the whole cluster
        is let through; if its outcome is not known so many seconds later, the pause begins again. None: no probe, the
        pause just ends. Other sources' pauses stand beside it. Raises :class:`~eventbus.errors.Unavailable`.
        """

    async def resume(self, queue: str, source: str) -> bool:
        """End the pause of this source; False if there was none. Raises :class:`~eventbus.errors.Unavailable`."""

    async def free_probe(self, queue: str, source: str) -> None:
        """This worker's probe told nothing: let another event try. Raises :class:`~eventbus.errors.Unavailable`."""

    def finished(self, queue: str) -> int:
        """How many deliveries of the queue this process has handled since it started, failures included."""

    @property
    def pools(self) -> Mapping[str, tuple[int, int]]:
        """Per queue: how many handlers run, and how many may. May be read in any thread."""
