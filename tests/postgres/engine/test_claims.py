"""The rules of the claim: see "Claiming" in docs/storage-engine.md."""

from __future__ import annotations

from uuid import uuid4

import psycopg
import pytest

from tests.postgres.engine.driver import MEBIBYTE, Engine
from tests.postgres.engine.sessions import GATE, Background, NewSession, gate_closed, open_transaction


def publish_and_relay(bus: Engine, count: int, size: int = 2) -> list[str]:
    bus.publish_many(count, size=size)
    bus.relay()
    return bus.delivered(1)


def test_every_delivery_is_claimed_once_and_in_order(bus: Engine) -> None:
    events = publish_and_relay(bus, 7)
    worker = bus.register()
    first, second = bus.claimed(worker, 1, 3), bus.claimed(worker, 1)
    assert [*first.event_ids, *second.event_ids] == events
    assert (first.lo, first.hi, second.lo, second.hi) == (1, 3, 4, 7)
    assert bus.claim(worker, 1) is None


def test_no_range_is_claimed_twice_by_a_claim_whose_statement_began_before_the_last_one_committed(
    bus: Engine, session: NewSession, background: Background
) -> None:
    publish_and_relay(bus, 5)
    worker, first, second = bus.register(), session(), session()
    late = (
        f"WITH gate AS MATERIALIZED (SELECT pg_advisory_xact_lock({GATE})) SELECT c.claim_id, c.seq FROM gate,"
        " LATERAL {bus}.claim(%s, gen_random_uuid(), '{1}', '{10}', 1000) c"
    )
    with gate_closed(first):
        waiting = background.blocked(second, lambda: second.rows(late, worker))
        assert first.claimed(worker, 1, 3).hi == 3
    assert waiting.result() == [(2, 4), (2, 5)]


def test_a_worker_that_lost_its_claim_in_a_server_crash_settles_nothing_of_the_next_owner_of_its_number(
    bus: Engine,
) -> None:
    events = publish_and_relay(bus, 3)
    survivor, newcomer = bus.register(), bus.register()
    lost = bus.claimed(survivor, 1)
    bus.rows("DELETE FROM {bus}.claims")  # as a crash does with a commit that had not reached the disk,
    bus.rows("SELECT setval('{bus}.claims_id_seq', 1, false)")  # and with the number that it had drawn
    again = bus.claimed(newcomer, 1)
    assert (again.id, again.event_ids) == (lost.id, events)
    assert bus.settle(lost, outcomes={lost.id: [{"seq": 1, "outcome": "dead", "reason": "?"}]}) == set()
    assert bus.record(lost, done=[1, 2, 3]) is False
    assert bus.rows("SELECT 1 FROM {bus}.progress UNION ALL SELECT 1 FROM {bus}.dead_letters") == []
    assert bus.settle(again) == {again.id}


def test_a_queue_that_somebody_else_is_claiming_from_is_reported_and_not_taken_for_empty(
    bus: Engine, session: NewSession
) -> None:
    bus.declare(audit="#")
    publish_and_relay(bus, 3)
    worker, other = bus.register(), session()
    with open_transaction(other):
        assert other.claim(worker, 1, 1) is not None
        claims, more = bus.claim_any(worker, {1: 10, 2: 2})
        assert [(claim.queue_id, claim.seqs) for claim in claims] == [(2, [1, 2])]
        assert more == {1: None, 2: 3}
    assert bus.claimed(worker, 1).seqs == [2, 3]


def test_an_event_that_the_outbox_no_longer_has_is_reported_and_not_skipped(bus: Engine) -> None:
    events = publish_and_relay(bus, 3)
    bus.rows("DELETE FROM {bus}.outbox WHERE event_id = %s", events[1])
    claim = bus.claimed(bus.register(), 1)
    assert claim.event_ids == [events[0], None, events[2]]
    bus.settle(claim, outcomes={claim.id: [{"seq": 2, "outcome": "dead", "reason": "event missing"}]})
    assert bus.rows("SELECT seq, reason, event_id FROM {bus}.dead_letters") == [(2, "event missing", None)]


def test_a_claim_fits_into_the_memory_that_the_worker_grants(bus: Engine) -> None:
    bus.declare(audit="#")
    publish_and_relay(bus, 5, size=3 * MEBIBYTE)
    worker = bus.register()
    claims, more = bus.claim_any(worker, {1: 100, 2: 100}, max_bytes=8 * MEBIBYTE)
    assert [(claim.queue_id, claim.seqs) for claim in claims] == [(1, [1, 2])]
    assert more == {1: 5, 2: 5}


def test_an_event_that_is_larger_than_the_memory_granted_is_claimed_alone_and_not_stuck(bus: Engine) -> None:
    publish_and_relay(bus, 2, size=20 * MEBIBYTE)
    worker = bus.register()
    assert bus.claimed(worker, 1).seqs == [1]
    assert bus.claimed(worker, 1).seqs == [2]


def test_the_queue_that_is_named_first_is_claimed_first_so_that_no_queue_starves(bus: Engine) -> None:
    bus.declare(audit="#")
    publish_and_relay(bus, 2, size=20 * MEBIBYTE)
    claims, more = bus.claim_any(bus.register(), {2: 10, 1: 10})
    assert [(claim.queue_id, claim.seqs) for claim in claims] == [(2, [1])]
    assert more == {1: 2, 2: 2}


def test_queues_beyond_the_64th_are_reported_and_not_forgotten(bus: Engine) -> None:
    bus.declare(**{f"q{number}": "#" for number in range(66)})
    publish_and_relay(bus, 1)
    worker, queues = bus.register(), dict.fromkeys(range(1, 68), 10)
    claims, more = bus.claim_any(worker, queues)
    assert len(claims) == 64
    assert sorted({claim.queue_id for claim in claims} | more.keys()) == list(queues)
    rest, more = bus.claim_any(worker, queues)
    assert (len(rest), more) == (3, {})


def test_who_is_not_a_live_worker_gets_nothing(bus: Engine) -> None:
    publish_and_relay(bus, 1)
    dead, worker = bus.register(), bus.register()
    bus.fall_silent(dead)
    bus.take_over(worker)
    for nobody in (dead, uuid4()):
        with pytest.raises(psycopg.Error, match="lost its lease") as caught:
            bus.claim(nobody, 1)
        assert caught.value.sqlstate == "EB001"
    assert bus.claim(worker, 1) is not None


def test_nothing_is_claimed_while_the_bus_is_paused(bus: Engine) -> None:
    publish_and_relay(bus, 2)
    worker = bus.register()
    claim = bus.claimed(worker, 1, 1)
    bus.settle(claim, outcomes={claim.id: [{"seq": 1, "outcome": "retry", "delay": 0}]})
    bus.rows("UPDATE {bus}.bus SET state = 'paused'")
    for call in (bus.claim, bus.claim_due):
        with pytest.raises(psycopg.Error, match="paused") as caught:
            call(worker, 1)
        assert caught.value.sqlstate == "EB002"
    bus.rows("UPDATE {bus}.bus SET state = 'running'")
    assert bus.claimed(worker, 1).seqs == [2]
    assert len(bus.claim_due(worker, 1)) == 1
