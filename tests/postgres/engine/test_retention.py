"""Completed executions are removed when they are old, and never while their event may still come to its handler."""

from __future__ import annotations

import time
from uuid import UUID

import pytest

from tests.postgres.engine.driver import Engine
from tests.postgres.engine.sessions import NewSession, open_transaction

HOUR = 3600.0


@pytest.fixture
def work(bus: Engine) -> int:
    """An idempotent queue."""
    return bus.declare_queue("work", "work.#", tracking="idempotent")


@pytest.fixture
def worker(bus: Engine) -> UUID:
    return bus.register()


def publish(bus: Engine, event_id: str | None = None) -> str:
    return str(bus.value("SELECT {bus}.publish('work.done', '1', event_id => %s)", event_id))


def handle(bus: Engine, worker: UUID, queue: int, outcome: dict[str, object] | None = None) -> None:
    bus.relay()
    claim = bus.claimed(worker, queue)
    outcomes = {claim.id: [{"seq": seq, **outcome} for seq in claim.seqs]} if outcome else None
    assert bus.settle(claim, outcomes=outcomes) == {claim.id}


def grow_old(bus: Engine) -> None:
    """Make everything that happened two hours older."""
    bus.rows(
        "UPDATE {bus}.processed_events SET claimed_at = claimed_at - interval '2 h',"
        " completed_at = completed_at - interval '2 h'"
    )
    bus.rows("UPDATE {bus}.claims SET claimed_at = claimed_at - interval '2 h'")


def purge(bus: Engine, limit: int = 1000, retention: float = HOUR) -> int | None:
    return bus.value("SELECT {bus}.purge_executions(%s, %s)", retention, limit)  # type: ignore[no-any-return]


def kept(bus: Engine) -> set[str]:
    return set(bus.column("SELECT event_id::text FROM {bus}.processed_events"))


def test_an_old_completed_execution_is_removed_and_a_young_one_stays(bus: Engine, work: int, worker: UUID) -> None:
    publish(bus)
    handle(bus, worker, work)
    grow_old(bus)
    young = publish(bus)
    handle(bus, worker, work)
    assert purge(bus) == 1
    assert kept(bus) == {young}
    assert purge(bus) == 0


def test_what_is_old_is_removed_in_bounded_steps(bus: Engine, work: int, worker: UUID) -> None:
    for _ in range(5):
        publish(bus)
    handle(bus, worker, work)
    grow_old(bus)
    assert [purge(bus, limit=2) for _ in range(4)] == [2, 2, 1, 0]


def test_an_execution_that_was_never_completed_stays_however_old_it_is(bus: Engine, work: int, worker: UUID) -> None:
    event = publish(bus)
    handle(bus, worker, work, {"outcome": "retry", "delay": 1e6})
    grow_old(bus)
    assert purge(bus) == 0
    assert kept(bus) == {event}


@pytest.mark.parametrize("place", ["not relayed", "waiting", "claimed", "retrying", "released", "dead", "delayed"])
def test_dup_05_an_event_that_is_published_again_does_not_run_again_while_its_second_copy_is_on_its_way(
    bus: Engine, work: int, worker: UUID, place: str
) -> None:
    event, other = publish(bus), publish(bus)
    handle(bus, worker, work)
    if place == "delayed":
        bus.rows("SELECT {bus}.publish('work.done', '2', delay => '1 h', event_id => %s)", event)
    else:
        publish(bus, event)
    if place not in ("not relayed", "delayed"):
        bus.relay()
    if place in ("claimed", "retrying", "released", "dead"):
        claim = bus.claimed(worker, work)
        assert list(claim.twins) == ["completed"]
        outcomes: dict[str, dict[str, object]] = {
            "retrying": {"outcome": "retry", "delay": 1e6},
            "released": {"outcome": "released", "hi": claim.hi},
            "dead": {"outcome": "dead", "reason": "x"},
        }
        if place in outcomes:
            bus.settle(claim, outcomes={claim.id: [{"seq": claim.lo, **outcomes[place]}]})
    grow_old(bus)
    assert purge(bus) == 1
    assert kept(bus) == {event}
    assert other not in kept(bus)


def test_dup_05_a_dead_letter_keeps_the_execution_until_it_is_gone(bus: Engine, work: int, worker: UUID) -> None:
    event = publish(bus)
    publish(bus, event)
    bus.relay()
    claim = bus.claimed(worker, work)
    bus.settle(claim, outcomes={claim.id: [{"seq": claim.hi, "outcome": "dead", "reason": "x"}]})
    grow_old(bus)
    assert purge(bus) == 0
    bus.rows("DELETE FROM {bus}.dead_letters")
    assert purge(bus) == 1


def test_dup_05_a_letter_that_is_redriven_after_the_retention_finds_its_execution(
    bus: Engine, work: int, worker: UUID
) -> None:
    event = publish(bus)
    handle(bus, worker, work)
    publish(bus, event)
    handle(bus, worker, work, {"outcome": "dead", "reason": "x"})
    grow_old(bus)
    assert purge(bus) == 0
    bus.rows("SELECT {bus}.redrive(ARRAY(SELECT id FROM {bus}.dead_letters))")
    assert purge(bus) == 0
    [held] = bus.claim_due(worker, work)
    assert held.twin == "completed"


def test_dup_05_an_event_id_that_is_published_after_the_retention_runs_again_as_the_page_says(
    bus: Engine, work: int, worker: UUID
) -> None:
    event = publish(bus)
    handle(bus, worker, work)
    grow_old(bus)
    assert purge(bus) == 1
    publish(bus, event)
    bus.relay()
    assert list(bus.claimed(worker, work).twins) == [None]


