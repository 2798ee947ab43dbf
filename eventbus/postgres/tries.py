"""The tries of one call of a transactional handler: the statements of each, and what it means when one fails.

Before it: ``transactions`` has a session. After it: ``transactions`` runs the call once more, or raises the failure.
Nothing here talks to the database. What is no fault of the handler (a conflict with another transaction, a lost
connection, a lost lease) costs no attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from uuid import UUID, uuid4

import psycopg
from psycopg import errors
from psycopg.pq import PipelineStatus, TransactionStatus

from eventbus.consuming.boundary import Postponed, Results
from eventbus.consuming.tenure import Tenure
from eventbus.errors import EventBusError
from eventbus.postgres.breaker import Breaker
from eventbus.postgres.link import describe
from eventbus.postgres.statements import Statements
from eventbus.transport import Delivery, Discard, Done

log = logging.getLogger("eventbus")

Session = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]

_MOST_TRIES: Final = 4
_LOSSES_FORGIVEN: Final = 2
"""How often one event may lose its connection before that counts as its own fault."""
_LOSSES_REMEMBERED: Final = 1_000


class TransactionMisused(EventBusError):
    """The handler left its transaction in a state in which it cannot be committed; a failed attempt."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited for what, in seconds, for the handler of one queue. ``random`` returns numbers from 0 to 1."""

    queue: str
    idle: float
    """How long a handler may leave its transaction without a statement."""
    lease: float
    random: Callable[[], float]
    tenure: Tenure
    """No handler starts after it has run out."""


class Losses:
    """Which events have lost their connections, and how often; shared by all calls of one queue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[UUID, int] = OrderedDict()

    def count(self, deliveries: Sequence[Delivery]) -> int:
        """One more loss for each of these; the most that one of them has had."""
        most = 0
        with self._lock:
            for event_id in (delivery.event.event_id for delivery in deliveries if delivery.event is not None):
                self._counts[event_id] = self._counts.get(event_id, 0) + 1
                self._counts.move_to_end(event_id)
                most = max(most, self._counts[event_id])
            while len(self._counts) > _LOSSES_REMEMBERED:
                self._counts.popitem(last=False)
        return most


class Unit:
    """One transaction. ``step`` is what it does now."""

    def __init__(self, deliveries: Sequence[Delivery], statements: Statements, patience: Patience) -> None:
        self.step: Literal["begin", "handler", "complete", "commit"] = "begin"
        self.since = time.monotonic()
        self._deliveries = deliveries
        self._statements = statements
        self._patience = patience
        self._mark = uuid4()

    def begin(self) -> bytes:
        """The statements after BEGIN."""
        return self._filled("begin", mark=self._mark, idle=_milliseconds(self._patience.idle))

    def require_held(self) -> None:
        """Raise :class:`Postponed` if others may have these deliveries by now: the transaction may have taken long."""
        lost = any(delivery.lease.dropped for delivery in self._deliveries)
        if lost or time.monotonic() > self._patience.tenure.until:
            raise Postponed("the lease was lost before the handler began", delay=0.5)

    def complete(self) -> bytes:
        """The statements before COMMIT. Raises :class:`Postponed` when this worker has lost a lease meanwhile."""
        self.step = "complete"
        if any(delivery.lease.dropped for delivery in self._deliveries):
            raise Postponed("the lease was lost while the handler ran", delay=0.5)
        claims = [delivery for delivery in self._deliveries if delivery.lease.claim_id]
        tokens = {lease: str(lease.token) for lease in {delivery.lease for delivery in claims}}
        held = sorted((d.lease for d in self._deliveries if not d.lease.claim_id), key=lambda lease: lease.exception_id)
        events = [delivery.event for delivery in self._deliveries if delivery.event is not None]
        return self._filled(
            "complete",
            mark=self._mark,
            patience=_milliseconds(self._patience.lease),
            claims=_listed(delivery.lease.claim_id for delivery in claims),
            claim_tokens=_listed(tokens[delivery.lease] for delivery in claims),
            seqs=_listed(delivery.seq for delivery in claims),
            exceptions=_listed(lease.exception_id for lease in held),
            exception_tokens=_listed(lease.token for lease in held),
            queue=self._deliveries[0].lease.queue_id,
            event_ids=_listed(event.event_id_text for event in events),
            replays=_listed(event.replay_id for event in events),
        )

    def _filled(self, name: str, **values: object) -> bytes:
        return (self._statements.text(name) % values).encode()


class Tries:
    """All tries of one call."""

    def __init__(
        self,
        deliveries: Sequence[Delivery],
        statements: Statements,
        patience: Patience,
        breaker: Breaker,
        losses: Losses,
    ) -> None:
        self._deliveries = deliveries
        self._statements = statements
        self._patience = patience
        self._breaker = breaker
        self._losses = losses
        self._made = 0

    def next(self) -> Unit:
        """The next transaction."""
        self._made += 1
        return Unit(self._deliveries, self._statements, self._patience)

    def failed(self, unit: Unit, session: Session, error: Exception) -> Results | float | None:
        """What follows from a failure: after how many seconds to try again, or a result; None: it is the handler's.

        Raises :class:`Postponed` when now is not the time. The transaction is rolled back, or the connection is gone
        and the outcome of a COMMIT unknown: what the settlement finds recorded decides then.
        """
        state = _sqlstate(error)
        if _is_lost(session, error, state):
            if unit.step == "handler" and self._losses.count(self._deliveries) > _LOSSES_FORGIVEN:
                return None  # whatever this event makes the server do, it does it each time
            self._report_loss(unit, session, error)
            session.pgconn.finish()
            raise Postponed("the connection was lost", delay=1.0) from error
        if state in ("40001", "40P01"):
            return self._once_more(error)
        if unit.step == "complete":
            return self._incomplete(error, state)
        return None

    def _incomplete(self, error: Exception, state: str | None) -> Results | None:
        match state:
            case "EB003" | "23505":
                raise Postponed("the lease was lost or exchanged while the handler ran", delay=0.5) from error
            case "EB004" if len(self._deliveries) == 1:
                return (Done(),)
            case "55P03" | "57014":
                raise Postponed("its completion was blocked", delay=1.0) from error
            case "25006":
                raise TransactionMisused(
                    "the handler made its transaction read-only, so that it cannot be completed; read in the mode of "
                    "the transaction that it gets, or use a connection of its own"
                ) from error
            case "EB005":
                raise TransactionMisused(str(error).partition("\n")[0]) from error
            case _:
                return None

    def _once_more(self, error: Exception) -> float:
        if self._made >= _MOST_TRIES:
            log.info("a transactional handler met conflicts %d times, and runs later", self._made)
            raise Postponed("it conflicts with other transactions", delay=self._jitter(1.0)) from error
        return self._jitter(0.02 * 2.0**self._made)

    def _report_loss(self, unit: Unit, session: Session, error: Exception) -> None:
        problem = describe(error, unit.step) if isinstance(error, psycopg.Error) else "a handler's connection was lost"
        if session.broken:
            self._breaker.broke(unit.since)
        self._breaker.outage.began(link_of(self._patience), problem, unit.since)

    def _jitter(self, most: float) -> float:
        return most * (0.5 + self._patience.random() / 2)


def link_of(patience: Patience) -> str:
    """What the connections of this queue's handlers are called in the log."""
    return f"handlers of {patience.queue}"


