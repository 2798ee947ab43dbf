"""Workers that a test moves by hand, each step of the engine by itself, so that any two can be brought to collide.

They write the same history as the handlers of a torture run, and the same checker judges it.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from tests.torture import tables
from tests.torture.checker import Violation, violations
from tests.torture.history import Journal, read
from tests.torture.kinds import Kind
from tests.torture.plan import step
from tests.torture.watch import Watch

TOPIC = "torture.all"
MOST_STEPS = 300
"""After so many, whoever finishes gives up: an engine that is broken may have it defer the same event for ever."""


@dataclass(frozen=True, slots=True)
class Part:
    """One delivery that a puppet holds: of a claim by its seq, or an exception."""

    holder: int
    seq: int
    lease: str
    event_id: str
    token: str
    key: str | None
    attempt: int
    redriven: bool
    twin: str | None


class Theatre:
    """A bus with one queue and puppets that consume it."""

    def __init__(self, dsn: str, folder: Path, kind: Kind) -> None:
        self.kind = kind
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.journal = Journal(folder, "theatre")
        self.watch = Watch(self.connection, self.journal, 0.0)
        self.numbers = itertools.count(1)
        self._folder = folder
        self._tokens = self._find_tokens()
        self.connection.execute(tables.APPLICATION)
        self._attach()
        self.queue_id = self._declare()

    def publish(self, *keys: str | None, told: str = "done", event_id: str | None = None) -> list[str]:
        """Publish one event per key, each in its own transaction; when they are run first they are told ``told``."""
        return [self._publish(key, told, event_id or str(uuid4())) for key in keys]

    def relay(self) -> None:
        """Relay everything."""
        while (tick := self.row("SELECT state, unknown, more FROM eventbus.tick(1000)"))[0] != "idle":
            if tick[0] == "unknown":
                routes = {topic: [self.queue_id] if self.kind.wants(topic) else [] for topic in tick[1]}
                self.row(
                    "SELECT eventbus.resolve_topics((SELECT bindings_version FROM eventbus.bus), %s)",
                    json.dumps(routes),
                )

    def let_time_pass(self) -> bool:
        """Until everything is due that waits for its time; false when nothing does."""
        later = "UPDATE eventbus.exceptions SET due_at = clock_timestamp() WHERE due_at > clock_timestamp() RETURNING 1"
        return bool(self.rows(later))

    def redrive(self) -> None:
        """Give one dead letter another chance."""
        for number, token in self.rows(
            "SELECT id, payload ->> 'token' FROM eventbus.dead_letters ORDER BY md5(id::text) LIMIT 1"
        ):
            self.journal.write("redrive", queue=self.kind.queue, token=token)
            self.rows("SELECT eventbus.redrive(%s)", [number])

    def any_told(self, chance: random.Random) -> str:
        """What the handler of the next event tells first."""
        return chance.choices(("done", "retry", "dead"), (75, 23, 2))[0]

    def puppet(self) -> Puppet:
        """A new worker."""
        return Puppet(self)

    def judge(self) -> list[Violation]:
        """What the checker says now."""
        self.watch.look()
        return violations([self.kind], read(self._folder), tables.look(self.connection))

    def row(self, statement: str, *parameters: object) -> tuple[Any, ...]:
        """The only row of a statement."""
        [row] = self.rows(statement, *parameters)
        return row

    def rows(self, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
        """The rows of a statement."""
        return self.connection.execute(statement.encode(), parameters or None).fetchall()

    def close(self) -> None:
        """Disconnect."""
        self.connection.close()

    def _publish(self, key: str | None, told: str, event_id: str) -> str:
        transaction, token = next(self.numbers), self._tokens[told].pop()
        payload, headers = f'{{"token":"{token}"}}', f'{{"x-token":"{token}"}}'
        at = time.time_ns()
        with self.connection.transaction():
            self.connection.execute(
                "INSERT INTO torture_published VALUES (%s, %s, %s, %s, %s, %s, false, %s, 0, %s)",
                (token, event_id, TOPIC, key, payload, headers, transaction, at),
            )
            self.connection.execute(
                "SELECT eventbus.publish(%s, %s::json, %s, %s::json, NULL, %s::uuid)",
                (TOPIC, payload, key, headers, event_id),
            )
        self.journal.write("commit", transaction=transaction)
        return token

    def _find_tokens(self) -> dict[str, list[str]]:
        """Events by what their handler tells first; those that fail are done at the second attempt."""
        found: dict[str, list[str]] = {"done": [], "retry": [], "dead": []}
        for number in range(10_000):
            token = f"token-{number}"
            first, second = (step(self.kind.queue, token, attempt, redriven=False).told for attempt in (1, 2))
            if first in found and (first != "retry" or second == "done"):
                found[first].append(token)
        return found

    def _declare(self) -> int:
        when = "park" if self.kind.parks else "skip"
        wanted = {
            "name": self.kind.queue, "patterns": [TOPIC, f"torture.{self.kind.queue}"], "tracking": self.kind.tracking,
            "kind": "ordered" if self.kind.ordered else "plain", "lanes": 1, "when_exhausted": when,
        }  # fmt: skip
        return int(self.row("SELECT id FROM eventbus.declare_queues(%s)", json.dumps([wanted]))[0])

    def _attach(self) -> None:
        with self.connection.transaction():
            self.connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            self.connection.execute("LOCK TABLE eventbus.outbox, eventbus.ticks IN SHARE ROW EXCLUSIVE MODE")
            self.connection.execute("SELECT eventbus.attach(true)")


class Puppet:
    """One worker."""

    def __init__(self, theatre: Theatre) -> None:
        self._theatre = theatre
        self._id = str(uuid4())
        self._pid = next(theatre.numbers)
        self._running: dict[str, int] = {}
        theatre.rows("SELECT eventbus.register_worker(%s, 'here', %s)", self._id, self._pid)
        theatre.watch.look()

    def claim(self, most: int = 100) -> list[Part]:
        """Claim the next range; nothing of it has started."""
        lease = str(uuid4())
        rows = self._theatre.rows(
            "SELECT c.claim_id, c.seq, c.event_id, c.payload::json ->> 'token', c.key, 1, false, c.twin"
            " FROM eventbus.claim(%s, %s, %s, %s, 1000000) c WHERE c.claim_id IS NOT NULL",
            self._id, lease, [self._theatre.queue_id], [most],
        )  # fmt: skip
        return [Part(row[0], row[1], lease, *row[2:]) for row in rows]

    def claim_due(self, *, alone: bool = False) -> list[Part]:
        """Claim the exceptions that are due; ``alone``: one that must run alone."""
        lease = str(uuid4())
        rows = self._theatre.rows(
            "SELECT c.exception_id, c.event_id, c.payload::json ->> 'token', c.key, c.attempts + 1, c.redriven, c.twin"
            " FROM eventbus.claim_due(%s, %s, %s, '{100}', '{-infinity}', 1000000, %s) c"
            " WHERE c.exception_id IS NOT NULL",
            self._id, lease, [self._theatre.queue_id], alone,
        )  # fmt: skip
        return [Part(row[0], 0, lease, *row[1:]) for row in rows]

    def start(self, part: Part) -> None:
        """The handler is called."""
        number = self._running[part.token] = next(self._theatre.numbers)
        self._theatre.journal.write(
            "start", run=number, pid=self._pid, queue=self._theatre.kind.queue, token=part.token,
            event_id=part.event_id, key=part.key, attempt=part.attempt, redriven=part.redriven,
        )  # fmt: skip

    def end(self, part: Part, told: str = "done") -> dict[str, Any]:
        """The handler has ended; the outcome that is to be settled."""
        self._theatre.journal.write("end", run=self._running[part.token], pid=self._pid, told=told)
        return {"seq": part.seq, "id": part.holder, "outcome": told, "delay": 0, "reason": "by hand"}

    def run(self, part: Part, told: str = "done") -> dict[str, Any]:
        """Start and end; a delivery whose twin is completed is done without, and waits for a pending one."""
        if part.twin is not None:
            outcome = {"completed": "done", "pending": "deferred"}[part.twin]
            return {"seq": part.seq, "id": part.holder, "outcome": outcome, "delay": 0}
        self.start(part)
        return self.end(part, told)

    def commit(self, part: Part) -> bool:
        """What a transactional handler has done is committed with its completion; false when that was refused."""
        kind, queue = self._theatre.kind, self._theatre.queue_id
        try:
            with self._theatre.connection.transaction():
                self._theatre.connection.execute(
                    "INSERT INTO torture_effects VALUES (%s, %s, %s)",
                    (kind.queue, part.event_id, f"{self._pid}-{self._running[part.token]}"),
                )
                self._theatre.rows("SELECT set_config('eventbus.delivery', 'mark', true)")
                self._theatre.rows(
                    "SELECT eventbus.complete('mark', %s, %s::uuid[], %s, '{}', '{}', %s, %s::uuid[], '{0}')",
                    [part.holder], [part.lease], [part.seq], queue, [part.event_id],
                )  # fmt: skip
        except psycopg.Error:
            return False
        return True

    def settle(self, parts: Sequence[Part], outcomes: Sequence[dict[str, Any]], lease: str | None = None) -> bool:
        """Settle a claim; false when it was lost."""
        written = [outcome for outcome in outcomes if outcome["outcome"] != "done"]
        claim = parts[0].holder
        told = json.dumps([{"claim": claim, "outcomes": written}]) if written else None
        call = "SELECT eventbus.settle(%s, %s::uuid[], %s)"
        return bool(self._theatre.rows(call, [claim], [lease or parts[0].lease], told))

    def record(self, parts: Sequence[Part], outcomes: Sequence[dict[str, Any]]) -> None:
        """Record some outcomes of a claim that stays open."""
        done = [outcome["seq"] for outcome in outcomes if outcome["outcome"] == "done"]
        rest = [outcome for outcome in outcomes if outcome["outcome"] != "done"]
        self._theatre.rows(
            "SELECT eventbus.record_progress(%s, %s, %s::bigint[], %s)",
            parts[0].holder, parts[0].lease, done, json.dumps(rest),
        )  # fmt: skip

    def detach(self, parts: Sequence[Part], outcomes: Sequence[dict[str, Any]], held: Sequence[Part]) -> dict[int, int]:
        """Settle an ordered claim while some of it runs; the exceptions that those have become, by seq."""
        rows = self._theatre.rows(
            "SELECT seq, exception_id FROM eventbus.detach(%s, %s, %s::bigint[], %s, %s::bigint[])",
            parts[0].holder, parts[0].lease, [each["seq"] for each in outcomes if each["outcome"] == "done"],
            json.dumps([each for each in outcomes if each["outcome"] != "done"]), [part.seq for part in held],
        )  # fmt: skip
        return dict(rows)

    def settle_due(self, parts: Sequence[Part], outcomes: Sequence[dict[str, Any]]) -> int:
        """Settle exceptions; how many of them were still held."""
        return len(
            self._theatre.rows(
                "SELECT eventbus.settle_exceptions(%s, %s::uuid[], %s)",
                [part.holder for part in parts], [part.lease for part in parts], json.dumps(outcomes),
            )
        )  # fmt: skip

    def beat(self, started: Sequence[Part] = ()) -> None:
        """Tell how far each open claim has started."""
        highest = {str(part.holder): part.seq for part in started}
        self._theatre.rows("SELECT eventbus.beat(%s, 3600, 0, %s)", self._id, json.dumps(highest))
        self._theatre.watch.look()

    def take_over(self, victim: Puppet | None = None) -> None:
        """Take over another one, or all others, as if their leases had ended at their last beat."""
        if victim is not None:
            self._theatre.rows(
                "UPDATE eventbus.workers SET heartbeat_at = clock_timestamp() + interval '1 hour' WHERE id <> %s"
                " AND state = 'live' RETURNING 1",
                victim._id,
            )
        self._theatre.rows("SELECT eventbus.take_over(%s, 0, 1000)", self._id)
        self._theatre.watch.look()

    def finish(self) -> None:
        """Consume until nothing is left that can be had, each event told what is planned for it."""
        for _ in range(MOST_STEPS):
            if not self._step() and not self._theatre.let_time_pass():
                return

    def _step(self) -> bool:
        if parts := self.claim():
            self.settle(parts, [*self._run_all(parts)])
        if due := self.claim_due() + self.claim_due(alone=True):
            self.settle_due(due, [*self._run_all(due)])
        return bool(parts or due)

    def _run_all(self, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
        """Run one after the other; what follows an event of its key that is not done stays parked behind it."""
        stopped: set[str | None] = set()
        for part in parts:
            if self._theatre.kind.ordered and part.key in stopped:
                yield {"seq": part.seq, "id": part.holder, "outcome": "parked"}
                continue
            told = step(self._theatre.kind.queue, part.token, part.attempt, redriven=part.redriven).told
            outcome = self.run(part, told)
            if outcome["outcome"] != "done" and part.key is not None:
                stopped.add(part.key)
            yield outcome
