"""The rules of completing deliveries inside the transaction of their handler: see migration 0012."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest

from tests.postgres.engine.driver import Claim, Engine, Held
from tests.postgres.engine.sessions import Background, NewSession

RETRY = {"outcome": "retry", "delay": 0}
each_isolation = pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])


@pytest.fixture
def orders(bus: Engine) -> Engine:
    """The bus, whose queue is transactional, with a table for effects."""
    bus.rows("UPDATE {bus}.queues SET tracking = 'transactional'")
    return bus


def claimed(bus: Engine, count: int = 1, worker: UUID | None = None) -> Claim:
    bus.publish_many(count)
    bus.relay()
    return bus.claimed(worker or bus.register(), 1, count)


def held(bus: Engine, count: int = 1, worker: UUID | None = None) -> list[Held]:
    """Exceptions that a worker holds."""
    claim = claimed(bus, count)
    outcomes = {claim.id: [{"seq": seq, **RETRY} for seq in claim.seqs]}
    assert bus.settle(claim, outcomes=outcomes) == {claim.id}
    mine = bus.claim_due(worker or bus.register(), 1, count)
    assert len(mine) == count
    return mine


@contextmanager
def handler(session: Engine, mark: str = "this one", isolation: str = "READ COMMITTED") -> Iterator[Engine]:
    """The transaction of a handler, marked as the bus marks it, which has read something."""
    with session.connection.transaction():
        session.rows(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        session.rows(f"SET LOCAL eventbus.delivery = '{mark}'")
        session.rows("SELECT count(*) FROM {bus}.queues")
        yield session


def complete(
    session: Engine,
    claim: Claim | None = None,
    exceptions: Sequence[Held] = (),
    *,
    mark: str = "this one",
    event_ids: Sequence[Any] | None = None,
    token: UUID | None = None,
) -> None:
    """Complete all of a claim, and exceptions."""
    seqs = [] if claim is None else list(claim.seqs)
    if event_ids is None:
        event_ids = [*(claim.event_ids if claim else ()), *(one.event_id for one in exceptions)]
    session.rows(
        "SELECT {bus}.complete(%s, %s::bigint[], %s::uuid[], %s::bigint[], %s::bigint[], %s::uuid[], 1, %s::uuid[],"
        " %s::integer[])",
        mark,
        [claim.id for _ in seqs] if claim else [],
        [token or claim.token for _ in seqs] if claim else [],
        seqs,
        [one.id for one in exceptions],
        [token or one.token for one in exceptions],
        list(event_ids),
        [0 for _ in event_ids],
    )


def detach_first(bus: Engine, claim: Claim) -> int | None:
    """Take a claim apart while its first delivery runs; the number of the exception that it is now."""
    found: int | None = bus.value(
        "SELECT exception_id FROM {bus}.detach(%s, %s, '{}', '[]', %s) WHERE seq IS NOT NULL",
        claim.id,
        claim.token,
        [claim.lo],
    )
    return found


def completed(bus: Engine) -> int:
    return int(bus.value("SELECT count(*) FROM {bus}.processed_events WHERE completed_at IS NOT NULL"))


@contextmanager
def refused(*states: str) -> Iterator[None]:
    """The block fails with one of these SQLSTATEs."""
    with pytest.raises(psycopg.Error) as caught:
        yield
    assert caught.value.sqlstate in states


def silence(bus: Engine) -> None:
    bus.fall_silent(*bus.column("SELECT id FROM {bus}.workers"))


def take_over(session: Engine) -> tuple[int, int]:
    return session.take_over(session.register())


@each_isolation
def test_what_was_completed_never_runs_again_although_its_settlement_was_lost(orders: Engine, isolation: str) -> None:
    claim = claimed(orders, 3)
    with handler(orders, isolation=isolation):
        complete(orders, claim)
    assert completed(orders) == 3
    silence(orders)
    assert take_over(orders) == (1, 0)
    assert orders.value("SELECT count(*) FROM {bus}.exceptions") == 0


@each_isolation
def test_an_exception_that_was_completed_never_runs_again_although_its_settlement_was_lost(
    orders: Engine, isolation: str
) -> None:
    mine = held(orders, 3)
    with handler(orders, isolation=isolation):
        complete(orders, exceptions=mine)
    silence(orders)
    take_over(orders)
    assert completed(orders) == 3
    assert orders.value("SELECT count(*) FROM {bus}.exceptions") == 0
    assert orders.value("SELECT count(*) FROM {bus}.dead_letters") == 0


def test_whatever_is_settled_after_a_commit_whose_answer_was_lost_it_stays_done(orders: Engine) -> None:
    claim = claimed(orders, 2)
    mine = held(orders, 2)
    with handler(orders):
        complete(orders, claim, mine)
    deferred = [{"seq": seq, "outcome": "deferred", "delay": 1} for seq in claim.seqs]
    assert orders.settle(claim, outcomes={claim.id: deferred}) == {claim.id}
    orders.settle_each([(mine[0], "deferred"), (mine[1], "dead")], reason="x", delay=1)
    assert completed(orders) == 4
    assert orders.value("SELECT count(*) FROM {bus}.exceptions") == 0
    assert orders.value("SELECT count(*) FROM {bus}.dead_letters") == 0


@each_isolation
def test_a_worker_that_was_taken_over_while_its_handler_ran_commits_nothing(
    orders: Engine, session: NewSession, isolation: str
) -> None:
    other = session()
    worker = orders.register()
    claim = claimed(orders, 2, worker)
    mine = held(orders, 2, worker)
    for parts in ({"claim": claim}, {"exceptions": mine}):
        with refused("EB003", "23505", "40001"), handler(orders, isolation=isolation):
            if orders.value("SELECT count(*) FROM {bus}.workers WHERE state = 'live'"):
                silence(other)
                take_over(other)
            complete(orders, **parts)
    assert completed(orders) == 0
    assert orders.value("SELECT count(*) FROM {bus}.exceptions WHERE finished") == 0


def test_a_token_of_another_lease_completes_nothing(orders: Engine) -> None:
    claim = claimed(orders)
    mine = held(orders)
    for parts in ({"claim": claim}, {"exceptions": mine}):
        with refused("EB003"), handler(orders):
            complete(orders, token=uuid.uuid4(), **parts)
    assert completed(orders) == 0


def test_an_exception_that_is_gone_is_not_made_anew(orders: Engine) -> None:
    mine = held(orders)
    orders.settle_due(mine, "done")
    with refused("EB003"), handler(orders):
        complete(orders, exceptions=mine)
    assert orders.value("SELECT count(*) FROM {bus}.exceptions") == 0


@each_isolation
def test_a_take_over_waits_for_no_frozen_transaction_and_comes_back_later(
    orders: Engine, session: NewSession, isolation: str
) -> None:
    other = session()
    frozen, healthy = orders.register(), orders.register()
    claim = claimed(orders, 2, frozen)
    claimed(orders, 3, healthy)
    with handler(orders, isolation=isolation):
        complete(orders, claim)
        silence(other)
        assert take_over(other) == (1, 3)
    assert take_over(other) == (1, 0)
    assert completed(orders) == 2


@each_isolation
def test_of_two_deliveries_of_one_event_one_waits_for_the_other_and_commits_nothing(
    orders: Engine, session: NewSession, background: Background, isolation: str
) -> None:
    claim, again = claimed(orders), claimed(orders)
    other = session()

    def second() -> None:
        with handler(other, isolation=isolation):
            complete(other, again, event_ids=claim.event_ids)

    with handler(orders, isolation=isolation):
        complete(orders, claim)
        waiting = background.blocked(other, second)
    with refused("EB004" if isolation == "READ COMMITTED" else "40001"):
        waiting.result(10)
    with refused("EB004"):
        second()
    assert orders.value("SELECT count(*) FROM {bus}.progress") == 1


def test_a_batch_with_an_event_twice_is_not_completed_as_one(orders: Engine) -> None:
    claim = claimed(orders, 2)
    with refused("EB004"), handler(orders):
        complete(orders, claim, event_ids=[claim.event_ids[0]] * 2)
    assert completed(orders) == 0


def test_a_pending_execution_of_another_kind_is_completed_and_free(orders: Engine) -> None:
    claim = claimed(orders)
    orders.rows("INSERT INTO {bus}.processed_events (queue_id, event_id, owner) VALUES (1, %s, 7)", claim.event_ids[0])
    with handler(orders):
        complete(orders, claim)
    assert orders.rows("SELECT completed_at IS NOT NULL, owner FROM {bus}.processed_events") == [(True, None)]


@pytest.mark.parametrize("mark", ["another one", ""])
def test_a_transaction_that_is_not_the_one_that_began_completes_nothing(orders: Engine, mark: str) -> None:
    claim = claimed(orders)
    with refused("EB005"), handler(orders, mark=mark):
        complete(orders, claim)
    assert completed(orders) == 0


@each_isolation
def test_what_runs_while_its_ordered_claim_is_taken_apart_completes_once(
    bus: Engine, session: NewSession, isolation: str
) -> None:
    bus.rows(
        "SELECT {bus}.declare_queues(%s)",
        '[{"name": "orders", "patterns": ["orders.#"], "kind": "ordered", "lanes": 1, "tracking": "transactional"}]',
    )
    for _ in range(2):
        bus.publish(key="k")
    bus.relay()
    claim = bus.claimed(bus.register(), 1)
    first = Claim(claim.id, claim.token, 1, claim.seqs[:1], claim.event_ids[:1])
    other = session()
    exception_id = None
    with refused("EB003", "23505"), handler(bus, isolation=isolation):
        exception_id = detach_first(other, claim)
        complete(bus, first)
    assert exception_id
    now = Held(exception_id, claim.token, 0, 0, claim.event_ids[0])
    with handler(bus, isolation=isolation):
        complete(bus, exceptions=[now])
    bus.settle_due([now], "done")
    assert completed(bus) == 1
    assert bus.column("SELECT state FROM {bus}.exceptions") == ["waiting"]


def test_a_detached_claim_waits_for_a_commit_that_is_under_way(
    bus: Engine, session: NewSession, background: Background
) -> None:
    claim = claimed(bus, 2)
    other = session()
    with handler(bus):
        complete(bus, Claim(claim.id, claim.token, 1, claim.seqs[:1], claim.event_ids[:1]))
        waiting = background.blocked(other, lambda: detach_first(other, claim))
    assert waiting.result(10) is None


def test_named_statements_and_session_locks_are_forgotten(orders: Engine) -> None:
    orders.rows("SELECT pg_advisory_lock(1)")
    orders.rows('PREPARE "Mine" AS SELECT 1')
    for _ in range(6):
        orders.rows("SELECT %s::int", 1)  # often enough for the driver to prepare it
    orders.rows("SELECT {bus}.forget_session()")
    assert orders.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()") == 0
    assert orders.value("SELECT count(*) FROM pg_prepared_statements WHERE from_sql") == 0
    orders.rows("SELECT %s::int", 1)
    assert orders.value("SELECT count(*) FROM pg_prepared_statements") > 0


def test_a_serializable_neighbour_is_no_reason_to_fail(orders: Engine, session: NewSession) -> None:
    """Each writes where the other has looked before; so many exceptions that not all rows stay on their pages."""
    other = session()
    first, second, third, fourth = (claimed(orders, 10) for _ in range(4))
    exceptions = held(orders, 100)
    with handler(orders, isolation="SERIALIZABLE"), handler(other, isolation="SERIALIZABLE"):
        complete(orders, first, exceptions[::4])
        complete(other, second, exceptions[1::4])
        complete(orders, third, exceptions[2::4])
        complete(other, fourth, exceptions[3::4])
    assert completed(orders) == 140
