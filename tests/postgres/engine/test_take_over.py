"""Who takes over what from whom: see "Take-over" in docs/storage-engine.md."""

from __future__ import annotations

from uuid import UUID

import psycopg
import pytest

from tests.postgres.engine.driver import Claim, Engine, Row
from tests.postgres.engine.sessions import Background, NewSession, open_transaction


def claimed(bus: Engine, worker: UUID, count: int = 5) -> Claim:
    bus.publish_many(count)
    bus.relay()
    return bus.claimed(worker, 1, count)


def exceptions(bus: Engine) -> list[Row]:
    """(first, last, crashes) of every exception."""
    return bus.rows("SELECT seq, coalesce(range_hi, seq), crashes FROM {bus}.exceptions ORDER BY seq")


def test_what_a_dead_worker_held_comes_back_and_what_a_live_one_holds_does_not(bus: Engine) -> None:
    dead, live = bus.register(), bus.register()
    claimed(bus, dead, 2)
    claimed(bus, live, 2)
    bus.fall_silent(dead)
    assert bus.take_over(live) == (1, 2)
    assert [row[:2] for row in exceptions(bus)] == [(1, 1), (2, 2)]
    assert bus.take_over(live) == (0, 0)


def test_only_events_that_may_have_been_running_count_a_crash(bus: Engine) -> None:
    dead, live = bus.register(), bus.register()
    listed, unlisted = claimed(bus, dead), None
    bus.beat(dead, {listed.id: 2})
    unlisted = claimed(bus, dead, 2)
    bus.fall_silent(dead)
    assert bus.take_over(live) == (1, 7)
    assert exceptions(bus) == [(1, 1, 1), (2, 2, 1), (3, 5, 0), (unlisted.lo, 6, 1), (unlisted.hi, 7, 1)]


def test_a_claim_of_which_nothing_had_started_comes_back_as_one_range_without_a_crash(bus: Engine) -> None:
    dead = bus.register()
    claim = claimed(bus, dead, 1000)
    bus.beat(dead, {claim.id: 0})
    bus.fall_silent(dead)
    bus.take_over(bus.register())
    assert exceptions(bus) == [(1, 1000, 0)]


def test_what_was_finished_before_the_crash_does_not_come_back(bus: Engine) -> None:
    dead = bus.register()
    claim = claimed(bus, dead, 8)
    bus.record(claim, done=[1, 5], outcomes=[{"seq": 2, "outcome": "dead", "reason": "no use"}])
    bus.beat(dead, {claim.id: 3})
    bus.fall_silent(dead)
    assert bus.take_over(bus.register()) == (1, 5)
    assert exceptions(bus) == [(3, 3, 1), (4, 4, 0), (6, 8, 0)]


def test_an_event_that_kills_its_workers_ends_as_a_dead_letter_with_its_whole_event(bus: Engine) -> None:
    claimed(bus, first := bus.register(), 1)
    for number, doomed in enumerate([first, bus.register(), bus.register()], 1):
        if number > 1:
            [held] = bus.claim_due(doomed, 1, alone=number > 2)
            assert held.crashes == number - 1
        bus.fall_silent(doomed)
        assert bus.take_over(bus.register()) == (1, 1)
    assert exceptions(bus) == []
    [event] = bus.rows("SELECT event_id, topic, payload, headers, published_at FROM {bus}.outbox")
    assert bus.rows("SELECT event_id, topic, payload, headers, published_at FROM {bus}.dead_letters") == [event]
    assert bus.rows("SELECT seq, crashes, attempts, reason FROM {bus}.dead_letters") == [(1, 3, 0, "worker died")]


def test_the_first_crash_is_the_last_where_one_is_the_limit(bus: Engine) -> None:
    dead = bus.register()
    claim = claimed(bus, dead, 3)
    bus.beat(dead, {claim.id: 1})
    bus.fall_silent(dead)
    bus.take_over(bus.register(), max_crashes=1)
    assert exceptions(bus) == [(2, 3, 0)]
    assert bus.rows("SELECT seq, crashes, topic FROM {bus}.dead_letters") == [(1, 1, "orders.created")]


