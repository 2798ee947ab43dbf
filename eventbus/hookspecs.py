"""Every extension point of the bus, in one list (pluggy).

A plugin is an object whose methods are marked with :data:`hookimpl` and named as one of these hooks; it takes only the
arguments that it wants. The plugins named in the setting ``plugins`` are called in that order, the first one outermost.
Where a hook has a ``queue``, the settings ``queues`` and ``except_queues`` of a plugin choose for which it is called.

What a hook raises while the bus works is logged with the names of the plugin and the hook, and changes nothing: the
event, the claim or the page is treated as if the plugin had no such hook. While the bus starts, it stops the start, as
does a hook that is async or a generator where nobody would run it.
A hook that nobody implements costs nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from eventbus.plugins.marks import PROJECT, hookimpl, hookspec
from eventbus.plugins.values import (
    Call,
    Counted,
    Duty,
    Failure,
    Finding,
    Migration,
    Page,
    Postpone,
    QueueFacts,
    Result,
    Settled,
    WorkerHandle,
)

if TYPE_CHECKING:
    from eventbus.event import OutboxEvent
    from eventbus.settings import Settings

__all__ = ["PROJECT", "SPECIFICATIONS", "Around", "AsyncAround", "hookimpl", "hookspec"]

Around = Callable[[Call], AbstractContextManager[Any]]
AsyncAround = Callable[[Call], AbstractAsyncContextManager[Any]]


class Start:
    """While a program starts, and what a plugin brings along."""

    @hookspec
    def eventbus_configure(self, settings: Settings) -> None:
        """The plugins are loaded; nothing else has happened. Raise :class:`~eventbus.ConfigurationError` to refuse."""

    @hookspec
    def eventbus_commands(self, commands: Any) -> None:
        """Add commands to the command line: ``commands.add(name, function, *examples)``, ``commands.group(…)``."""

    @hookspec
    def eventbus_migrations(self) -> Sequence[Migration]:  # type: ignore[empty-body]
        """The steps of the plugin's own tables, which ``eventbus migrate`` applies."""

    @hookspec
    def eventbus_connection_adapters(self) -> Sequence[Any]:  # type: ignore[empty-body]
        """More kinds of connections to publish on: ``Adapter`` and ``AsyncAdapter`` of ``publishing.connections``."""

    @hookspec(firstresult=True)
    def eventbus_transport(self, scheme: str) -> Callable[..., Any] | None:
        """Build workers for DSNs that begin with ``scheme://``.

        The function gets the settings and the subscriptions and returns the ``Parts`` of a worker (``runtime.worker``).
        The first plugin that returns one has it. ``postgresql`` and ``postgres`` are not asked for.
        """

    @hookspec
    def eventbus_pages(self, worker: WorkerHandle) -> Sequence[Page]:  # type: ignore[empty-body]
        """Pages of the worker's HTTP port (setting ``http_port``); asked once, before it connects."""


class Publishing:
    """In the publisher's thread and transaction."""

    @hookspec
    def eventbus_around_publish(self, events: Sequence[OutboxEvent]) -> AbstractContextManager[Any] | None:
        """Surround one publish, of one event or many: entered before their headers are amended, left after the SQL."""

    @hookspec
    def eventbus_veto_publish(self, event: OutboxEvent) -> str | None:
        """Refuse an event: return the reason.

        The publisher gets :class:`~eventbus.errors.PublishVetoed`; no SQL was sent. ``event.event_id`` is set. Of
        several events that are published together, none is if one is refused.
        """

    @hookspec
    def eventbus_amend_headers(self, event: OutboxEvent, headers: dict[str, str]) -> None:
        """Change ``headers``, which has those of the event and what it inherits. What breaks the rules is not taken."""


