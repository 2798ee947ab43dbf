"""Idempotent queues: of one event id in one queue one execution, whoever publishes, claims or dies how often.

A *twin* is another delivery of the same event id in the same queue. ``publish_twice`` makes two: ``first``, ``second``.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID, uuid4

import pytest

from tests.postgres.engine.driver import Claim, Engine, Held
from tests.postgres.engine.sessions import Background, NewSession, gate_closed, open_transaction, stop_before


@dataclass(frozen=True, slots=True)
class Execution:
    """A row of ``processed_events``; ``owner`` is named by what its event says."""

    event_id: str
    owner: str | None
    completed: bool
    replay_id: int = 0


@pytest.fixture
def queue(bus: Engine) -> int:
    """A queue whose executions are recorded."""
    return bus.declare_queue("once", tracking="idempotent")


def executions(bus: Engine) -> list[Execution]:
    rows = bus.rows(
        "SELECT p.event_id::text, (SELECT o.payload #>> '{}' FROM {bus}.outbox o WHERE o.id = p.owner),"
        " p.completed_at IS NOT NULL, p.replay_id FROM {bus}.processed_events p ORDER BY p.claimed_at, p.replay_id"
    )
    return [Execution(*row) for row in rows]


def publish_twice(bus: Engine) -> str:
    """Publish one event id twice, as ``first`` and as ``second``; the id."""
    event_id = bus.publish(payload='"first"')
    bus.publish(payload='"second"', event_id=event_id)
    bus.relay()
    return event_id


def one_each(bus: Engine, queue: int) -> tuple[str, Claim, Claim]:
    """The id, a claim with ``first`` and a claim with ``second``, each of a worker of its own."""
    event_id = publish_twice(bus)
    first, second = bus.claimed(bus.register(), queue, 1), bus.claimed(bus.register(), queue, 1)
    assert (first.payloads, second.payloads) == (["first"], ["second"])
    return event_id, first, second


def settle(bus: Engine, claim: Claim, outcome: str, **fields: object) -> None:
    said = {"seq": claim.lo, "outcome": outcome, "delay": 0, "reason": "x"} | fields
    assert bus.settle(claim, outcomes={claim.id: [said]}) == {claim.id}


def one_due(bus: Engine, queue: int) -> Held:
    [held] = bus.claim_due(bus.register(), queue)
    return held


def crash(bus: Engine, claim: Claim, max_crashes: int = 3) -> None:
    bus.fall_silent(*bus.column("SELECT worker_id FROM {bus}.claims WHERE id = %s", claim.id))
    assert bus.take_over(bus.register(), max_crashes)[0] == 1


def test_what_is_claimed_is_recorded_as_pending_by_the_claim_itself(
    bus: Engine, queue: int, session: NewSession
) -> None:
    event_id = bus.publish(payload='"first"')
    bus.relay()
    other = session()
    with open_transaction(other):
        other.claimed(other.register(), queue)
        assert executions(other) == [Execution(event_id, "first", completed=False)]
        assert executions(bus) == []
    assert executions(bus) == [Execution(event_id, "first", completed=False)]


def test_a_claim_that_is_rolled_back_leaves_no_row_that_would_keep_the_event_from_running(
    bus: Engine, queue: int, session: NewSession
) -> None:
    event_id = bus.publish(payload='"first"')
    bus.relay()
    other, worker = session(), bus.register()
    with other.connection.transaction(force_rollback=True):
        other.claimed(worker, queue)
    assert executions(bus) == []
    claim = bus.claimed(worker, queue)
    assert claim.twins == [None]
    assert executions(bus) == [Execution(event_id, "first", completed=False)]


def test_a_queue_that_does_not_record_executions_writes_none(bus: Engine) -> None:
    publish_twice(bus)
    claim = bus.claimed(bus.register(), 1)
    assert claim.twins == [None, None]
    bus.settle(claim)
    assert executions(bus) == []


def test_an_execution_is_completed_with_the_settlement_and_not_before(bus: Engine, queue: int) -> None:
    event_id, first, _ = one_each(bus, queue)
    assert executions(bus) == [Execution(event_id, "first", completed=False)]
    bus.settle(first)
    assert executions(bus) == [Execution(event_id, None, completed=True)]


def test_an_event_that_was_executed_is_not_executed_again_when_it_is_published_again(bus: Engine, queue: int) -> None:
    event_id = bus.publish(payload='"first"')
    bus.relay()
    bus.settle(bus.claimed(bus.register(), queue))
    bus.publish(payload='"second"', event_id=event_id)
    bus.relay()
    second = bus.claimed(bus.register(), queue)
    assert second.twins == ["completed"]
    assert bus.settle(second) == {second.id}
    assert executions(bus) == [Execution(event_id, None, completed=True)]


def test_a_twin_of_a_running_delivery_is_not_run_and_waits_without_losing_an_attempt(bus: Engine, queue: int) -> None:
    event_id, first, second = one_each(bus, queue)
    assert (first.twins, second.twins) == ([None], ["pending"])
    settle(bus, second, "deferred")
    assert executions(bus) == [Execution(event_id, "first", completed=False)]
    again = one_due(bus, queue)
    assert (again.payload, again.twin, again.attempts, again.crashes) == ("second", "pending", 0, 0)
    bus.settle_due([again], "deferred", delay=0)
    bus.settle(first)
    again = one_due(bus, queue)
    assert (again.twin, again.attempts) == ("completed", 0)
    assert bus.settle_due([again], "done") == {again.id}
    assert executions(bus) == [Execution(event_id, None, completed=True)]


def test_a_twin_that_is_settled_as_done_completes_nothing_of_the_one_that_runs(bus: Engine, queue: int) -> None:
    event_id, first, second = one_each(bus, queue)
    bus.settle(second)
    assert executions(bus) == [Execution(event_id, "first", completed=False)]
    settle(bus, first, "retry")
    assert one_due(bus, queue).twin is None


def test_of_two_in_one_claim_one_runs(bus: Engine, queue: int) -> None:
    event_id = publish_twice(bus)
    claim = bus.claimed(bus.register(), queue)
    assert claim.twins == [None, "pending"]
    bus.settle(claim, outcomes={claim.id: [{"seq": claim.hi, "outcome": "deferred", "delay": 0}]})
    assert executions(bus) == [Execution(event_id, None, completed=True)]
    assert one_due(bus, queue).twin == "completed"


def test_of_two_that_are_claimed_at_the_same_moment_one_runs(
    bus: Engine, session: NewSession, background: Background
) -> None:
    queue = bus.declare_queue("once", tracking="idempotent", kind="prioritized", lanes=2)
    event_id = bus.publish(payload='"first"', priority=9)
    bus.publish(payload='"second"', event_id=event_id, priority=0)
    bus.relay()
    one, two = session(), session()
    worker, other = bus.register(), bus.register()
    with open_transaction(one):
        assert one.claimed(worker, queue, 1).twins == [None]
        waiting = background.blocked(two, lambda: two.claimed(other, queue, 1))
    assert (waiting.result().payloads, waiting.result().twins) == (["second"], ["pending"])


def test_of_two_where_the_first_claim_fails_the_other_one_runs(
    bus: Engine, session: NewSession, background: Background
) -> None:
    queue = bus.declare_queue("once", tracking="idempotent", kind="prioritized", lanes=2)
    event_id = bus.publish(payload='"first"', priority=9)
    bus.publish(payload='"second"', event_id=event_id, priority=0)
    bus.relay()
    one, two = session(), session()
    worker, other = bus.register(), bus.register()
    with one.connection.transaction(force_rollback=True):
        one.claimed(worker, queue, 1)
        waiting = background.blocked(two, lambda: two.claimed(other, queue, 1))
    assert (waiting.result().payloads, waiting.result().twins) == (["second"], [None])
    assert executions(bus) == [Execution(event_id, "second", completed=False)]


def test_of_two_in_a_range_that_was_released_one_runs(bus: Engine, queue: int) -> None:
    event_id = publish_twice(bus)
    settle(bus, bus.claimed(bus.register(), queue), "released", hi=2)
    first, second = bus.claim_due(bus.register(), queue)
    assert (first.payload, first.twin, second.payload, second.twin) == ("first", None, "second", "pending")
    bus.settle_each([(first, "done"), (second, "deferred")], delay=0)
    assert executions(bus) == [Execution(event_id, None, completed=True)]
    assert one_due(bus, queue).twin == "completed"


def test_of_two_that_are_released_in_parts_the_owner_runs_whoever_comes_first(bus: Engine, queue: int) -> None:
    _, first, second = one_each(bus, queue)
    settle(bus, second, "released", hi=second.hi)
    held = one_due(bus, queue)
    assert (held.payload, held.twin) == ("second", "pending")
    settle(bus, first, "released", hi=first.hi)
    held = one_due(bus, queue)
    assert (held.payload, held.twin) == ("first", None)


def test_an_event_that_waits_for_its_retry_keeps_its_twin_waiting_and_then_runs_itself(bus: Engine, queue: int) -> None:
    event_id, first, second = one_each(bus, queue)
    settle(bus, first, "retry")
    settle(bus, second, "deferred")
    by_label = {held.payload: held for held in bus.claim_due(bus.register(), queue)}
    assert (by_label["first"].twin, by_label["first"].attempts) == (None, 1)
    assert (by_label["second"].twin, by_label["second"].attempts) == ("pending", 0)
    bus.settle_each([(by_label["first"], "done"), (by_label["second"], "deferred")], delay=0)
    assert executions(bus) == [Execution(event_id, None, completed=True)]


def test_after_a_crash_the_owner_runs_again_and_its_twin_goes_on_waiting(bus: Engine, queue: int) -> None:
    event_id, first, second = one_each(bus, queue)
    crash(bus, first)
    held = one_due(bus, queue)
    assert (held.payload, held.twin, held.crashes) == ("first", None, 1)
    settle(bus, second, "deferred")
    assert one_due(bus, queue).twin == "pending"
    assert bus.settle(first) == set()
    assert executions(bus) == [Execution(event_id, "first", completed=False)], "a zombie completed it"
    bus.settle_due([held], "done")
    assert executions(bus) == [Execution(event_id, None, completed=True)]


def test_when_an_event_has_become_a_dead_letter_its_twin_may_run(bus: Engine, queue: int) -> None:
    event_id, first, second = one_each(bus, queue)
    settle(bus, second, "deferred")
    settle(bus, first, "dead")
    assert executions(bus) == [Execution(event_id, None, completed=False)]
    held = one_due(bus, queue)
    assert (held.payload, held.twin) == ("second", None)
    assert executions(bus) == [Execution(event_id, "second", completed=False)]
    bus.settle_due([held], "done")
    assert executions(bus) == [Execution(event_id, None, completed=True)]


def test_when_an_event_has_died_of_crashes_its_twin_may_run(bus: Engine, queue: int) -> None:
    event_id, first, second = one_each(bus, queue)
    settle(bus, second, "deferred")
    crash(bus, first, max_crashes=1)
    assert bus.column("SELECT reason FROM {bus}.dead_letters") == ["worker died"]
    assert one_due(bus, queue).twin is None
    assert executions(bus) == [Execution(event_id, "second", completed=False)]


def test_when_an_event_dies_while_its_twin_is_being_claimed_the_twin_does_not_run_without_a_record(
    own_bus: Engine, session: NewSession, background: Background
) -> None:
    bus = own_bus
    queue = bus.declare_queue("once", tracking="idempotent")
    stop_before(bus, "claim", "FOR v_lane IN\n        SELECT c.id")
    publish_twice(bus)
    first = bus.claimed(bus.register(), queue, 1)
    gate, claims, worker = session(), session(), bus.register()
    with gate_closed(gate):
        claiming = background.blocked(claims, lambda: claims.claimed(worker, queue))
        settle(bus, first, "dead")
    assert (claiming.result().payloads, claiming.result().twins) == (["second"], ["pending"])


def test_when_an_event_dies_while_its_twin_is_claimed_again_the_twin_does_not_run_without_a_record(
    own_bus: Engine, session: NewSession, background: Background
) -> None:
    bus = own_bus
    queue = bus.declare_queue("once", tracking="idempotent")
    stop_before(bus, "taken", "RETURN QUERY")
    _, first, second = one_each(bus, queue)
    settle(bus, second, "deferred")
    gate, claims, worker = session(), session(), bus.register()
    with gate_closed(gate):
        claiming = background.blocked(claims, lambda: claims.claim_due(worker, queue))
        settle(bus, first, "dead")
    assert [(held.payload, held.twin) for held in claiming.result()] == [("second", "pending")]


def test_when_the_owner_died_in_a_retry_a_new_twin_may_run(bus: Engine, queue: int) -> None:
    event_id = bus.publish(payload='"first"')
    bus.relay()
    settle(bus, bus.claimed(bus.register(), queue), "retry")
    bus.settle_due([one_due(bus, queue)], "dead", reason="x")
    bus.publish(payload='"second"', event_id=event_id)
    bus.relay()
    claim = bus.claimed(bus.register(), queue)
    assert claim.twins == [None]
    assert executions(bus) == [Execution(event_id, "second", completed=False)]


def test_a_redriven_dead_letter_does_not_run_after_its_twin_has(bus: Engine, queue: int) -> None:
    _, first, second = one_each(bus, queue)
    settle(bus, first, "dead")
    settle(bus, second, "deferred")
    bus.settle_due([one_due(bus, queue)], "done")
    bus.rows("SELECT {bus}.redrive(ARRAY(SELECT id FROM {bus}.dead_letters))")
    held = one_due(bus, queue)
    assert (held.payload, held.twin) == ("first", "completed")


def test_a_redriven_dead_letter_waits_while_its_twin_runs(bus: Engine, queue: int) -> None:
    event_id, first, second = one_each(bus, queue)
    settle(bus, first, "dead")
    settle(bus, second, "deferred")
    assert one_due(bus, queue).twin is None
    bus.rows("SELECT {bus}.redrive(ARRAY(SELECT id FROM {bus}.dead_letters))")
    assert one_due(bus, queue).twin == "pending"
    assert executions(bus) == [Execution(event_id, "second", completed=False)]


@pytest.mark.parametrize("lose", ["token", "take-over"])
def test_a_lost_lease_completes_nothing(bus: Engine, queue: int, lose: str) -> None:
    event_id, first, _ = one_each(bus, queue)
    lost = first
    if lose == "token":
        lost = Claim(first.id, uuid4(), queue, first.seqs, first.event_ids)
    else:
        crash(bus, first)
    assert bus.settle(lost) == set()
    assert bus.record(lost, done=[1]) is False
    assert executions(bus) == [Execution(event_id, "first", completed=False)]


def test_a_lost_exception_completes_nothing(bus: Engine, queue: int) -> None:
    event_id, first, _ = one_each(bus, queue)
    settle(bus, first, "retry")
    held = one_due(bus, queue)
    assert bus.settle_due([Held(held.id, uuid4())], "done") == set()
    bus.fall_silent(*bus.column("SELECT worker_id FROM {bus}.exceptions WHERE id = %s", held.id))
    bus.take_over(bus.register())
    assert bus.settle_due([held], "done") == set()
    assert executions(bus) == [Execution(event_id, "first", completed=False)]


def test_progress_completes_what_it_records_and_nothing_else(bus: Engine, queue: int) -> None:
    ids = [bus.publish(payload=f'"{number}"') for number in range(4)]
    bus.relay()
    claim = bus.claimed(bus.register(), queue)
    assert bus.record(claim, done=[1, 2], outcomes=[{"seq": 3, "outcome": "retry", "delay": 0}])
    assert {row.event_id for row in executions(bus) if row.completed} == set(ids[:2])
    bus.settle(claim)
    assert {row.event_id for row in executions(bus) if row.completed} == {ids[0], ids[1], ids[3]}
    bus.settle_due([one_due(bus, queue)], "done")
    assert all(row.completed for row in executions(bus))


@pytest.mark.parametrize("outcome", ["retry", "dead", "released", "deferred"])
def test_an_event_that_is_not_done_is_not_completed(bus: Engine, queue: int, outcome: str) -> None:
    bus.publish()
    bus.relay()
    settle(bus, bus.claimed(bus.register(), queue), outcome)
    assert [row.completed for row in executions(bus)] == [False]


def test_a_replay_runs_what_was_executed_once_more_and_only_once(bus: Engine, queue: int) -> None:
    event_id = bus.publish(payload='"first"')
    bus.relay()
    bus.settle(bus.claimed(bus.register(), queue))
    for seq in (2, 3):
        bus.rows(
            "INSERT INTO {bus}.deliveries (queue_id, lane, seq, outbox_id, size, replay_id)"
            " SELECT %s, 0, %s, o.id, o.size, 7 FROM {bus}.outbox o",
            queue,
            seq,
        )
    first, second = bus.claimed(bus.register(), queue, 1), None
    assert first.twins == [None]
    bus.settle(first)
    second = bus.claimed(bus.register(), queue, 1)
    assert second.twins == ["completed"]
    assert executions(bus) == [
        Execution(event_id, None, completed=True), Execution(event_id, None, completed=True, replay_id=7),
    ]  # fmt: skip


def test_the_same_event_is_executed_once_by_each_queue(bus: Engine, queue: int) -> None:
    other = bus.declare_queue("also", tracking="idempotent")
    bus.publish()
    bus.relay()
    claims, _ = bus.claim_any(bus.register(), {queue: 10, other: 10})
    assert [claim.twins for claim in claims] == [[None], [None]]
    assert bus.settle(*claims) == {claim.id for claim in claims}
    assert [row.completed for row in executions(bus)] == [True, True]


def test_in_an_ordered_queue_a_twin_keeps_the_later_events_of_its_key_waiting(bus: Engine) -> None:
    queue = bus.declare_queue("both", kind="ordered", lanes=1, tracking="idempotent")
    event_id = bus.publish(payload='"a1"', key="a")
    bus.publish(payload='"b1"', key="b", event_id=event_id)
    bus.publish(payload='"b2"', key="b")
    bus.relay()
    claim = bus.claimed(bus.register(), queue)
    assert claim.twins == [None, "pending", None]
    said = [
        {"seq": claim.seq("a1"), "outcome": "retry", "delay": 60},
        {"seq": claim.seq("b1"), "outcome": "deferred", "delay": 0},
        {"seq": claim.seq("b2"), "outcome": "parked"},
    ]
    bus.settle(claim, outcomes={claim.id: said})
    assert [(one.payload, one.twin) for one in bus.claim_due(bus.register(), queue)] == [
        ("b1", "pending"),
        ("b2", None),
    ]


def test_what_is_held_after_a_claim_was_taken_apart_is_completed_when_it_ends(bus: Engine) -> None:
    queue = bus.declare_queue("both", kind="ordered", lanes=1, tracking="idempotent")
    bus.publish_keyed("a1", "b1", "c1")
    bus.relay()
    claim = bus.claimed(bus.register(), queue)
    held = bus.detach(claim, held=[claim.seq("a1")], done=[claim.seq("b1")])
    owners = {row.owner for row in executions(bus) if not row.completed}
    assert owners == {"a1", "c1"}
    assert held is not None
    bus.settle_due([one for one in held.values() if one], "done")
    assert {row.owner for row in executions(bus) if not row.completed} == {"c1"}


def test_two_claims_with_the_same_events_in_opposite_order_both_come_through(
    bus: Engine, session: NewSession, background: Background
) -> None:
    queue = bus.declare_queue("once", tracking="idempotent", kind="prioritized", lanes=2)
    ids = [str(UUID(int=number)) for number in (1, 2)]
    for priority, order in ((9, ids), (0, ids[::-1])):
        for event_id in order:
            bus.publish(event_id=event_id, priority=priority)
    bus.relay()
    one, two = session(), session()
    worker, other = bus.register(), bus.register()
    with open_transaction(one):
        first = one.claimed(worker, queue, 1)
        waiting = background.blocked(two, lambda: two.claimed(other, queue, 2))
        second = one.claimed(worker, queue, 1)
    assert [*first.twins, *second.twins, *waiting.result().twins] == [None, None, "pending", "pending"]


def test_completing_a_whole_claim_moves_no_row_to_another_page_and_touches_no_index(own_bus: Engine) -> None:
    queue = own_bus.declare_queue("once", tracking="idempotent")
    own_bus.publish_many(1000, "once.many")
    own_bus.relay()
    claim = own_bus.claimed(own_bus.register(), queue, 1000)
    with own_bus.connection.transaction():
        own_bus.settle(claim)
        [counts] = own_bus.rows(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables"
            " WHERE schemaname = %s AND relname = 'processed_events'",
            own_bus.schema,
        )
    assert counts == (1000, 1000)
