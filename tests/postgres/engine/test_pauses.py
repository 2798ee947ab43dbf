"""The rules of pauses and their probes: see "Pauses" in docs/storage-engine.md."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from typing import Any
from uuid import UUID

import psycopg
import pytest

from tests.postgres.engine.driver import Engine
from tests.postgres.engine.sessions import Background, NewSession, gate_closed, open_transaction, stop_before

BREAKER = "breaker"
LONG = 600.0
ORDERS = 1


def arrive(bus: Engine, count: int = 3) -> list[str]:
    """Events in the queue of orders."""
    bus.publish_many(count)
    bus.relay()
    return bus.delivered(ORDERS)


def pass_time(bus: Engine, column: str, source: str = BREAKER) -> None:
    """Let a moment of a pause pass: it becomes a second ago."""
    bus.rows(
        f"UPDATE {{bus}}.pauses SET {column} = clock_timestamp() - interval '1 second'"
        f" WHERE source = %s AND {column} IS NOT NULL",
        source,
    )


def half_open(bus: Engine, queue: int = ORDERS, probe_seconds: float = LONG) -> None:
    """The pause of a breaker whose time is over."""
    assert bus.pause(queue, BREAKER, LONG, probe_seconds)
    pass_time(bus, "until")


def told(bus: Engine, worker: UUID, queue: int = ORDERS, limit: int = 10) -> tuple[str | None, float | None, int]:
    """What a claim says of the pause of a queue: state, seconds, and how many events it brought."""
    return bus.told_of_pause("claim", worker, queue, limit)


def told_due(
    bus: Engine, worker: UUID, queue: int = ORDERS, *, alone: bool = False
) -> tuple[str | None, float | None, int]:
    """The same of ``claim_due``."""
    return bus.told_of_pause("claim_due", worker, queue, 10, alone=alone)


def retry_all(bus: Engine, worker: UUID, queue: int = ORDERS) -> None:
    """Everything that is fresh has failed once and is due again."""
    while claim := bus.claim(worker, queue):
        said = [{"seq": seq, "outcome": "retry", "delay": 0} for seq in claim.seqs]
        assert bus.settle(claim, outcomes={claim.id: said}) == {claim.id}


def probe(bus: Engine) -> tuple[UUID | None, UUID | None, bool]:
    """Who has the probe, its token, and whether its time is running."""
    [row] = bus.rows(
        "SELECT probe_by, probe_token, coalesce(probe_until > clock_timestamp(), false) FROM {bus}.pauses"
        " WHERE source = %s",
        BREAKER,
    )
    return row[0], row[1], row[2]


@pytest.mark.parametrize(("seconds", "probe_seconds"), [(None, None), (LONG, None), (LONG, 1.0)])
def test_of_a_paused_queue_nobody_gets_anything_fresh_or_retried_or_crashed_until_it_is_resumed(
    bus: Engine, seconds: float | None, probe_seconds: float | None
) -> None:
    events, worker = arrive(bus, 2), bus.register()
    retried = bus.claimed(worker, ORDERS, 1)
    bus.settle(retried, outcomes={retried.id: [{"seq": 1, "outcome": "retry", "delay": 0}]})
    assert bus.pause(ORDERS, BREAKER, seconds, probe_seconds)
    for state, wait, count in (told(bus, worker), told_due(bus, worker), told_due(bus, worker, alone=True)):
        assert (state, count) == ("paused", 0)
        assert wait is None if seconds is None else wait is not None and LONG - 60 < wait <= LONG
    assert bus.resume(ORDERS, BREAKER)
    assert bus.claimed(worker, ORDERS).event_ids == [events[1]]
    [held] = bus.claim_due(worker, ORDERS)
    assert (held.event_id, held.attempts) == (events[0], 1), "the pause has cost an attempt"


def test_a_pause_of_one_queue_stops_no_other(bus: Engine) -> None:
    audit = bus.declare(audit="#")["audit"]
    arrive(bus)
    bus.pause(ORDERS, BREAKER)
    claims, _ = bus.claim_any(bus.register(), {ORDERS: 10, audit: 10})
    assert [claim.queue_id for claim in claims] == [audit]


def test_the_lanes_of_a_paused_queue_take_no_places_from_those_of_others(bus: Engine) -> None:
    many = bus.declare_queue("many", kind="ordered", lanes=128)
    bus.publish_keyed(*(f"k{'x' * number}1" for number in range(200)))
    bus.relay()
    bus.pause(many, BREAKER)
    claims, more = bus.claim_any(bus.register(), {many: 100, ORDERS: 1000})
    assert [claim.queue_id for claim in claims] == [ORDERS]
    assert more.keys() == {many}


def test_what_is_claimed_when_the_pause_comes_is_settled_and_retried_as_ever(bus: Engine) -> None:
    arrive(bus, 3)
    worker = bus.register()
    claim = bus.claimed(worker, ORDERS)
    bus.pause(ORDERS, BREAKER)
    said = [{"seq": 1, "outcome": "retry", "delay": 0}, {"seq": 2, "hi": 3, "outcome": "released"}]
    assert bus.settle(claim, outcomes={claim.id: said}) == {claim.id}
    bus.resume(ORDERS, BREAKER)
    assert sorted(held.attempts for held in bus.claim_due(worker, ORDERS)) == [0, 0, 1]


def test_events_arrive_in_a_paused_queue_and_wait_there(bus: Engine) -> None:
    worker = bus.register()
    bus.pause(ORDERS, BREAKER)
    assert bus.told_of_pause("claim", worker, ORDERS, 10) == ("paused", None, 0)
    assert not bus.value("SELECT {bus}.is_waiting(1)")
    events = arrive(bus, 5)
    assert bus.value("SELECT {bus}.is_waiting(1)")
    bus.resume(ORDERS, BREAKER)
    assert bus.claimed(worker, ORDERS).event_ids == events


def test_each_source_ends_only_its_own_pause(bus: Engine) -> None:
    arrive(bus)
    worker = bus.register()
    bus.pause(ORDERS, "manual")
    bus.pause(ORDERS, BREAKER, LONG, 1.0)
    assert bus.resume(ORDERS, BREAKER)
    assert not bus.resume(ORDERS, BREAKER)
    assert told(bus, worker) == ("paused", None, 0)
    assert bus.resume(ORDERS, "manual")
    assert len(bus.claimed(worker, ORDERS).seqs) == 3


def test_a_manual_pause_keeps_an_automatic_one_from_probing(bus: Engine) -> None:
    arrive(bus)
    worker = bus.register()
    half_open(bus)
    bus.pause(ORDERS, "manual")
    for answer in (told(bus, worker), told_due(bus, worker)):
        assert answer == ("paused", None, 0)
    assert probe(bus) == (None, None, False)
    bus.resume(ORDERS, "manual")
    assert told(bus, worker) == ("probe", LONG, 1)


def test_no_source_but_an_automatic_one_may_ask_for_a_probe(bus: Engine) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        bus.pause(ORDERS, "manual", LONG, 1.0)


def test_a_pause_with_a_time_and_without_a_probe_ends_by_itself(bus: Engine) -> None:
    arrive(bus, 5)
    worker = bus.register()
    bus.pause(ORDERS, "manual", LONG)
    assert told(bus, worker)[0] == "paused"
    pass_time(bus, "until", "manual")
    assert told(bus, worker) == (None, None, 5)
    assert bus.rows("SELECT 1 FROM {bus}.pauses") == []


def test_a_pause_that_is_renewed_keeps_since_and_takes_everything_else_from_the_newest_call(bus: Engine) -> None:
    arrive(bus)
    worker = bus.register()
    half_open(bus)
    assert told(bus, worker) == ("probe", LONG, 1)
    look = "SELECT since, reason, seconds, probe_by, until > clock_timestamp() FROM {bus}.pauses"
    [(since, *_)] = bus.rows(look)
    bus.pause(ORDERS, BREAKER, 60.0, 1.0, reason="worse")
    assert bus.rows(look) == [(since, "worse", 60.0, None, True)]
    assert told(bus, worker)[0] == "paused"


def test_a_queue_that_is_gone_cannot_be_paused(bus: Engine) -> None:
    assert not bus.pause(4711, BREAKER)
    assert not bus.resume(4711, BREAKER)


def test_exactly_one_event_is_let_through_as_a_probe_and_all_others_wait_for_it(bus: Engine) -> None:
    events = arrive(bus, 4)
    worker, other = bus.register(), bus.register()
    half_open(bus)
    claims, _ = bus.claim_any(worker, {ORDERS: 100})
    assert [claim.event_ids for claim in claims] == [[events[0]]]
    assert probe(bus) == (worker, claims[0].token, True)
    for one in (worker, other):
        for state, wait, count in (told(bus, one), told_due(bus, one)):
            assert (state, count) == ("paused", 0)
            assert wait is not None
            assert LONG - 60 < wait <= LONG
    bus.settle(*claims)
    assert told(bus, worker)[0] == "paused", "the settlement decides nothing: whoever paused it does"
    assert not bus.value("SELECT {bus}.end_probe(1, gen_random_uuid())")
    bus.resume(ORDERS, BREAKER)
    assert bus.claimed(other, ORDERS).event_ids == events[1:]


def test_a_probe_that_told_nothing_makes_room_for_another_at_once_but_not_for_a_second_one(bus: Engine) -> None:
    events = arrive(bus, 4)
    worker = bus.register()
    half_open(bus)
    first = bus.claimed(worker, ORDERS)
    assert not bus.value("SELECT {bus}.free_probe(1, %s, gen_random_uuid())", BREAKER)
    assert told(bus, worker)[0] == "paused"
    assert bus.value("SELECT {bus}.free_probe(1, %s, %s)", BREAKER, first.token)
    assert not bus.value("SELECT {bus}.free_probe(1, %s, %s)", BREAKER, first.token)
    second = bus.claimed(worker, ORDERS)
    assert second.event_ids == [events[1]]
    assert not bus.value("SELECT {bus}.free_probe(1, %s, %s)", BREAKER, first.token)
    assert told(bus, worker)[0] == "paused", "the first probe has freed the second one"


def test_a_probe_that_never_comes_back_begins_the_pause_again_and_a_later_one_ends_it(bus: Engine) -> None:
    events = arrive(bus, 4)
    dead, worker = bus.register(), bus.register()
    half_open(bus)
    bus.claimed(dead, ORDERS)
    pass_time(bus, "probe_until")
    state, wait, count = told(bus, worker)
    assert (state, count, probe(bus)) == ("paused", 0, (None, None, False))
    assert wait is not None
    assert LONG - 60 < wait <= LONG, "the probe was lost, and the next one ran at once"
    pass_time(bus, "until")
    assert bus.claimed(worker, ORDERS).event_ids == [events[1]]
    bus.resume(ORDERS, BREAKER)
    assert bus.claimed(worker, ORDERS).event_ids == events[2:]


def test_a_probe_that_was_handled_ends_the_pause_that_it_tried_and_no_other(bus: Engine) -> None:
    events = arrive(bus, 4)
    worker = bus.register()
    half_open(bus)
    first = bus.claimed(worker, ORDERS)
    bus.pause(ORDERS, "manual", None)
    assert bus.value("SELECT {bus}.end_probe(1, %s)", first.token)
    assert not bus.value("SELECT {bus}.end_probe(1, %s)", first.token)
    assert told(bus, worker)[0] == "paused", "it ended the operator's pause"
    bus.resume(ORDERS, "manual")
    assert bus.claimed(worker, ORDERS).event_ids == events[1:]


def test_fresh_events_are_probes_before_retries_are(bus: Engine) -> None:
    arrive(bus, 2)
    worker = bus.register()
    retry_all(bus, worker)
    half_open(bus)
    assert told(bus, worker) == ("probing", None, 0), "nothing fresh is there, and the probe was spent on it"
    assert probe(bus) == (None, None, False)
    assert told_due(bus, worker) == ("probe", LONG, 1)
    assert told_due(bus, worker)[0] == told(bus, worker)[0] == "paused"


def test_where_nothing_is_due_the_probe_waits_for_the_first_that_is(bus: Engine) -> None:
    arrive(bus, 1)
    worker = bus.register()
    claim = bus.claimed(worker, ORDERS)
    bus.settle(claim, outcomes={claim.id: [{"seq": 1, "outcome": "retry", "delay": 3600}]})
    half_open(bus)
    state, due_in, count = told_due(bus, worker)
    assert (state, count) == ("probing", 0)
    assert due_in is not None
    assert 3500 < due_in <= 3600
    assert probe(bus) == (None, None, False)


def test_an_event_that_crashed_is_the_probe_if_nothing_else_is_left(bus: Engine) -> None:
    arrive(bus, 1)
    dead, worker = bus.register(), bus.register()
    for alone in (False, False):
        claim = bus.claim(dead, ORDERS)
        bus.beat(dead, {claim.id: claim.hi} if claim else {})
        held = [] if claim else bus.claim_due(dead, ORDERS, alone=alone)
        assert claim or held
        bus.fall_silent(dead)
        bus.take_over(worker)
        dead = bus.register()
    half_open(bus)
    assert told(bus, worker)[0] == told_due(bus, worker)[0] == "probing"
    assert told_due(bus, worker, alone=True) == ("probe", LONG, 1)
    assert told_due(bus, worker, alone=True)[0] == "paused"


def test_a_question_without_room_takes_no_probe(bus: Engine) -> None:
    arrive(bus, 1)
    worker = bus.register()
    half_open(bus)
    assert told(bus, worker, limit=0) == ("probing", None, 0)
    assert probe(bus) == (None, None, False)


def test_the_probe_of_an_ordered_queue_is_one_event_and_keys_keep_their_order(bus: Engine) -> None:
    keyed = bus.declare_queue("keyed", kind="ordered", lanes=1)
    worker = bus.register()
    bus.publish_keyed("a1", "a2", "b1", "a3")
    bus.relay()
    half_open(bus, keyed)
    failed = bus.claimed(worker, keyed)
    bus.settle(failed, outcomes={failed.id: [{"seq": 1, "outcome": "retry", "delay": 0}]})
    seen, turns = list(failed.payloads), 0
    while len(seen) < 5:
        assert (turns := turns + 1) < 20
        bus.rows("SELECT {bus}.free_probe(%s, %s, probe_token) FROM {bus}.pauses", keyed, BREAKER)
        claim = bus.claim(worker, keyed)
        due = [] if claim else bus.claim_due(worker, keyed)
        assert len(claim.payloads if claim else due) <= 1
        seen += claim.payloads if claim else [held.payload for held in due]
        if claim:
            bus.settle(claim)
        bus.settle_due(due, "done")
    assert seen == ["a1", "a1", "b1", "a2", "a3"]


def test_of_two_workers_that_want_the_probe_at_once_one_gets_it_and_neither_waits(
    own_bus: Engine, session: NewSession, background: Background
) -> None:
    arrive(own_bus, 10)
    worker, other = own_bus.register(), own_bus.register()
    half_open(own_bus)
    stop_before(own_bus, "take_probe", "UPDATE")
    taker, late = session(), session()
    with gate_closed(late):
        taking = background.blocked(taker, lambda: told(taker, worker))
        for answer in (told(late, other), told_due(late, other)):
            assert answer == ("paused", 0.05, 0)
    assert taking.result() == ("probe", LONG, 1)
    assert told(late, other)[0] == "paused"


def test_of_many_workers_that_race_one_gets_the_probe_each_time(
    bus: Engine, session: NewSession, background: Background
) -> None:
    arrive(bus, 40)
    retry_all(bus, bus.register())
    arrive(bus, 40)
    half_open(bus)
    workers = [(session(), bus.register()) for _ in range(6)]
    for _ in range(15):
        calls: list[Future[Any]] = [
            background.start(one, functools.partial(one.told_of_pause, call, worker, ORDERS, 10))
            for (one, worker), call in zip(workers, ("claim", "claim_due") * 3, strict=True)
        ]
        answers = [call.result() for call in calls]
        assert sum(count for _, _, count in answers) == 1, answers
        assert bus.value("SELECT {bus}.free_probe(1, %s, probe_token) FROM {bus}.pauses", BREAKER)


def test_a_claim_that_is_under_way_when_the_pause_comes_is_the_last_one(
    own_bus: Engine, session: NewSession, background: Background
) -> None:
    arrive(own_bus, 10)
    worker, other = own_bus.register(), own_bus.register()
    stop_before(own_bus, "claim", "SELECT min(d.seq)")
    claims, operator = session(), session()
    with gate_closed(operator):
        claiming = background.blocked(claims, lambda: claims.claimed(worker, ORDERS, 4).seqs)
        operator.pause(ORDERS, "manual")  # does not wait for it
        assert told(operator, other) == ("paused", None, 0)
    assert claiming.result() == [1, 2, 3, 4]
    assert told(own_bus, worker) == ("paused", None, 0)


@pytest.mark.parametrize("call", [told, told_due])
def test_a_claim_does_not_wait_for_who_pauses_or_resumes(bus: Engine, session: NewSession, call: Any) -> None:
    arrive(bus, 2)
    worker, operator = bus.register(), session()
    half_open(bus)
    with open_transaction(operator):
        operator.resume(ORDERS, BREAKER)
        assert call(bus, worker) == ("paused", 0.05, 0)
    assert told(bus, worker) == (None, None, 2)
    with open_transaction(operator):
        operator.pause(ORDERS, BREAKER, LONG, 1.0)
        assert call(bus, worker)[0] is None, "a pause that is not committed pauses nothing"


def test_a_probe_taken_while_a_manual_pause_comes_is_the_last_event(
    own_bus: Engine, session: NewSession, background: Background
) -> None:
    arrive(own_bus, 5)
    worker, other = own_bus.register(), own_bus.register()
    half_open(own_bus)
    stop_before(own_bus, "take_probe", "UPDATE")
    taker, operator, closer = session(), session(), session()
    with gate_closed(closer):
        taking = background.blocked(taker, lambda: told(taker, worker))
        pausing = background.blocked(operator, lambda: operator.pause(ORDERS, "manual"))
    assert taking.result() == ("probe", LONG, 1)
    assert pausing.result()
    assert told(own_bus, other) == ("paused", None, 0)


def test_two_sources_share_one_probe(bus: Engine) -> None:
    arrive(bus, 5)
    worker = bus.register()
    half_open(bus)
    bus.pause(ORDERS, "other", LONG, LONG)
    assert told(bus, worker)[0] == "paused"
    pass_time(bus, "until", "other")
    [claim], _ = bus.claim_any(worker, {ORDERS: 10})
    assert bus.column("SELECT probe_token FROM {bus}.pauses") == [claim.token] * 2
    bus.resume(ORDERS, BREAKER)
    assert told(bus, worker)[0] == "paused", "the other source has not decided"


def test_every_worker_is_told_of_a_pause_and_of_its_end(bus: Engine, session: NewSession) -> None:
    arrive(bus, 2)
    worker, ear = bus.register(), session()
    ear.rows(f'LISTEN "{bus.schema}.work"')
    half_open(bus)
    token = bus.claimed(worker, ORDERS).token
    assert bus.value("SELECT {bus}.free_probe(1, %s, %s)", BREAKER, token)
    assert bus.resume(ORDERS, BREAKER)
    assert not bus.resume(ORDERS, BREAKER)
    assert [heard.payload for heard in ear.connection.notifies(timeout=10, stop_after=3)] == ["*"] * 3


def test_dropping_a_queue_takes_its_pauses_along(bus: Engine) -> None:
    bus.pause(ORDERS, BREAKER)
    bus.rows("DELETE FROM {bus}.bindings")
    bus.rows("DELETE FROM {bus}.queues")
    assert bus.rows("SELECT 1 FROM {bus}.pauses") == []
