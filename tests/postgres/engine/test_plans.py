"""No hot statement reads more than it returns, whatever the statistics say and whenever its plan was made.

The tables hold a million rows and were never analysed. ``stale`` is a session that made its plans while they were
empty; ``fresh`` makes them now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from uuid import UUID

import psycopg
import pytest

from eventbus.postgres.migrate import migrate
from tests.postgres.engine import backlog
from tests.postgres.engine.backlog import DRAINED, RETRYING, SMALL, WAITING
from tests.postgres.engine.costs import Cost, measuring
from tests.postgres.engine.driver import Engine
from tests.postgres.engine.sessions import NewSession, open_transaction
from tests.servers import Server

BATCH = 20
MOST_BUFFERS = 2000
"""Less than the smallest index over a million rows has pages, so that nothing can be read from end to end."""


@dataclass(frozen=True, slots=True)
class Case:
    """One hot statement. ``prepare`` runs first, in the same transaction, and returns the parameters."""

    statement: str
    prepare: Callable[[Engine, UUID], tuple[object, ...]]


def claimed(engine: Engine, worker: UUID) -> tuple[object, ...]:
    claim = engine.claimed(worker, WAITING, BATCH)
    return (claim.id, claim.token)


def due(engine: Engine, worker: UUID) -> tuple[object, ...]:
    held = engine.claim_due(worker, RETRYING, BATCH)
    assert len(held) == BATCH
    outcomes = [
        {"id": one.id, "outcome": ("done", "retry", "dead")[number % 3], "reason": "x"}
        for number, one in enumerate(held)
    ]
    return ([one.id for one in held], [one.token for one in held], json.dumps(outcomes))


def dead_peer(engine: Engine, worker: UUID) -> tuple[object, ...]:
    peer = engine.register()
    engine.claimed(peer, WAITING, BATCH)
    assert len(engine.claim_due(peer, RETRYING, BATCH)) == BATCH
    engine.fall_silent(peer)
    return (worker,)


def lost(engine: Engine, worker: UUID) -> tuple[object, ...]:
    ids, tokens, said = due(engine, worker)
    assert isinstance(tokens, list)
    return (ids, [worker for _ in tokens], said)


def idle_peer(engine: Engine, worker: UUID) -> tuple[object, ...]:
    engine.fall_silent(engine.register())
    return (worker,)


def settle_said(engine: Engine, worker: UUID) -> tuple[object, ...]:
    claim = engine.claimed(worker, WAITING, BATCH)
    said = [{"seq": claim.lo, "outcome": "retry"}, {"seq": claim.hi, "outcome": "dead", "reason": "x"}]
    return (claim.id, claim.token, json.dumps([{"claim": claim.id, "outcomes": said}]))


def released_range(engine: Engine, worker: UUID) -> tuple[object, ...]:
    claim = engine.claimed(worker, WAITING, BATCH)
    engine.settle(claim, outcomes={claim.id: [{"seq": claim.lo, "hi": claim.hi, "outcome": "released"}]})
    return (worker,)


def completing(engine: Engine, worker: UUID) -> tuple[object, ...]:
    claim = engine.claimed(worker, WAITING, BATCH)
    held = engine.claim_due(worker, RETRYING, BATCH)
    event_ids = list({*claim.event_ids, *(one.event_id for one in held)})
    return (
        [claim.id] * BATCH,
        [claim.token] * BATCH,
        list(claim.seqs),
        [one.id for one in held],
        [one.token for one in held],
        event_ids,
        [0] * len(event_ids),
    )


def paused(queue: int, seconds: float, probe_seconds: float) -> Callable[[Engine, UUID], tuple[object, ...]]:
    def prepare(engine: Engine, worker: UUID) -> tuple[object, ...]:
        engine.pause(queue, "tests", seconds, probe_seconds)
        return (worker,)

    return prepare


CASES = {
    "tick": Case(f"SELECT * FROM {{bus}}.tick({BATCH})", lambda e, w: ()),
    "claim": Case(
        f"SELECT * FROM {{bus}}.claim(%s, gen_random_uuid(), '{{{WAITING},{DRAINED}}}', '{{{BATCH},{BATCH}}}',"
        " 1000000)",
        lambda e, w: (w,),
    ),
    "claim_due": Case(
        f"SELECT * FROM {{bus}}.claim_due(%s, gen_random_uuid(), '{{{RETRYING}}}', '{{{BATCH}}}', '{{-infinity}}',"
        " 1000000, false)",
        lambda e, w: (w,),
    ),
    "claim_due of a released range": Case(
        f"SELECT * FROM {{bus}}.claim_due(%s, gen_random_uuid(), '{{{WAITING}}}', '{{{BATCH}}}', '{{-infinity}}',"
        " 1000000, false)",
        released_range,
    ),
    "claim_due alone": Case(
        f"SELECT * FROM {{bus}}.claim_due(%s, gen_random_uuid(), '{{{RETRYING}}}', '{{1}}', '{{-infinity}}',"
        " 1000000, true)",
        lambda e, w: (w,),
    ),
    "claim of a paused queue": Case(
        f"SELECT * FROM {{bus}}.claim(%s, gen_random_uuid(), '{{{WAITING}}}', '{{{BATCH}}}', 1000000)",
        paused(WAITING, 600, 1),
    ),
    "claim of a probe": Case(
        f"SELECT * FROM {{bus}}.claim(%s, gen_random_uuid(), '{{{WAITING}}}', '{{{BATCH}}}', 1000000)",
        paused(WAITING, 0, 1),
    ),
    "claim_due of a paused queue": Case(
        f"SELECT * FROM {{bus}}.claim_due(%s, gen_random_uuid(), '{{{RETRYING}}}', '{{{BATCH}}}', '{{-infinity}}',"
        " 1000000, false)",
        paused(RETRYING, 600, 1),
    ),
    "claim_due of a probe": Case(
        f"SELECT * FROM {{bus}}.claim_due(%s, gen_random_uuid(), '{{{RETRYING}}}', '{{{BATCH}}}', '{{-infinity}}',"
        " 1000000, false)",
        paused(RETRYING, 0, 1),
    ),
    "settle": Case("SELECT * FROM {bus}.settle(ARRAY[%s::bigint], ARRAY[%s::uuid], NULL)", claimed),
    "settle with outcomes": Case("SELECT * FROM {bus}.settle(ARRAY[%s::bigint], ARRAY[%s::uuid], %s)", settle_said),
    "record_progress": Case(
        'SELECT * FROM {bus}.record_progress(%s, %s, \'{1,2,3}\', \'[{"seq": 4, "outcome": "retry"}]\')', claimed
    ),
    "settle_exceptions": Case("SELECT * FROM {bus}.settle_exceptions(%s::bigint[], %s::uuid[], %s)", due),
    "settle_exceptions that were lost": Case(
        "SELECT * FROM {bus}.settle_exceptions(%s::bigint[], %s::uuid[], %s)", lost
    ),
    "complete": Case(
        "SELECT {bus}.complete(NULL, %s::bigint[], %s::uuid[], %s::bigint[], %s::bigint[], %s::uuid[], 1, %s::uuid[],"
        " %s::integer[])",
        completing,
    ),
    "take_over": Case("SELECT * FROM {bus}.take_over(%s, 0.5, 3)", dead_peer),
    "take_over of nothing": Case("SELECT * FROM {bus}.take_over(%s, 0.5, 3)", idle_peer),
    "beat": Case("SELECT * FROM {bus}.beat(%s, 30, 9000000, '{}')", lambda e, w: (w,)),
    "held": Case("SELECT * FROM {bus}.held(%s, 0)", lambda e, w: (w,)),
    "release_unknown": Case(
        "SELECT {bus}.release_unknown(%s, ARRAY[%s::bigint], '{}')", lambda e, w: (w, claimed(e, w)[0])
    ),
    "fire_due": Case(f"SELECT * FROM {{bus}}.fire_due({BATCH}, '-infinity')", lambda e, w: ()),
    "fall_asleep": Case("SELECT {bus}.fall_asleep(5)", lambda e, w: ()),
}


@dataclass(frozen=True, slots=True)
class Big:
    """The bus with the backlog, and a session whose plans are from the time before it."""

    dsn: str
    stale: Engine
    veteran: UUID


@pytest.fixture(scope="module")
def big(server: Server, run: str) -> Iterator[Big]:
    with server.database(run) as name, ExitStack() as stack:
        dsn = server.dsn(name)
        migrate(dsn, "eventbus")
        bus, stale = (Engine(stack.enter_context(psycopg.connect(dsn, autocommit=True))) for _ in range(2))
        veteran = backlog.prepare(bus)
        backlog.use_everything(stale)
        backlog.fill(bus, veteran)
        yield Big(dsn, stale, veteran)


@pytest.fixture
def fresh(big: Big) -> Iterator[Engine]:
    with psycopg.connect(big.dsn, autocommit=True) as connection:
        yield Engine(connection)


def cheapest(engine: Engine, statement: str, prepare: Callable[[], tuple[object, ...]]) -> Cost:
    """The least cost of a few runs: the first one, and any after somebody else's DDL, also reads the catalogs."""
    costs = []
    for _ in range(4):
        with measuring(engine) as here:
            costs.append(here.cost(statement, *prepare()))
    return min(costs, key=lambda cost: cost.buffers)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("plans", ["stale", "fresh"])