def test_a_single_crash_costs_no_speed_what_was_running_runs_on_with_the_others(bus: Engine) -> None:
    dead = bus.register()
    claim = claimed(bus, dead, 3)
    bus.beat(dead, {claim.id: 2})
    bus.fall_silent(dead)
    worker = bus.register()
    bus.take_over(worker)
    assert bus.claim_due(worker, 1, alone=True) == []
    assert [held.crashes for held in bus.claim_due(worker, 1)] == [1, 1, 0]


@pytest.mark.parametrize(("limit", "crashes"), [(3, 2), (9, 2), (2, 1)])
def test_what_was_running_in_the_last_crash_but_one_or_the_second_runs_alone_and_so_hurts_nobody_again(
    bus: Engine, limit: int, crashes: int
) -> None:
    worker = bus.register()
    claimed(bus, worker, 2)
    for number in range(1, crashes + 1):
        bus.fall_silent(worker)
        worker = bus.register()
        bus.take_over(worker, max_crashes=limit)
        if number < crashes:
            taken = bus.claim_due(worker, 1)
            assert len(taken) == 2
    assert bus.claim_due(worker, 1) == []
    assert [held.crashes for held in bus.claim_due(worker, 1, 100, alone=True)] == [crashes]
    assert len(bus.claim_due(worker, 1, 100, alone=True)) == 1


def test_nobody_is_taken_over_soon_after_the_server_started_because_then_everybody_is_silent(bus: Engine) -> None:
    dead, live = bus.register(), bus.register()
    claimed(bus, dead)
    bus.fall_silent(dead)
    uptime = bus.value("SELECT EXTRACT(EPOCH FROM clock_timestamp() - pg_postmaster_start_time())::double precision")
    assert bus.take_over(live, lease=uptime * 2 + 60) == (0, 0)
    assert bus.take_over(live, lease=uptime) == (1, 5)


def test_a_worker_learns_from_its_next_heartbeat_and_its_next_claim_that_it_was_taken_over(bus: Engine) -> None:
    zombie, live = bus.register(), bus.register()
    claimed(bus, zombie)
    bus.publish_many(1)
    bus.relay()
    assert bus.beat(zombie) == (True, 0)
    bus.fall_silent(zombie)
    assert bus.beat(live) == (True, 1)
    bus.take_over(live)
    assert bus.beat(zombie) == (False, 0)
    with pytest.raises(psycopg.Error, match="lost its lease"):
        bus.claim(zombie, 1)


def test_a_worker_in_the_middle_of_a_claim_is_not_taken_over_without_that_claim(
    bus: Engine, session: NewSession
) -> None:
    claimed(bus, dead := bus.register(), 2)
    bus.publish_many(1)
    bus.relay()
    bus.fall_silent(dead)
    claims = session()
    with open_transaction(claims):
        assert claims.claimed(dead, 1).seqs == [3]
        assert bus.take_over(bus.register()) == (0, 0)
    assert bus.take_over(bus.register()) == (1, 3)


def test_a_worker_that_is_being_taken_over_claims_nothing_that_nobody_would_look_for(
    bus: Engine, session: NewSession, background: Background
) -> None:
    claimed(bus, dead := bus.register(), 2)
    bus.publish_many(1)
    bus.relay()
    bus.fall_silent(dead)
    claims, takes = session(), session()
    with open_transaction(takes):
        assert takes.take_over(takes.register()) == (1, 2)
        claiming = background.blocked(claims, lambda: claims.claim(dead, 1))
    with pytest.raises(psycopg.Error, match="lost its lease"):
        claiming.result()
    assert bus.claimed(bus.register(), 1).seqs == [3]


def test_two_workers_that_take_over_at_once_hand_nothing_out_twice(bus: Engine, session: NewSession) -> None:
    claimed(bus, dead := bus.register())
    bus.fall_silent(dead)
    first = session()
    with open_transaction(first):
        assert first.take_over(first.register()) == (1, 5)
        assert bus.take_over(bus.register()) == (0, 0)
    assert len(exceptions(bus)) == 5


