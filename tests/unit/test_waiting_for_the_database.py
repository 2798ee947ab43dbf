"""The heartbeat and transactional handlers wait for a database that is away for no longer than they should."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from uuid import uuid4

import pytest

from eventbus.consuming.boundary import Postponed
from eventbus.consuming.tenure import Tenure
from eventbus.postgres.breaker import Breaker, Turn
from eventbus.postgres.heartbeat import Heartbeat, Pulse, Watch
from eventbus.postgres.outage import Outage
from eventbus.postgres.statements import Statements
from eventbus.postgres.transactions import Transactions
from eventbus.postgres.tries import Patience
from eventbus.settings import Settings
from tests.waiting import wait_until

NOWHERE = "host=127.0.0.1 port=1 dbname=nowhere"


@pytest.fixture
def shut() -> Breaker:
    """A breaker whose next probe is far away."""
    breaker = Breaker(Outage())
    breaker.broke()
    breaker._not_before = math.inf
    return breaker


def ignore(*_: object) -> None:
    """Nobody is told."""


def test_a_heartbeat_that_waits_for_its_turn_stops_at_once(shut: Breaker) -> None:
    watch = Watch(lambda: Pulse(uuid4(), 0, {}), ignore, ignore, ignore, ignore, ignore)
    heart = Heartbeat(Settings(dsn=NOWHERE), Statements("engine", "eventbus"), shut, watch)
    heart.start()
    wait_until(lambda: shut._waiters)
    began = time.monotonic()
    heart.stop()
    assert not heart._thread.is_alive()
    assert time.monotonic() - began < 1.5


def boundary(breaker: Breaker) -> Transactions:
    patience = Patience("books", 60.0, 30.0, lambda: 1.0, Tenure())
    statements = Statements("transactions", "eventbus")
    return Transactions(NOWHERE, statements, lambda _: nullcontext(), patience, breaker)


async def in_task(transactions: Transactions) -> None:
    await transactions.run([], never)


async def in_thread(transactions: Transactions) -> None:
    transactions.run_blocking([], never)


def never(_: object) -> Any:
    raise AssertionError("called without a connection")


@pytest.mark.parametrize("call", [in_task, in_thread])
async def test_a_transactional_handler_that_gets_no_turn_is_put_off_after_a_while(
    shut: Breaker, call: Callable[[Transactions], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventbus.postgres.opening._OPENING_SECONDS", 0.05)
    began = time.monotonic()
    with pytest.raises(Postponed, match="away"):
        await call(boundary(shut))
    assert time.monotonic() - began < 5
    assert not shut._waiters


@pytest.mark.parametrize("call", [in_task, in_thread])
async def test_transactional_handlers_share_the_pauses_between_their_attempts(
    call: Callable[[Transactions], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[Turn] = []
    breaker = Breaker(Outage(), random=lambda: 1.0)
    failed = breaker.failed

    def counted(turn: Turn) -> None:
        attempts.append(turn)
        failed(turn)

    monkeypatch.setattr(breaker, "failed", counted)
    monkeypatch.setattr("eventbus.postgres.opening._OPENING_SECONDS", 0.5)
    with pytest.raises(Postponed, match="away"):
        await call(boundary(breaker))
    assert 2 <= len(attempts) <= 3  # at once, after 0.1 and 0.3 s; the next one would be after 0.7 s