def committable(results: Results) -> bool:
    """Whether everything that a call came to is to be kept."""
    return all(isinstance(result, Done | Discard) for result in results)


def is_held(session: Session) -> bool:
    """Whether something that the handler has left behind still uses the connection, and keeps others from it."""
    return session.lock.locked() or session.pgconn.transaction_status == TransactionStatus.ACTIVE


def require_released(session: Session) -> None:
    """Raise if the handler left a statement unfinished, or went on although its connection was lost."""
    if session.broken:
        raise psycopg.OperationalError("the connection of the transaction was lost while the handler ran")
    if is_held(session):
        raise TransactionMisused(
            "the handler left a statement unfinished: a COPY, a stream of rows or notifications, or a task or thread "
            "that still uses the connection"
        )


def require_unharmed(session: Session) -> None:
    """Raise :class:`TransactionMisused` if the handler left something that cannot be committed."""
    if session.pgconn.pipeline_status != PipelineStatus.OFF:  # what fails in a pipeline would go unnoticed
        raise TransactionMisused("the handler left a pipeline open; use it as 'with conn.pipeline():'")
    match session.pgconn.transaction_status:
        case TransactionStatus.INERROR:
            raise TransactionMisused(
                "the handler went on after a statement had failed, and left its transaction aborted; put what may fail "
                "into 'with conn.transaction():'"
            )
        case TransactionStatus.IDLE:
            raise TransactionMisused(
                "the handler ended the transaction of the bus; leave COMMIT and ROLLBACK to the bus"
            )
        case TransactionStatus.UNKNOWN if session.closed and not session.broken:
            raise TransactionMisused("the handler closed the connection of its transaction; the bus closes it")
        case _:
            return


def _is_lost(session: Session, error: Exception, state: str | None) -> bool:
    """Whether the connection is gone, by nobody's fault here, or leads to a server that was demoted."""
    if isinstance(error, TransactionMisused | Postponed | TimeoutError | errors.IdleInTransactionSessionTimeout):
        return False
    return session.broken or (state == "25006" and session.pgconn.parameter_status(b"in_hot_standby") == b"on")


def _sqlstate(error: BaseException) -> str | None:
    """That of the error, or of the one that caused it: a library may have wrapped it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, psycopg.Error):
            return cause.sqlstate
        cause = cause.__cause__
    return None


def _listed(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def _milliseconds(seconds: float) -> int:
    return min(2_147_483_647, max(1, round(seconds * 1000)))
