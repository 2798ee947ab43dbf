"""The rules of settling and recording: see "Settling" in docs/storage-engine.md."""

from __future__ import annotations

import pytest
from psycopg import errors

from tests.postgres.engine.driver import Claim, Engine
from tests.postgres.engine.sessions import Background, NewSession, open_transaction

RETRY = {"outcome": "retry", "delay": 0, "error": {"type": "ValueError"}}


def claimed(bus: Engine, count: int = 5) -> Claim:
    bus.publish_many(count)
    bus.relay()
    return bus.claimed(bus.register(), 1, count)


def waiting(bus: Engine) -> list[tuple[int, int]]:
    """(first, last) seq of every exception."""
    return [tuple(row) for row in bus.rows("SELECT seq, coalesce(range_hi, seq) FROM {bus}.exceptions ORDER BY seq")]


def silence(bus: Engine) -> None:
    """Make every worker look dead."""
    bus.fall_silent(*bus.column("SELECT id FROM {bus}.workers"))


def take_over(session: Engine) -> tuple[int, int]:
    return session.take_over(session.register())


def test_what_a_handler_decided_is_what_is_stored(bus: Engine) -> None:
    claim = claimed(bus)
    said = [
        {"seq": 1, "outcome": "retry", "delay": 60, "error": {"type": "ValueError"}},
        {"seq": 3, "outcome": "dead", "reason": "no use", "error": {"type": "KeyError"}},
        {"seq": 4, "hi": 5, "outcome": "released"},
    ]
    assert bus.settle(claim, outcomes={claim.id: said}) == {claim.id}
    assert bus.rows(
        "SELECT seq, range_hi, attempts, crashes, state, due_at > clock_timestamp(), first_error, last_error,"
        " outbox_id IS NULL FROM {bus}.exceptions ORDER BY seq"
    ) == [
        (1, None, 1, 0, "waiting", True, {"type": "ValueError"}, {"type": "ValueError"}, False),
        (4, 5, 0, 0, "waiting", False, None, None, True),
    ]
    assert bus.rows(
        "SELECT seq, attempts, reason, first_error, last_error, topic, payload, event_id::text FROM {bus}.dead_letters"
    ) == [(3, 1, "no use", {"type": "KeyError"}, {"type": "KeyError"}, "orders.created", {}, claim.event_ids[2])]


def test_settling_again_after_a_lost_reply_gives_the_same_answer_and_repeats_nothing(bus: Engine) -> None:
    claim = claimed(bus)
    outcomes = {claim.id: [{"seq": 2, **RETRY}, {"seq": 3, "outcome": "dead", "reason": "no use"}]}
    assert bus.settle(claim, outcomes=outcomes) == {claim.id}
    assert bus.settle(claim, outcomes=outcomes) == {claim.id}
    assert waiting(bus) == [(2, 2)]
    assert bus.column("SELECT seq FROM {bus}.dead_letters") == [3]


def test_nothing_is_written_for_a_claim_that_was_taken_over(bus: Engine) -> None:
    claim = claimed(bus)
    silence(bus)
    assert take_over(bus) == (1, 5)
    before = waiting(bus)
    assert bus.settle(claim, outcomes={claim.id: [{"seq": 1, "outcome": "dead", "reason": "late"}]}) == set()
    assert bus.record(claim, done=[2], outcomes=[{"seq": 3, "outcome": "dead", "reason": "late"}]) is False
    assert (waiting(bus), bus.rows("SELECT 1 FROM {bus}.dead_letters")) == (before, [])


def test_the_claims_that_are_still_ours_are_settled_although_others_were_lost(bus: Engine) -> None:
    bus.publish_many(4)
    bus.relay()
    dead, live = bus.register(), bus.register()
    lost, ours = bus.claimed(dead, 1, 2), bus.claimed(live, 1, 2)
    bus.fall_silent(dead)
    take_over(bus)
    assert bus.settle(lost, ours) == {ours.id}


def test_a_claim_that_was_cleaned_up_settles_nothing(bus: Engine) -> None:
    claim = claimed(bus)
    bus.rows("DELETE FROM {bus}.claims")
    assert bus.settle(claim, outcomes={claim.id: [{"seq": 1, **RETRY}]}) == set()
    assert bus.record(claim, outcomes=[{"seq": 1, **RETRY}]) is False
    assert waiting(bus) == []