def test_a_worker_that_leaves_loses_nothing_that_it_still_holds(bus: Engine) -> None:
    idle, busy, live = bus.register(), bus.register(), bus.register()
    claimed(bus, busy)
    for worker in (idle, busy):
        bus.rows("SELECT {bus}.unregister_worker(%s)", worker)
    assert bus.column("SELECT id FROM {bus}.workers ORDER BY started_at") == [busy, live]
    assert bus.take_over(live) == (1, 5)


def test_a_claim_whose_settlement_was_lost_in_a_server_crash_is_taken_over_although_its_worker_forgot_it(
    bus: Engine,
) -> None:
    worker, live = bus.register(), bus.register()
    first = claimed(bus, worker, 2)
    second = claimed(bus, worker, 2)
    bus.settle(second)  # of the first one the settlement was lost
    bus.beat(worker, open_from=second.id + 1)
    assert bus.column("SELECT id FROM {bus}.held(%s, %s)", worker, second.id + 1) == [first.id]
    bus.fall_silent(worker)
    assert bus.take_over(live) == (1, 2)


def test_a_claim_whose_number_repeats_after_a_server_crash_is_taken_over(bus: Engine) -> None:
    worker, live = bus.register(), bus.register()
    for _ in range(3):
        bus.settle(claimed(bus, worker, 1))
    remembered = 4
    bus.rows("DELETE FROM {bus}.settlements; DELETE FROM {bus}.claims")
    bus.rows("SELECT setval('{bus}.claims_id_seq', 1, false)")
    bus.beat(worker, open_from=remembered)
    again = claimed(bus, worker, 1)
    assert again.id < remembered
    bus.fall_silent(worker)
    assert bus.take_over(live) == (1, 1)


def test_a_claim_in_flight_during_a_heartbeat_is_taken_over(bus: Engine, session: NewSession) -> None:
    """Its connection broke, its reply is lost, and the server commits it after later claims were settled."""
    bus.declare(audit="#")
    worker, live, broken = bus.register(), bus.register(), session()
    bus.publish_many(2)
    bus.relay()
    with open_transaction(broken):
        assert broken.claim(worker, 1) is not None
        later = bus.claimed(worker, 2)
        bus.settle(later)
        bus.beat(worker, open_from=later.id + 1)
    bus.fall_silent(worker)
    assert bus.take_over(live) == (1, 2)


def test_the_search_for_open_claims_starts_where_everything_before_is_settled(bus: Engine) -> None:
    worker = bus.register()
    settled, still_open = claimed(bus, worker, 1), claimed(bus, worker, 1)
    bus.settle(settled)
    bus.beat(worker, {still_open.id: 0}, open_from=still_open.id)
    assert bus.value("SELECT open_from FROM {bus}.workers WHERE id = %s", worker) == still_open.id


def test_a_worker_gives_back_a_claim_whose_reply_it_never_got(bus: Engine) -> None:
    worker = bus.register()
    lost_reply = claimed(bus, worker, 4)
    assert bus.rows("SELECT kind, id FROM {bus}.held(%s, 0)", worker) == [("claim", lost_reply.id)]
    assert bus.value("SELECT {bus}.release_unknown(%s, %s, '{}')", worker, [lost_reply.id]) == 4
    assert exceptions(bus) == [(1, 4, 0)]
    assert bus.rows("SELECT kind, id FROM {bus}.held(%s, 0)", worker) == []
    assert len(bus.claim_due(worker, 1)) == 4  # and of these the reply is lost, too
    held = bus.column("SELECT id FROM {bus}.held(%s, 0)", worker)
    assert bus.value("SELECT {bus}.release_unknown(%s, '{}', %s)", worker, held) == 4
    assert [row[2] for row in exceptions(bus)] == [0] * 4


def test_a_worker_gives_back_nothing_that_belongs_to_another(bus: Engine) -> None:
    owner, other = bus.register(), bus.register()
    claim = claimed(bus, owner, 2)
    bus.settle(claim, outcomes={claim.id: [{"seq": 1, "outcome": "retry", "delay": 0}]})
    [held] = bus.claim_due(owner, 1)
    kept = claimed(bus, owner, 2)
    assert bus.value("SELECT {bus}.release_unknown(%s, %s, %s)", other, [kept.id], [held.id]) == 0
    assert (bus.settle(kept), bus.settle_due([held], "done")) == ({kept.id}, {held.id})
