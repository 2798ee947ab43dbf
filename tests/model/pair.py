"""The engine on PostgreSQL and the model side by side: each operation is done to both, all that is seen compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

import psycopg

from eventbus.testing.model import Model, values
from tests.postgres.engine.driver import Claim, Engine, Held

T = TypeVar("T")
S = TypeVar("S")
FAR = 36000.0
LOST = {"EB001", "EB003", "23505"}


class Pair:
    """Both buses, with what was claimed as pairs."""

    def __init__(self, bus: Engine, other: Engine) -> None:
        self.bus = bus
        self.other = other
        """A second session, whose transaction may be open."""
        self.model = Model()
        self.tx: int | None = None
        self.labels = 0
        self.events: list[str] = []
        self.queues = {"orders": (1, self.model.declare_queue("orders", "orders.#"))}
        self.workers: list[tuple[UUID, UUID]] = []
        self.claims: list[tuple[Claim, values.Claim]] = []
        self.held: list[tuple[Held, values.Held]] = []

    @property
    def now(self) -> float:
        return float(self.bus.value("SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8"))

    def declare(self, name: str, **options: Any) -> None:
        self.queues[name] = (
            self.bus.declare_queue(name, "orders.#", **options),
            self.model.declare_queue(name, "orders.#", **options),
        )
        same(*self.queues[name])

    def publish(self, key: str | None, priority: int, *, late: bool, twin: bool, delayed: bool) -> None:
        """Publish in the open transaction of the other session, or at once."""
        self.labels += 1
        event_id = self.events[-1] if twin and self.events else str(UUID(int=self.labels))
        self.events.append(event_id)
        label = json.dumps(f"e{self.labels}")
        late = late and self.tx is not None
        engine = self.other if late else self.bus
        more: dict[str, Any] = {"event_id": event_id, "priority": priority}
        engine.publish("orders.made", label, key, **more, **({"delay": "10 hours"} if delayed else {}))
        self.model.publish(
            "orders.made",
            label,
            key,
            now=self.now,
            delay=FAR if delayed else None,
            tx=self.tx if late else None,
            **more,
        )

    def cancel(self) -> None:
        if self.events and self.tx is None:
            cancelled = self.bus.value("SELECT {bus}.cancel(%s)", self.events[-1])
            same(cancelled, self.model.cancel(self.events[-1]))

    def begin(self) -> None:
        if self.tx is None:
            self.other.rows("BEGIN")
            self.tx = self.model.begin()

    def end(self, *, commits: bool) -> None:
        if self.tx is not None:
            self.other.rows("COMMIT" if commits else "ROLLBACK")
            (self.model.commit if commits else self.model.rollback)(self.tx)
            self.tx = None

    def tick(self, limit: int) -> None:
        tick, mine = self.bus.tick(limit), self.model.tick(limit, now=self.now)
        for what in ("state", "more", "events", "deliveries"):
            same(getattr(tick, what), getattr(mine, what), what)
        same(list(tick.fed), list(mine.fed))
        same(list(tick.unknown), list(mine.unknown))
        if tick.state == "unknown":
            self.bus.resolve(tick.unknown)
            self.model.resolve(mine.unknown)

    def register(self) -> None:
        self.workers.append((self.bus.register(), self.model.register(now=self.now)))

    def claim(self, worker: int, queues: Sequence[str], limit: int, turn: int, max_bytes: int) -> None:
        mine, its = self.workers[worker % len(self.workers)]
        there = {self.queues[name][0]: limit for name in queues}
        now = self.now
        answers = self.both(
            lambda: self.bus.claim_any(mine, there, max_bytes, turn),
            lambda: self.model.claim_any(its, there, max_bytes, turn, now=now),
        )
        if answers is None:
            return
        (claims, more), (ours, left) = answers
        same(more, left)
        same([_seen(claim) for claim in claims], [_seen(claim) for claim in ours])
        self.claims += zip(claims, ours, strict=True)

    def claim_due(self, worker: int, queue: str, *, alone: bool) -> None:
        """Claim all that is due: where one instant has several, the order is the database's choice."""
        self.make_due()
        mine, its = self.workers[worker % len(self.workers)]
        number = self.queues[queue][0]
        now = self.now
        answers = self.both(
            lambda: self.bus.claim_due(mine, number, alone=alone),
            lambda: self.model.claim_due(its, number, now=now, alone=alone),
        )
        if answers is None:
            return
        held = {str(one.payload): one for one in answers[0]}
        ours = {str(one.payload): one for one in answers[1]}
        same({label: _seen_held(one) for label, one in held.items()}, {k: _seen_held(one) for k, one in ours.items()})
        for key in {one.key for one in held.values()} - {None}:
            same([k for k, one in held.items() if one.key == key], [k for k, one in ours.items() if one.key == key])
        self.held += [(held[label], ours[label]) for label in held]

    def make_due(self) -> None:
        """What is put off for the tenth of a second is due."""
        self.bus.rows("UPDATE {bus}.exceptions SET due_at = clock_timestamp() WHERE due_at < now() + interval '1 hour'")
        now = self.now
        for one in self.model.exceptions.values():
            one.due_at = min(one.due_at, now) if one.due_at < now + FAR / 10 else one.due_at

    def settle(self, place: int, outcomes: Sequence[str], delay: float) -> None:
        claim, mine = self.claims.pop(place % len(self.claims))
        said = self._said(claim.seqs, outcomes, delay)
        now = self.now
        settled = self.bus.settle(claim, outcomes={claim.id: said})
        same(bool(settled), bool(self.model.settle(mine, outcomes={mine.id: said}, now=now)))

    def record(self, place: int, outcomes: Sequence[str], delay: float) -> None:
        claim, mine = self.claims[place % len(self.claims)]
        said, now = self._said(claim.seqs[:1], outcomes, delay), self.now
        done = claim.seqs[:1] if not said else []
        same(self.bus.record(claim, done, said), self.model.record(mine, done, said, now=now))

    def detach(self, place: int) -> None:
        claim, mine = self.claims[place % len(self.claims)]
        if not self.model.queues[mine.queue_id].ordered:
            return
        del self.claims[place % len(self.claims)]
        now = self.now
        held, ours = self.bus.detach(claim, claim.seqs[:1]), self.model.detach(mine, mine.seqs[:1], now=now)
        same(held is None, ours is None)
        for seq, one in (held or {}).items():
            its = (ours or {})[seq]
            same(one is None, its is None)
            if one is not None and its is not None:
                self.held.append((one, its))

    def settle_due(self, place: int, outcome: str, delay: float) -> None:
        one, mine = self.held.pop(place % len(self.held))
        now = self.now
        fields: dict[str, Any] = {"delay": delay, "reason": "x"}
        settled = self.bus.settle_due([one], outcome, **fields)
        same(bool(settled), bool(self.model.settle_due([mine], outcome, now=now, **fields)))

    def complete(self, place: int) -> None:
        """The transaction of a handler of the first delivery."""
        claim, mine = self.claims[place % len(self.claims)]
        if self.model.queues[mine.queue_id].tracking != "transactional":
            return
        now = self.now
        self.both(
            lambda: self._commit(claim),
            lambda: self.model.complete(
                mine.queue_id, [(mine, mine.lo)], event_ids=mine.event_ids[:1], now=now
            ),
        )  # fmt: skip

    def crash(self, worker: int, started: int, max_crashes: int) -> None:
        """A worker tells how far it is, falls silent, and is taken over. It may go on as a zombie."""
        mine, its = self.workers[worker % len(self.workers)]
        now = self.now
        open_ones = [pair for pair in self.claims if self.model.claims[pair[1].id].worker == its]
        self.bus.beat(mine, {claim.id: claim.lo + started - 1 for claim, _ in open_ones[:1]})
        self.model.beat(its, {claim.id: claim.lo + started - 1 for _, claim in open_ones[:1]}, now=now)
        self.bus.fall_silent(mine)
        self.model.fall_silent(its)
        self.register()
        mine, its = self.workers[-1]
        same(self.bus.take_over(mine, max_crashes), self.model.take_over(its, max_crashes, FAR, now=now))

    def redrive(self) -> None:
        moved = self.bus.value("SELECT {bus}.redrive(ARRAY(SELECT id FROM {bus}.dead_letters))")
        same(moved, self.model.redrive(list(self.model.dead_letters), now=self.now))

    def discard(self) -> None:
        gone = self.bus.value("SELECT {bus}.discard(ARRAY(SELECT min(id) FROM {bus}.dead_letters))")
        same(gone, self.model.discard(sorted(self.model.dead_letters)[:1], now=self.now))

    def pause(self, queue: str, *, probed: bool) -> None:
        number, now = self.queues[queue][0], self.now
        times = (0.0, FAR) if probed else (None, None)
        same(self.bus.pause(number, "test", *times), self.model.pause(number, "test", *times, now=now))

    def resume(self, queue: str) -> None:
        number = self.queues[queue][0]
        same(self.bus.resume(number, "test"), self.model.resume(number, "test"))

    def both(self, there: Callable[[], T], here: Callable[[], S]) -> tuple[T, S] | None:
        """The answers of both; none when both say that the lease is lost or the execution completed."""
        lost = mine = None
        answer: Any = None
        try:
            answer = there()
        except psycopg.Error as error:
            lost = "lost" if error.sqlstate in LOST else error.sqlstate
        try:
            ours = here()
        except values.LeaseLost:
            mine = "lost"
        except values.AlreadyCompleted:
            mine = "EB004"
        else:
            same(lost, None)
            return answer, ours
        same(lost, mine)
        return None

    def compare(self) -> None:
        """Everything that is kept."""
        model, bus = self.model, self.bus
        same(
            bus.rows("SELECT queue_id, lane, seq, outbox_id FROM {bus}.deliveries ORDER BY 1, 2, 3"),
            [(q, n, one.seq, one.event.id) for (q, n), line in sorted(model.lines.items()) for one in line],
        )
        same(
            bus.rows(
                "SELECT c.queue_id, c.lane, c.lo, c.hi, s.kind,"
                " (SELECT json_object_agg(p.seq, p.outcome ORDER BY p.seq) FROM {bus}.progress p"
                " WHERE p.claim_id = c.id)"
                " FROM {bus}.claims c"
                " LEFT JOIN {bus}.settlements s ON s.claim_id = c.id ORDER BY c.queue_id, c.lane, c.lo"
            ),
            sorted(
                (c.queue_id, c.lane, c.lo, c.hi, c.settled, {str(k): c.progress[k] for k in sorted(c.progress)} or None)
                for c in model.claims.values()
            ),
        )
        same(
            bus.rows(
                "SELECT queue_id, lane, seq, range_hi, key, state, attempts, crashes, alone, finished, redriven_from,"
                " due_at > now() + interval '1 hour' FROM {bus}.exceptions ORDER BY 1, 2, 3"
            ),
            [
                (e.queue_id, e.lane, e.seq, e.range_hi, e.key, e.state, e.attempts, e.crashes, e.alone, e.finished,
                 e.redriven_from, e.due_at > self.now + FAR / 10)
                for e in sorted(model.exceptions.values(), key=lambda e: (e.queue_id, e.lane, e.seq))
            ],
        )  # fmt: skip
        same(
            bus.rows(
                "SELECT id, queue_id, lane, seq, attempts, crashes, blocks, reason, outbox_id, redriven_from"
                " FROM {bus}.dead_letters ORDER BY id"
            ),
            [
                (
                    d.id,
                    d.queue_id,
                    d.lane,
                    d.seq,
                    d.attempts,
                    d.crashes,
                    d.blocks,
                    d.reason,
                    d.event.id,
                    d.redriven_from,
                )
                for d in model.dead_letters.values()
            ],
        )
        same(
            bus.rows(
                "SELECT queue_id, event_id::text, owner, completed_at IS NOT NULL FROM {bus}.processed_events"
                " ORDER BY 1, event_id"
            ),
            sorted((q, e, one.owner, one.completed_at is not None) for (q, e), one in model.executions.items()),
        )

    def _commit(self, claim: Claim) -> None:
        with self.bus.connection.transaction():
            self.bus.rows("SELECT set_config('eventbus.delivery', 'm', true)")
            self.bus.rows(
                "SELECT {bus}.complete('m', %s::bigint[], %s::uuid[], %s::bigint[], '{}', '{}', %s, %s::uuid[], '{0}')",
                [claim.id], [claim.token], [claim.lo], claim.queue_id, claim.event_ids[:1],
            )  # fmt: skip

    @staticmethod
    def _said(seqs: Sequence[int], outcomes: Sequence[str], delay: float) -> list[dict[str, Any]]:
        said = [(seq, outcomes[place % len(outcomes)]) for place, seq in enumerate(seqs)]
        return [{"seq": s, "outcome": o, "delay": delay, "reason": "x"} for s, o in said if o != "done"]


def same(database: object, model: object, what: str = "") -> None:
    assert database == model, f"{what}: PostgreSQL {database!r}, the model {model!r}"


def _seen(claim: Claim | values.Claim) -> tuple[Any, ...]:
    return (
        claim.queue_id, claim.lane, list(claim.seqs), list(claim.event_ids), list(claim.payloads), list(claim.keys),
        list(claim.twins),
    )  # fmt: skip


def _seen_held(one: Held | values.Held) -> tuple[Any, ...]:
    return one.attempts, one.crashes, one.event_id, one.key, one.twin, one.redriven
