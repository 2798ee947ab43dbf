"""What order costs does not grow with how many events of a key wait, nor with how many keys there are.

Counted in pages and not in seconds. The tables were never analysed, and the session made its plans while they were
empty.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from uuid import UUID

import pytest

from tests.postgres.engine.costs import Cost, measuring
from tests.postgres.engine.driver import Engine

BATCH = 20
SMALL_BACKLOG = 10_000
"""What costs are compared with; the indexes of much less have a level less."""
MOST_BUFFERS = 1_500
"""Pages that a call for twenty events may touch; to look at all that is parked of one key takes several thousand."""
CLAIM = f"SELECT * FROM {{bus}}.claim(%s, gen_random_uuid(), ARRAY[%s], '{{{BATCH}}}', 1000000, 0)"
CLAIM_DUE = (
    f"SELECT * FROM {{bus}}.claim_due(%s, gen_random_uuid(), ARRAY[%s], '{{{BATCH}}}', '{{-infinity}}', 1000000,"
    " false, 0)"
)
SETTLE = "SELECT {bus}.settle_exceptions(%s::bigint[], %s::uuid[], %s)"


@pytest.fixture
def queue(own_bus: Engine) -> int:
    """An ordered queue with one lane, in a bus whose plans are made."""
    bus = own_bus
    queue = bus.declare_queue("keys", kind="ordered", lanes=1)
    for table in ("outbox", "deliveries", "claims", "exceptions", "progress", "settlements", "dead_letters"):
        bus.rows(f"ALTER TABLE {{bus}}.{table} SET (autovacuum_enabled = false)")
    bus.resolve(["orders.created"])
    for _ in range(7):  # by then every plan is the one that stays
        use(bus, queue)
    return queue


def use(bus: Engine, queue: int) -> None:
    """Everything that happens to a key, once."""
    bus.publish_keyed("a1", "a2", "a3", "b1", "c1", "d1")
    bus.relay()
    worker = bus.register()
    claim = bus.claimed(worker, queue)
    said = [{"seq": claim.seq("a1"), "outcome": "retry"}, {"seq": claim.seq("b1"), "outcome": "dead", "reason": "x"}]
    said += [{"seq": claim.seq(label), "outcome": "parked"} for label in ("a2", "a3")]
    held = bus.detach(claim, held=[claim.seq("c1")], outcomes=said)
    assert held is not None
    bus.settle_due([one for one in held.values() if one], "done")
    bus.publish_keyed("a4", "b2")
    bus.relay()
    assert bus.claim(worker, queue) is None, "all of it waits behind something"
    bus.rows("SELECT {bus}.redrive(ARRAY(SELECT id FROM {bus}.dead_letters))")
    while due := bus.claim_due(worker, queue):
        bus.settle_due(due[:1], "done")
        bus.settle_due(due[1:], "parked")
    assert bus.value("SELECT count(*) FROM {bus}.exceptions WHERE queue_id = %s", queue) == 0


def fill(bus: Engine, queue: int, keys: int, each: int) -> None:
    """``each`` fresh events of every key, in the order in which they were published."""
    bus.rows("SET session_replication_role = replica")
    bus.rows(
        "WITH new AS (INSERT INTO {bus}.outbox (event_id, topic, payload, size, key)"
        " SELECT gen_random_uuid(), 'orders.created', '1', 2, 'key' || n %% %s FROM generate_series(0, %s) n"
        " RETURNING id, size)"
        " INSERT INTO {bus}.deliveries (queue_id, lane, seq, outbox_id, size)"
        " SELECT %s, 0, w.seq + row_number() OVER (ORDER BY new.id), new.id, new.size FROM new,"
        " (SELECT coalesce(max(d.seq), 0) AS seq FROM {bus}.deliveries d WHERE d.queue_id = %s) w",
        keys,
        keys * each - 1,
        queue,
        queue,
    )
    bus.rows("SET session_replication_role = origin")


def park_all(bus: Engine, queue: int) -> None:
    """Let all that waits in line be parked behind the exceptions of its keys, as claims would."""
    bus.rows(
        "INSERT INTO {bus}.exceptions (due_at, seq, outbox_id, queue_id, lane, state, key)"
        " SELECT clock_timestamp(), d.seq, d.outbox_id, d.queue_id, d.lane, 'parked', o.key"
        " FROM {bus}.deliveries d JOIN {bus}.outbox o ON o.id = d.outbox_id"
        " WHERE d.queue_id = %s AND d.seq > (SELECT max(c.hi) FROM {bus}.claims c WHERE c.queue_id = %s)",
        queue,
        queue,
    )
    bus.rows(
        "WITH c AS (INSERT INTO {bus}.claims (token, worker_id, lo, hi, queue_id, lane)"
        " SELECT gen_random_uuid(), gen_random_uuid(), max(c.hi) + 1, (SELECT max(d.seq) FROM {bus}.deliveries d"
        " WHERE d.queue_id = %s), %s, 0 FROM {bus}.claims c WHERE c.queue_id = %s RETURNING id)"
        " INSERT INTO {bus}.settlements (claim_id, kind) SELECT c.id, 'settled' FROM c",
        queue,
        queue,
        queue,
    )


def block(bus: Engine, queue: int, worker: UUID, keys: int) -> None:
    """Let the first event of every key fail."""
    fill(bus, queue, keys, 1)
    while (claim := bus.claim(worker, queue, 1000)) is not None:
        said = [{"seq": seq, "outcome": "retry", "delay": 0} for seq in claim.seqs]
        bus.settle(claim, outcomes={claim.id: said})


def cheapest(bus: Engine, statement: str, prepare: Callable[[], tuple[object, ...]]) -> Cost:
    """The least cost of a few runs: the first one also reads the catalogs."""
    costs = []
    for _ in range(3):
        with measuring(bus) as here:
            costs.append(here.cost(statement, *prepare()))
    return min(costs, key=lambda cost: cost.buffers)


def costs(bus: Engine, queue: int, worker: UUID) -> dict[str, Cost]:
    """Of each hot statement while keys are blocked."""

    def held(outcomes: tuple[str, ...]) -> tuple[object, ...]:
        taken = bus.claim_due(worker, queue, BATCH)
        assert len(taken) == BATCH
        said = [
            {"id": one.id, "outcome": outcomes[number % len(outcomes)], "reason": "x"}
            for number, one in enumerate(taken)
        ]
        return ([one.id for one in taken], [one.token for one in taken], json.dumps(said))

    return {
        "claim": cheapest(bus, CLAIM, lambda: (worker, queue)),
        "claim due": cheapest(bus, CLAIM_DUE, lambda: (worker, queue)),
        "settle done": cheapest(bus, SETTLE, lambda: held(("done",))),
        "settle failed": cheapest(bus, SETTLE, lambda: held(("retry", *["parked"] * (BATCH - 1)))),
        "settle dead": cheapest(bus, SETTLE, lambda: held(("dead", *["parked"] * (BATCH - 1)))),
        "settle released": cheapest(bus, SETTLE, lambda: held(("released",))),
    }


@pytest.mark.parametrize(("keys", "many"), [(200, 1_000), (1, 100_000)], ids=["200 keys", "1 key"])
def test_the_time_of_a_claim_stays_flat_however_much_waits_behind_failed_events(
    own_bus: Engine, queue: int, keys: int, many: int
) -> None:
    bus, worker = own_bus, own_bus.register()
    block(bus, queue, worker, keys)
    fill(bus, queue, keys, many)
    park_all(bus, queue)
    fill(bus, queue, keys, BATCH)  # and these come when the others are parked
    for name, cost in costs(bus, queue, worker).items():
        assert cost.scanned == {}, name
        assert cost.spilled == 0, name
        assert cost.buffers < MOST_BUFFERS, name


@pytest.mark.parametrize(("keys", "many"), [(200, 1_000), (1, 100_000)], ids=["200 keys", "1 key"])
def test_the_time_of_a_claim_stays_flat_however_much_waits_in_line(
    own_bus: Engine, queue: int, keys: int, many: int
) -> None:
    bus, worker = own_bus, own_bus.register()
    fill(bus, queue, keys, SMALL_BACKLOG // keys)
    before = cheapest(bus, CLAIM, lambda: (worker, queue))
    fill(bus, queue, keys, many)
    after = cheapest(bus, CLAIM, lambda: (worker, queue))
    assert after.scanned == {}
    assert after.buffers < before.buffers * 1.3


IDEMPOTENT_SETTLE = "SELECT {bus}.settle(ARRAY[%s::bigint], ARRAY[%s::uuid], NULL)"


def test_recorded_executions_cost_the_same_however_many_there_are(own_bus: Engine) -> None:
    bus = own_bus
    queue = bus.declare_queue("once", tracking="idempotent")
    bus.rows("ALTER TABLE {bus}.processed_events SET (autovacuum_enabled = false)")
    bus.resolve(["orders.created"])
    worker = bus.register()
    for _ in range(7):  # by then every plan is the one that stays
        event_id = bus.publish()
        bus.publish(event_id=event_id)
        bus.publish_many(4)
        bus.relay()
        claim = bus.claimed(worker, queue)
        said = [{"seq": claim.hi, "outcome": "dead", "reason": "x"}, {"seq": claim.lo, "outcome": "retry"}]
        bus.settle(claim, outcomes={claim.id: said})
        bus.settle_due(bus.claim_due(worker, queue), "done")
    bus.rows(
        "INSERT INTO {bus}.processed_events (queue_id, event_id, owner, completed_at)"
        " SELECT %s, gen_random_uuid(), NULL, clock_timestamp() FROM generate_series(1, 200000)",
        queue,
    )
    twins = [bus.publish() for _ in range(BATCH // 2)]
    for event_id in twins:
        bus.publish(event_id=event_id)
    bus.relay()

    def claimed() -> tuple[object, ...]:
        claim = bus.claimed(worker, queue, BATCH)
        return (claim.id, claim.token)

    for statement, prepare in ((CLAIM, lambda: (worker, queue)), (IDEMPOTENT_SETTLE, claimed)):
        cost = cheapest(bus, statement, prepare)
        assert cost.scanned == {}, statement
        assert cost.spilled == 0, statement
        assert cost.buffers < MOST_BUFFERS, statement