def test_a_claim_that_is_being_cleaned_up_settles_nothing(
    bus: Engine, session: NewSession, background: Background
) -> None:
    claim = claimed(bus)
    settles, cleans = session(), session()
    with open_transaction(cleans):
        cleans.rows("DELETE FROM {bus}.claims")
        settling = background.blocked(
            settles, lambda: settles.settle(claim, outcomes={claim.id: [{"seq": 2, **RETRY}]})
        )
    with pytest.raises(errors.ForeignKeyViolation):
        settling.result()
    assert waiting(bus) == []
    assert bus.settle(claim) == set()


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_a_settlement_in_flight_decides_before_the_take_over_that_waits_for_it(
    bus: Engine, session: NewSession, background: Background, commits: bool
) -> None:
    claim = claimed(bus)
    silence(bus)
    settles, takes = session(), session()
    settles.rows("BEGIN")
    assert settles.settle(claim, outcomes={claim.id: [{"seq": 2, **RETRY}]}) == {claim.id}
    taking = background.blocked(takes, lambda: take_over(takes))
    settles.rows("COMMIT" if commits else "ROLLBACK")
    assert taking.result() == ((1, 0) if commits else (1, 5))
    assert waiting(bus) == ([(2, 2)] if commits else [(n, n) for n in range(1, 6)])


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_a_take_over_in_flight_decides_before_the_settlement_that_waits_for_it(
    bus: Engine, session: NewSession, background: Background, commits: bool
) -> None:
    claim = claimed(bus)
    silence(bus)
    settles, takes = session(), session()
    takes.rows("BEGIN")
    assert take_over(takes) == (1, 5)
    settling = background.blocked(settles, lambda: settles.settle(claim, outcomes={claim.id: [{"seq": 2, **RETRY}]}))
    takes.rows("COMMIT" if commits else "ROLLBACK")
    assert settling.result() == (set() if commits else {claim.id})
    assert waiting(bus) == ([(n, n) for n in range(1, 6)] if commits else [(2, 2)])


def test_what_a_worker_is_recording_is_not_handed_out_by_the_take_over_that_waits_for_it(
    bus: Engine, session: NewSession, background: Background
) -> None:
    claim = claimed(bus)
    silence(bus)
    records, takes = session(), session()
    with open_transaction(records):
        assert records.record(claim, done=[2, 4], outcomes=[{"seq": 3, "outcome": "dead", "reason": "no use"}])
        taking = background.blocked(takes, lambda: take_over(takes))
    assert taking.result() == (1, 2)
    assert waiting(bus) == [(1, 1), (5, 5)]
    assert bus.column("SELECT seq FROM {bus}.dead_letters") == [3]


def test_what_a_take_over_hands_out_is_not_also_recorded_by_the_worker_that_waits_for_it(
    bus: Engine, session: NewSession, background: Background
) -> None:
    claim = claimed(bus)
    silence(bus)
    records, takes = session(), session()
    with open_transaction(takes):
        assert take_over(takes) == (1, 5)
        recording = background.blocked(
            records, lambda: records.record(claim, done=[2], outcomes=[{"seq": 3, "outcome": "dead", "reason": "late"}])
        )
    assert recording.result() is False
    assert waiting(bus) == [(n, n) for n in range(1, 6)]
    assert bus.rows("SELECT 1 FROM {bus}.dead_letters") == []


def test_what_was_recorded_is_not_repeated_by_the_settlement(bus: Engine) -> None:
    claim = claimed(bus)
    assert bus.record(claim, done=[1], outcomes=[{"seq": 2, **RETRY}])
    assert bus.settle(claim, outcomes={claim.id: [{"seq": 1, **RETRY}, {"seq": 2, **RETRY}, {"seq": 3, **RETRY}]})
    assert waiting(bus) == [(2, 2), (3, 3)]


def test_a_released_range_that_grew_after_a_lost_reply_loses_nothing_and_repeats_nothing(bus: Engine) -> None:
    claim = claimed(bus, 10)
    assert bus.record(claim, done=[7], outcomes=[{"seq": 5, "hi": 6, "outcome": "released"}])
    assert bus.settle(claim, outcomes={claim.id: [{"seq": 5, "hi": 10, "outcome": "released"}]}) == {claim.id}
    assert waiting(bus) == [(5, 6), (8, 10)]


def test_outcomes_outside_the_claim_change_nothing(bus: Engine) -> None:
    bus.publish_many(4)
    bus.relay()
    worker = bus.register()
    mine, other = bus.claimed(worker, 1, 2), bus.claimed(worker, 1, 2)
    bus.settle(mine, outcomes={mine.id: [{"seq": other.lo, **RETRY}], other.id: [{"seq": other.lo, **RETRY}]})
    assert waiting(bus) == []
    assert bus.settle(other) == {other.id}