class Consuming:
    """Claiming, handling and settling, in a worker."""

    @hookspec
    def eventbus_limit_claim(self, queue: str, room: int, held: int) -> int | None:
        """Claim fewer than ``room`` events next: the least answer counts, 0 claims none, None does not care.

        ``held``: how many this worker has of the queue. Called on the event loop before each claim, so it only looks at
        what it knows. After a 0 it is asked again a second later, and when the plugin wakes the queue.
        """

    @hookspec
    def eventbus_around_handler(self, queue: QueueFacts) -> Around | None:
        """Surround every call of this queue's handler; asked once, at the start.

        Return a function that gets the :class:`Call` and returns a context manager. It is entered and left in the
        context of the handler, in its thread or its task, inside the transaction of a transactional handler. It sees
        what the handler raises, and can change neither that nor what it returns.
        """

    @hookspec
    def eventbus_around_async_handler(self, queue: QueueFacts) -> AsyncAround | None:
        """The same with async context managers; asked for queues with an async handler only."""

    @hookspec(firstresult=True)
    def eventbus_handler_failed(self, queue: str, failure: Failure) -> Postpone | None:
        """A handler has failed, or gave the event up. On the event loop, right after the call.

        The first :class:`Postpone` counts: its event runs again later, and this attempt is not counted.
        """

    @hookspec
    def eventbus_counted(self, queue: str, counted: Counted) -> None:
        """The outcomes of some deliveries of one queue were stored, in numbers. On the event loop: be quick.

        Costs next to nothing per event. A plugin that wants to know of single events implements ``eventbus_settled``.
        """

    @hookspec
    def eventbus_settled(self, queue: str, settled: Settled) -> None:
        """The outcomes of some deliveries of one queue were stored. On the event loop: be quick, aggregate.

        All deliveries are kept for it until their outcomes are stored, which costs about a microsecond each.
        """

    @hookspec
    def eventbus_probed(self, queue: str, result: Result) -> None:
        """What came of the one event that tried a paused queue was stored."""

    @hookspec
    def eventbus_relayed(self, deliveries: Mapping[str, int]) -> None:
        """This worker's relay moved events into queues: how many into which. Of any queue, also of other workers'."""

    @hookspec
    def eventbus_claimed(self, queue: str, count: int) -> None:
        """This worker claimed events of one queue."""


class Life:
    """The life of a worker. Where a hook may return an awaitable, an async method is awaited, five seconds at most."""

    @hookspec
    def eventbus_worker_starting(self, worker: WorkerHandle) -> Awaitable[None] | None:
        """A worker is about to connect."""

    @hookspec
    def eventbus_worker_ready(self, worker: WorkerHandle) -> Awaitable[None] | None:
        """It is registered, and about to claim."""

    @hookspec
    def eventbus_worker_draining(self, worker: WorkerHandle) -> Awaitable[None] | None:
        """It was told to stop: it claims nothing more, running handlers go on."""

    @hookspec
    def eventbus_worker_stopped(self, worker: WorkerHandle, code: int) -> Awaitable[None] | None:
        """Everything is settled, the database is still connected; the process ends with ``code``."""

    @hookspec
    def eventbus_lease_lost(self, queue: str, deliveries: int) -> None:
        """Other workers have what this one held; what its handlers still do has no effect here."""

    @hookspec
    def eventbus_took_over(self, workers: int, deliveries: int) -> None:
        """This worker took over the deliveries of silent workers."""

    @hookspec
    def eventbus_outage_began(self, reason: str) -> None:
        """The database cannot be worked with."""

    @hookspec
    def eventbus_outage_ended(self, seconds: float) -> None:
        """It is back, after so many seconds."""


class Upkeep:
    """Health and maintenance."""

    @hookspec
    def eventbus_health(self, connection: Any, schema: str) -> Iterable[Finding]:  # type: ignore[empty-body]
        """What is fine and what is not, for ``eventbus doctor``. ``connection``: psycopg, sync, autocommit."""

    @hookspec
    def eventbus_duties(self, settings: Settings) -> Sequence[Duty]:  # type: ignore[empty-body]
        """Upkeep of the plugin's own tables."""


SPECIFICATIONS: Final = (Start, Publishing, Consuming, Life, Upkeep)
"""The classes whose methods are the hooks."""
