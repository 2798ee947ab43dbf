"""The storage engine driven by hand: one call per SQL function, over one connection, and nothing in between."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg

from eventbus.topics import matches

MEBIBYTE: Final = 1024 * 1024

Row = tuple[Any, ...]
Connection = psycopg.Connection[Row]


@dataclass(frozen=True, slots=True)
class Tick:
    """What ``tick`` returned."""

    state: str
    more: bool
    events: int
    deliveries: int
    fed: Sequence[int]
    unknown: Sequence[str]
    due_in: float | None


@dataclass(frozen=True, slots=True)
class Claim:
    """One claimed range and its events as ``claim`` returned them."""

    id: int
    token: UUID
    queue_id: int
    seqs: Sequence[int]
    event_ids: Sequence[str | None]

    @property
    def lo(self) -> int:
        """First delivery of the range."""
        return self.seqs[0]

    @property
    def hi(self) -> int:
        """Last delivery of the range."""
        return self.seqs[-1]


@dataclass(frozen=True, slots=True)
class Held:
    """One exception that ``claim_due`` gave us."""

    id: int
    token: UUID
    attempts: int
    crashes: int
    event_id: str | None


class Engine:
    """One bus, reached through one autocommit connection. ``{bus}`` in a statement is its schema, quoted."""

    def __init__(self, connection: Connection, schema: str = "eventbus") -> None:
        self.connection = connection
        self.schema = schema

    @property
    def pid(self) -> int:
        """Process id of the server's side of the connection."""
        return self.connection.info.backend_pid

    def rows(self, statement: str, *parameters: object) -> list[Row]:
        """Run one statement; everything that it returned."""
        cursor = self.connection.execute(statement.replace("{bus}", f'"{self.schema}"').encode(), parameters or None)
        return cursor.fetchall() if cursor.description else []

    def value(self, statement: str, *parameters: object) -> Any:
        """Run one statement; the first column of its only row."""
        [row] = self.rows(statement, *parameters)
        return row[0]

    def column(self, statement: str, *parameters: object) -> list[Any]:
        """Run one statement; the first column of every row."""
        return [row[0] for row in self.rows(statement, *parameters)]

    def attach(self, *, resume: bool = False) -> str:
        """Take a new position if this database is a copy: ``attached``, ``resumed`` or ``paused``."""
        with self.connection.transaction():
            self.rows("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            self.rows("LOCK TABLE {bus}.outbox, {bus}.ticks IN SHARE ROW EXCLUSIVE MODE")
            return str(self.value("SELECT {bus}.attach(%s)", resume))

    # Publishing and relaying

    def declare(self, **patterns: str) -> dict[str, int]:
        """Declare queues, one pattern each; the number of each."""
        wanted = [{"name": name, "patterns": [pattern]} for name, pattern in patterns.items()]
        return dict(self.rows("SELECT name, id FROM {bus}.declare_queues(%s)", json.dumps(wanted)))

    def publish(self, topic: str = "orders.created", payload: str = "{}", key: str | None = None) -> str:
        """Publish one event in the transaction that is open, or in its own."""
        return str(self.value("SELECT {bus}.publish(%s, %s::json, %s)", topic, payload, key))

    def publish_many(self, count: int, topic: str = "orders.created", size: int = 2) -> None:
        """Publish ``count`` events by one statement."""
        self.rows(
            "INSERT INTO {bus}.outbox (event_id, topic, payload, size)"
            " SELECT gen_random_uuid(), %s, '{}', %s FROM generate_series(1, %s)",
            topic,
            size,
            count,
        )

    def tick(self, limit: int = 1000) -> Tick:
        """One step of the relay."""
        [row] = self.rows("SELECT state, more, events, deliveries, fed, unknown, due_in FROM {bus}.tick(%s)", limit)
        return Tick(*row)

    def relay(self, limit: int = 1000) -> list[Tick]:
        """Tick and resolve until nothing is fresh; the ticks that relayed something."""
        ticks = []
        while (tick := self.tick(limit)).state != "idle":
            if tick.state == "unknown":
                self.resolve(tick.unknown)
            elif tick.state == "ticked":
                ticks.append(tick)
            else:
                raise AssertionError(f"the relay cannot go on: {tick}")
        return ticks

    def fall_asleep(self, seconds: float = 60.0) -> bool:
        """Say that the relay sleeps; whether somebody may be about to commit who thinks that it is awake."""
        return bool(self.value("SELECT {bus}.fall_asleep(%s)", seconds))

    def bindings(self) -> tuple[int, list[Row]]:
        """Version of the bindings, and (queue number, pattern) of each."""
        version = self.value("SELECT bindings_version FROM {bus}.bus")
        return version, self.rows("SELECT queue_id, pattern FROM {bus}.bindings")

    def resolve(self, topics: Iterable[str]) -> bool:
        """Compute and store where topics go; false when the bindings have changed meanwhile."""
        version, bindings = self.bindings()
        routes = {topic: sorted({queue for queue, pattern in bindings if matches(pattern, topic)}) for topic in topics}
        return bool(self.value("SELECT {bus}.resolve_topics(%s, %s)", version, json.dumps(routes)))

    def delivered(self, queue_id: int) -> list[str]:
        """Event ids of everything that was ever delivered into a queue, in its order."""
        return self.column(
            "SELECT o.event_id::text FROM {bus}.deliveries d JOIN {bus}.outbox o ON o.id = d.outbox_id"
            " WHERE d.queue_id = %s ORDER BY d.lane, d.seq",
            queue_id,
        )

    # Consuming

    def register(self) -> UUID:
        """A new live worker."""
        worker = uuid4()
        self.rows("SELECT {bus}.register_worker(%s, 'here', 1)", worker)
        return worker

    def beat(self, worker: UUID, started: Mapping[int, int] | None = None, open_from: int = 0) -> tuple[bool, int]:
        """One heartbeat that tells how far each open claim has started; (alive, others that are expired)."""
        listed = {str(claim): seq for claim, seq in (started or {}).items()}
        [row] = self.rows(
            "SELECT alive, expired FROM {bus}.beat(%s, 30, %s, %s)", worker, open_from, json.dumps(listed)
        )
        return row[0], row[1]

    def claim(self, worker: UUID, queue_id: int, limit: int = 100, max_bytes: int = 8 * MEBIBYTE) -> Claim | None:
        """Claim the next range of one queue."""
        claims, _ = self.claim_any(worker, {queue_id: limit}, max_bytes)
        return claims[0] if claims else None

    def claimed(self, worker: UUID, queue_id: int, limit: int = 100) -> Claim:
        """Claim the next range of one queue that has one."""
        claim = self.claim(worker, queue_id, limit)
        assert claim is not None
        return claim

    def claim_any(
        self, worker: UUID, limits: Mapping[int, int], max_bytes: int = 8 * MEBIBYTE
    ) -> tuple[list[Claim], dict[int, int | None]]:
        """Claim from several queues; also what is said of queues that have more: the newest seq, none when busy."""
        token = uuid4()
        rows = self.rows(
            "SELECT claim_id, queue_id, seq, event_id FROM {bus}.claim(%s, %s, %s::integer[], %s::integer[], %s)",
            worker,
            token,
            list(limits),
            list(limits.values()),
            max_bytes,
        )
        found: dict[int, list[Row]] = {}
        for row in rows:
            if row[0] is not None:
                found.setdefault(row[0], []).append(row)
        claims = [
            Claim(claim_id, token, mine[0][1], [row[2] for row in mine], [row[3] for row in mine])
            for claim_id, mine in found.items()
        ]
        return claims, {queue_id: seq for claim_id, queue_id, seq, _ in rows if claim_id is None}

    def settle(self, *claims: Claim, outcomes: Mapping[int, Sequence[Mapping[str, Any]]] | None = None) -> set[int]:
        """Settle whole claims; the ids of those that are settled now."""
        written = None
        if outcomes is not None:
            written = json.dumps([{"claim": claim_id, "outcomes": said} for claim_id, said in outcomes.items()])
        return set(
            self.column(
                "SELECT settle FROM {bus}.settle(%s::bigint[], %s::uuid[], %s)",
                [claim.id for claim in claims],
                [claim.token for claim in claims],
                written,
            )
        )

    def record(self, claim: Claim, done: Sequence[int] = (), outcomes: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Record what became of single deliveries of an open claim."""
        return bool(
            self.value(
                "SELECT {bus}.record_progress(%s, %s, %s::bigint[], %s)",
                claim.id,
                claim.token,
                list(done),
                json.dumps(outcomes),
            )
        )

    def claim_due(
        self, worker: UUID, queue_id: int, limit: int = 100, max_bytes: int = 8 * MEBIBYTE, *, alone: bool = False
    ) -> list[Held]:
        """Claim exceptions of one queue that are due."""
        token = uuid4()
        rows = self.rows(
            "SELECT exception_id, attempts, crashes, event_id"
            " FROM {bus}.claim_due(%s, %s, ARRAY[%s], ARRAY[%s], ARRAY['-infinity'::timestamptz], %s, %s)",
            worker,
            token,
            queue_id,
            limit,
            max_bytes,
            alone,
        )
        return [Held(row[0], token, *row[1:]) for row in rows if row[0] is not None]

    def settle_due(self, held: Sequence[Held], outcome: str, **fields: Any) -> set[int]:
        """Settle exceptions, all alike; the ids of those that were still ours."""
        return set(
            self.column(
                "SELECT settle_exceptions FROM {bus}.settle_exceptions(%s::bigint[], %s::uuid[], %s)",
                [one.id for one in held],
                [one.token for one in held],
                json.dumps([{"id": one.id, "outcome": outcome} | fields for one in held]),
            )
        )

    def fall_silent(self, *workers: UUID) -> None:
        """Make it look as if these workers had not beaten for a very long time."""
        self.rows("UPDATE {bus}.workers SET heartbeat_at = '-infinity' WHERE id = ANY (%s)", list(workers))

    def take_over(self, worker: UUID, max_crashes: int = 3, lease: float | None = None) -> tuple[int, int]:
        """Take over who is silent; how many workers and deliveries. The lease: as long as the server is up."""
        if lease is None:
            lease = self.value(
                "SELECT EXTRACT(EPOCH FROM clock_timestamp() - pg_postmaster_start_time())::double precision"
            )
        [row] = self.rows("SELECT workers, deliveries FROM {bus}.take_over(%s, %s, %s)", worker, lease, max_crashes)
        return row[0], row[1]