@pytest.mark.parametrize("goes_on", ["filling", "replay"])
def test_an_event_that_was_published_twice_keeps_its_execution_while_what_may_bring_it_goes_on(
    bus: Engine, work: int, worker: UUID, goes_on: str
) -> None:
    event = publish(bus)
    publish(bus, event)
    bus.relay()
    replay = 0
    if goes_on == "replay":
        replay = bus.value("SELECT {bus}.begin_replay(%s, NULL, NULL, ARRAY['work.done'])", work)
        bus.settle(bus.claimed(worker, work))
        bus.rows("SELECT {bus}.replay_step(%s, 1, 1)", replay)
    else:
        bus.rows("UPDATE {bus}.queues SET state = 'filling' WHERE id = %s", work)
        bus.rows(
            "INSERT INTO {bus}.fillings (queue_id, snapshot, next_xid, ids_upto)"
            " SELECT %s, snapshot, next_xid, 0 FROM {bus}.ticks ORDER BY id LIMIT 1",
            work,
        )
    bus.settle(bus.claimed(worker, work))
    grow_old(bus)
    purge(bus)
    assert bus.column("SELECT replay_id FROM {bus}.processed_events") == [replay]
    if goes_on == "replay":
        bus.rows("SELECT {bus}.replay_step(%s, 100, 100)", replay)
        bus.settle(bus.claimed(worker, work))
        grow_old(bus)
    else:
        bus.rows("SELECT {bus}.end_filling(%s)", work)
    assert purge(bus) == 1


def test_an_event_whose_second_copy_was_claimed_a_moment_ago_keeps_its_execution(
    bus: Engine, work: int, worker: UUID
) -> None:
    event = publish(bus)
    handle(bus, worker, work)
    publish(bus, event)
    bus.relay()
    grow_old(bus)
    claim = bus.claimed(worker, work)
    assert purge(bus) == 0
    bus.settle(claim)
    assert purge(bus) == 1


def test_when_the_second_copy_is_done_too_the_execution_is_removed(bus: Engine, work: int, worker: UUID) -> None:
    event = publish(bus)
    handle(bus, worker, work)
    publish(bus, event)
    handle(bus, worker, work)
    grow_old(bus)
    assert purge(bus) == 1


def test_an_execution_that_completed_while_its_claim_is_still_open_stays(bus: Engine, work: int, worker: UUID) -> None:
    publish(bus)
    long = publish(bus)
    bus.relay()
    claim = bus.claimed(worker, work)
    bus.rows("UPDATE {bus}.processed_events SET completed_at = clock_timestamp(), owner = NULL")
    grow_old(bus)
    assert purge(bus) == 0
    assert long in kept(bus)
    bus.settle(claim)
    assert purge(bus) == 2


def test_an_execution_of_a_transactional_handler_that_is_a_finished_exception_stays(
    bus: Engine, work: int, worker: UUID
) -> None:
    publish(bus)
    handle(bus, worker, work, {"outcome": "retry", "delay": 0})
    held = bus.claim_due(worker, work)
    bus.rows("UPDATE {bus}.processed_events SET completed_at = clock_timestamp(), owner = NULL")
    grow_old(bus)
    assert purge(bus) == 0
    bus.settle_due(held, "done")
    assert purge(bus) == 1


def test_another_queue_of_the_same_event_keeps_its_own_execution_only(bus: Engine, work: int, worker: UUID) -> None:
    other = bus.declare_queue("other", "work.#", tracking="idempotent")
    publish(bus)
    handle(bus, worker, work)
    handle(bus, worker, other, {"outcome": "dead", "reason": "x"})
    grow_old(bus)
    assert purge(bus) == 1
    assert bus.column("SELECT queue_id FROM {bus}.processed_events") == [other]


def test_two_workers_do_not_purge_at_once(bus: Engine, work: int, worker: UUID, session: NewSession) -> None:
    publish(bus)
    handle(bus, worker, work)
    grow_old(bus)
    first = session()
    with open_transaction(first):
        assert purge(first) == 1
        assert purge(bus) is None
    assert purge(bus) == 0


def test_thousands_of_rows_that_stay_do_not_keep_the_others_from_being_removed_quickly(own_bus: Engine) -> None:
    work = own_bus.declare_queue("work", "work.#", tracking="idempotent")
    own_bus.rows(
        "INSERT INTO {bus}.outbox (event_id, topic, payload, size)"
        " SELECT ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 'work.done', '{}', 2"
        " FROM generate_series(1, 40000) n"
    )
    own_bus.rows(
        "INSERT INTO {bus}.processed_events (queue_id, event_id, claimed_at, completed_at)"
        " SELECT %s, o.event_id, now() - interval '2 h', now() - interval '2 h' FROM {bus}.outbox o ORDER BY o.id",
        work,
    )
    own_bus.rows(
        "INSERT INTO {bus}.exceptions (due_at, seq, outbox_id, queue_id, lane)"
        " SELECT now(), o.id, o.id, %s, 0 FROM {bus}.outbox o WHERE o.id <= 20000",
        work,
    )
    own_bus.relay()
    began = time.monotonic()
    assert [purge(own_bus, 10_000) for _ in range(3)] == [10_000, 10_000, 0]
    assert time.monotonic() - began < 10
    assert len(kept(own_bus)) == 20_000
