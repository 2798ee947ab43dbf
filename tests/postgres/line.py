"""The whole line driven by hand, one SQL function per step, for tests that need events at known places of it."""

from __future__ import annotations

import json
import uuid
from typing import Any, Final

import psycopg

from eventbus.postgres import admin
from eventbus.postgres.admin import Queue
from eventbus.topics import matches

SCHEMA: Final = "eventbus"
DEAD: Final = {"outcome": "dead", "reason": "gave up", "error": {"type": "ValueError", "message": "no such order"}}
RETRY: Final = {"outcome": "retry", "delay": 60, "error": {"type": "ValueError", "message": "no such order"}}

Claim = tuple[int, uuid.UUID, list[int]]
"""Id, token and the sequence numbers of a claimed range."""


class Line:
    """The engine, driven by hand: one statement is one step of a publisher, a relay or a worker."""

    def __init__(self, conn: psycopg.Connection) -> None:
        self.conn = conn
        self.worker = uuid.uuid4()
        self.numbers: dict[str, int] = {}
        admin.resume(conn, SCHEMA)  # the database was cloned from a template, which looks like a restored copy

    def one(self, query: str, *parameters: Any) -> Any:
        row = self.conn.execute(query.encode(), parameters).fetchone()
        return row and row[0]

    def declare(self, **patterns: list[str]) -> None:
        wanted = [{"name": name, "patterns": list(patterns[name])} for name in patterns]
        rows = self.conn.execute("SELECT name, id FROM eventbus.declare_queues(%s)", [json.dumps(wanted)])
        self.numbers |= dict(rows.fetchall())

    def publish(self, topic: str = "orders.created", payload: object = 1, key: str | None = None) -> uuid.UUID:
        event_id = self.one("SELECT eventbus.publish(%s, %s, %s)", topic, json.dumps(payload), key)
        assert isinstance(event_id, uuid.UUID)
        return event_id

    def relay(self, limit: int = 1000) -> None:
        while True:
            row = self.conn.execute("SELECT state, unknown FROM eventbus.tick(%s)", [limit]).fetchone()
            assert row
            assert row[0] in ("ticked", "unknown", "idle")
            if row[0] == "idle":
                return
            if row[1]:
                self.resolve(row[1])

    def resolve(self, topics: list[str]) -> None:
        bindings = self.conn.execute("SELECT queue_id, pattern FROM eventbus.bindings").fetchall()
        version = self.one("SELECT bindings_version FROM eventbus.bus")
        routes = {t: sorted({number for number, pattern in bindings if matches(pattern, t)}) for t in topics}
        assert self.one("SELECT eventbus.resolve_topics(%s, %s)", version, json.dumps(routes))

    def live(self, pid: int = 42) -> None:
        self.worker = uuid.uuid4()
        self.conn.execute("SELECT eventbus.register_worker(%s, 'box', %s)", [self.worker, pid])

    def claim(self, queue: str, most: int = 1000) -> Claim:
        token = uuid.uuid4()
        rows = self.conn.execute(
            "SELECT claim_id, seq FROM eventbus.claim(%s, %s, %s, %s, 1000000000)",
            [self.worker, token, [self.numbers[queue]], [most]],
        ).fetchall()
        return (rows[0][0] if rows else 0), token, [seq for _, seq in rows]

    def claim_due(self, queue: str, most: int = 1000) -> list[tuple[int, uuid.UUID]]:
        token = uuid.uuid4()
        rows = self.conn.execute(
            "SELECT exception_id FROM eventbus.claim_due(%s, %s, %s, %s, ARRAY['-infinity'::timestamptz],"
            " 1000000000, false) WHERE exception_id IS NOT NULL",
            [self.worker, token, [self.numbers[queue]], [most]],
        )
        return [(exception_id, token) for (exception_id,) in rows]

    def settle(self, claim: Claim, **outcomes: Any) -> bool:
        """``s3=dict(outcome="dead")`` says what became of delivery 3; the others are done."""
        claim_id, token, _ = claim
        listed = [{"seq": int(seq[1:]), **outcome} for seq, outcome in outcomes.items()]
        return bool(
            claim_id
            == self.one(
                "SELECT eventbus.settle(%s, %s, %s)",
                [claim_id],
                [token],
                json.dumps([{"claim": claim_id, "outcomes": listed}]) if listed else None,
            )
        )

    def settle_exception(self, exception: tuple[int, uuid.UUID], **outcome: Any) -> bool:
        exception_id, token = exception
        listed = json.dumps([{"id": exception_id, **outcome}])
        return bool(
            exception_id == self.one("SELECT eventbus.settle_exceptions(%s, %s, %s)", [exception_id], [token], listed)
        )

    def kill(self, queue: str, count: int) -> list[int]:
        """Publish and bury ``count`` events in ``queue``; the numbers of their dead letters."""
        for number in range(count):
            self.publish(payload={"n": number})
        self.relay()
        claim = self.claim(queue, count)
        assert self.settle(claim, **{f"s{seq}": DEAD for seq in claim[2]})
        return [letter for (letter,) in self.conn.execute("SELECT id FROM eventbus.dead_letters ORDER BY id")]

    def queue(self, name: str) -> Queue:
        return next(queue for queue in admin.queues(self.conn, SCHEMA) if queue.name == name)

    def rows_read(self, table: str) -> int:
        """How many rows of a table were read so far, by whatever plan."""
        if self.conn.info.server_version >= 150000:
            self.conn.execute("SELECT pg_stat_force_next_flush()")
        read = self.one(
            "SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_all_tables"
            " WHERE schemaname = 'eventbus' AND relname = %s",
            table,
        )
        return int(read)