def test_no_statement_slows_down_as_the_backlog_grows(big: Big, fresh: Engine, plans: str, case: Case) -> None:
    engine = big.stale if plans == "stale" else fresh
    cost = cheapest(engine, case.statement, lambda: case.prepare(engine, big.veteran))
    assert cost.scanned == {}
    assert cost.spilled == 0
    assert cost.buffers < MOST_BUFFERS


def test_a_claim_from_a_million_waiting_costs_what_a_claim_from_ten_thousand_costs(big: Big, fresh: Engine) -> None:
    costs = [
        cheapest(
            fresh,
            "SELECT * FROM {bus}.claim(%s, gen_random_uuid(), ARRAY[%s], '{200}', 1000000)",
            lambda queue=queue: (big.veteran, queue),  # type: ignore[misc]
        ).buffers
        for queue in (WAITING, SMALL)
    ]
    assert costs[0] < costs[1] * 1.2


def test_a_tick_over_a_million_fresh_events_costs_what_a_tick_over_ten_thousand_costs(big: Big, fresh: Engine) -> None:
    costs = []
    for relayed in (1000, backlog.ROWS // 2, backlog.ROWS - backlog.SMALL_BACKLOG, backlog.ROWS):
        with window_from(fresh, relayed):
            costs.append(cheapest(fresh, f"SELECT * FROM {{bus}}.tick({BATCH})", tuple).buffers)
    everything, half, little, nothing = costs
    assert max(everything, half) < little * 1.2
    assert nothing < little


@contextmanager
def window_from(engine: Engine, last_id: int) -> Iterator[None]:
    """Let the position be inside a window over all events, of which those up to ``last_id`` are relayed."""
    engine.rows(
        "INSERT INTO {bus}.ticks (id, snapshot, next_xid, ids_upto, window_snapshot, window_next_xid, window_ids_upto,"
        " last_id, system_identifier, database_oid) SELECT 2, snapshot, next_xid, 0, pg_current_snapshot(), next_xid,"
        " %s, %s, system_identifier, database_oid FROM {bus}.ticks WHERE id = 1",
        backlog.ROWS,
        last_id,
    )
    try:
        yield
    finally:
        engine.rows("DELETE FROM {bus}.ticks WHERE id = 2")


def test_the_rows_of_a_long_transaction_are_not_looked_at_by_every_tick(own_bus: Engine, session: NewSession) -> None:
    bus = own_bus
    bus.resolve(["orders.created"])
    long, idle = session(), "SELECT * FROM {bus}.tick(100)"
    with open_transaction(long):
        long.publish_many(20_000)
        assert cheapest(bus, idle, tuple).buffers > 200
        bus.tick(100)
        assert cheapest(bus, idle, tuple).buffers < 50
    bus.relay()
    assert len(bus.delivered(1)) == 20_000
