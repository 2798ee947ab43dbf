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
    """One claimed range and its events as ``claim`` returned them. Of what was parked there is nothing."""

    id: int
    token: UUID
    queue_id: int
    seqs: Sequence[int]
    event_ids: Sequence[str | None]
    lane: int = 0
    payloads: Sequence[Any] = ()
    """What the events say, decoded."""
    keys: Sequence[str | None] = ()
    twins: Sequence[str | None] = ()

    @property
    def lo(self) -> int:
        """First delivery of the range."""
        return self.seqs[0]

    @property
    def hi(self) -> int:
        """Last delivery of the range."""
        return self.seqs[-1]

    def seq(self, payload: object) -> int:
        """Number of the first delivery that says this."""
        return self.seqs[list(self.payloads).index(payload)]


@dataclass(frozen=True, slots=True)
class Held:
    """One exception that ``claim_due`` gave us, or that ``detach`` left us."""

    id: int
    token: UUID
    attempts: int = 0
    crashes: int = 0
    event_id: str | None = None
    payload: Any = None
    key: str | None = None
    twin: str | None = None
    redriven: bool = False


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

    def declare_queue(self, name: str, pattern: str = "#", **options: object) -> int:
        """Declare one queue with the options of ``declare_queues``; its number."""
        wanted = [{"name": name, "patterns": [pattern]} | options]
        [(_, number)] = self.rows("SELECT name, id FROM {bus}.declare_queues(%s)", json.dumps(wanted))
        return int(number)

    def publish(
        self, topic: str = "orders.created", payload: str = "{}", key: str | None = None, **options: object
    ) -> str:
        """Publish one event in the transaction that is open, or in its own."""
        named = "".join(f", {name} => %s" for name in options)
        return str(
            self.value(f"SELECT {{bus}}.publish(%s, %s::json, %s{named})", topic, payload, key, *options.values())
        )

    def publish_keyed(self, *labels: str, topic: str = "orders.created") -> None:
        """Publish an event for each label, in this order: its payload is the label, its key what comes before a digit.

        A label without letters is an event without a key.
        """
        self.rows(
            "INSERT INTO {bus}.outbox (event_id, topic, payload, size, key)"
            " SELECT gen_random_uuid(), %s, to_json(u.label), 2, nullif(regexp_replace(u.label, '[0-9]+$', ''), '')"
            " FROM unnest(%s::text[]) WITH ORDINALITY AS u (label, n) ORDER BY u.n",
            topic,
            list(labels),
        )

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
        """Claim the next range of one queue; of one with many lanes, the first that is given."""
        claims, _ = self.claim_any(worker, {queue_id: limit}, max_bytes)
        return claims[0] if claims else None

    def claimed(self, worker: UUID, queue_id: int, limit: int = 100, turn: int = 0) -> Claim:
        """Claim the next range of one queue that has one."""
        claims, _ = self.claim_any(worker, {queue_id: limit}, turn=turn)
        assert claims
        return claims[0]

    def claim_any(
        self, worker: UUID, limits: Mapping[int, int], max_bytes: int = 8 * MEBIBYTE, turn: int = 0
    ) -> tuple[list[Claim], dict[int, int | None]]:
        """Claim from several queues; also what is said of queues that have more.

        That is the newest seq, none when another one is claiming, and 0 when the rest waits for an open claim.
        """
        token = uuid4()
        rows = self.rows(
            "SELECT claim_id, queue_id, seq, event_id, lane, payload, key, twin"
            " FROM {bus}.claim(%s, %s, %s::integer[], %s::integer[], %s, %s)",
            worker,
            token,
            list(limits),
            list(limits.values()),
            max_bytes,
            turn,
        )
        found: dict[int, list[Row]] = {}
        for row in rows:
            if row[0] is not None:
                found.setdefault(row[0], []).append(row)
        claims = [_claim(token, mine) for mine in found.values()]
        return claims, {row[1]: row[2] for row in rows if row[0] is None}

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

    def detach(
        self,
        claim: Claim,
        held: Sequence[int],
        done: Sequence[int] = (),
        outcomes: Sequence[Mapping[str, Any]] = (),
    ) -> dict[int, Held | None] | None:
        """Settle a claim while some of it runs: what is held of it now, by seq; nothing at all if it was lost."""
        rows = self.rows(
            "SELECT seq, exception_id FROM {bus}.detach(%s, %s, %s::bigint[], %s, %s::bigint[])",
            claim.id,
            claim.token,
            list(done),
            json.dumps(outcomes),
            list(held),
        )
        if not rows:
            return None
        return {seq: None if number is None else Held(number, claim.token) for seq, number in rows if seq is not None}

    def claim_due(
        self,
        worker: UUID,
        queue_id: int,
        limit: int = 100,
        max_bytes: int = 8 * MEBIBYTE,
        *,
        alone: bool = False,
        turn: int = 0,
    ) -> list[Held]:
        """Claim exceptions of one queue that are due."""
        token = uuid4()
        rows = self.rows(
            "SELECT exception_id, attempts, crashes, event_id, payload, key, twin, redriven"
            " FROM {bus}.claim_due(%s, %s, ARRAY[%s], ARRAY[%s], ARRAY['-infinity'::timestamptz], %s, %s, %s)",
            worker,
            token,
            queue_id,
            limit,
            max_bytes,
            alone,
            turn,
        )
        return [
            Held(number, token, attempts, crashes, event_id, _decoded(payload), *rest)
            for number, attempts, crashes, event_id, payload, *rest in rows
            if number is not None
        ]

    # Pausing

    def pause(
        self,
        queue_id: int,
        source: str,
        seconds: float | None = None,
        probe_seconds: float | None = None,
        reason: str = "tests",
    ) -> bool:
        """Pause a queue for one source; false when there is no such queue."""
        return bool(
            self.value(
                "SELECT {bus}.pause_queue(%s, %s, %s, %s::float8, %s::float8)",
                queue_id,
                source,
                reason,
                seconds,
                probe_seconds,
            )
        )

    def resume(self, queue_id: int, source: str) -> bool:
        """End the pause of one source; false when there was none."""
        return bool(self.value("SELECT {bus}.resume_queue(%s, %s)", queue_id, source))

    def told_of_pause(
        self, call: str, worker: UUID, queue_id: int, limit: int, *, alone: bool = False
    ) -> tuple[str | None, float | None, int]:
        """Claim, and read of the answer only what it says of the pause, in how many seconds, and how many came."""
        if call == "claim":
            rows = self.rows(
                "SELECT claim_id, topic, size / 1000.0::float8"
                " FROM {bus}.claim(%s, gen_random_uuid(), ARRAY[%s], ARRAY[%s], 1000000)",
                worker,
                queue_id,
                limit,
            )
        else:
            rows = self.rows(
                "SELECT exception_id, topic, due_in FROM {bus}.claim_due(%s, gen_random_uuid(), ARRAY[%s], ARRAY[%s],"
                " ARRAY['-infinity'::timestamptz], 1000000, %s)",
                worker,
                queue_id,
                limit,
                alone,
            )
        events = sum(number is not None for number, *_ in rows)
        said = [(topic, seconds) for number, topic, seconds in rows if number is None and topic is not None]
        state, seconds = said[0] if said else (None, None)
        return state, seconds, events

    def settle_due(self, held: Sequence[Held], outcome: str, **fields: Any) -> set[int]:
        """Settle exceptions, all alike; the ids of those that were still ours."""
        return self.settle_each([(one, outcome) for one in held], **fields)

    def settle_each(self, held: Sequence[tuple[Held, str]], **fields: Any) -> set[int]:
        """Settle exceptions by one call, each with its outcome; the ids of those that were still ours."""
        return set(
            self.column(
                "SELECT settle_exceptions FROM {bus}.settle_exceptions(%s::bigint[], %s::uuid[], %s)",
                [one.id for one, _ in held],
                [one.token for one, _ in held],
                json.dumps([{"id": one.id, "outcome": outcome} | fields for one, outcome in held]),
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


def _claim(token: UUID, rows: Sequence[Row]) -> Claim:
    claim_id, queue_id, seqs, event_ids, lanes, payloads, keys, twins = zip(*rows, strict=True)
    return Claim(
        claim_id[0], token, queue_id[0], list(seqs), list(event_ids), lanes[0], list(map(_decoded, payloads)),
        list(keys), list(twins),
    )  # fmt: skip


def _decoded(payload: str | None) -> Any:
    return None if payload is None else json.loads(payload)
