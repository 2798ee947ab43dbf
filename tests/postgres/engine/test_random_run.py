"""The relay under everything at once: publishers of every kind, relays with tiny windows, relays killed in the act."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import psycopg
import pytest

from eventbus.postgres.migrate import migrate
from tests.postgres.engine.conftest import ClusterOf
from tests.postgres.engine.driver import Engine
from tests.postgres.engine.publishers import Ledger, Publisher
from tests.postgres.engine.sessions import NewSession, open_transaction

SECONDS = float(os.environ.get("TEST_RANDOM_SECONDS", "10"))
PUBLISHERS = 8
TICKERS = 3
KILL_EVERY = 0.25


@pytest.fixture
def seed() -> str:
    """What the run is made from; printed when it fails. Threads still interleave as they like."""
    chosen = os.environ.get("TEST_SEED", f"{time.time_ns():x}")
    sys.stdout.write(f"TEST_SEED={chosen}\n")
    return chosen


class Ticker:
    """A relay that is killed again and again and starts anew."""

    def __init__(self, dsn: str, seed: str, stop: threading.Event) -> None:
        self.pid = 0
        self.deaths = 0
        self.windows = 0
        self._dsn = dsn
        self._random = random.Random(seed)
        self._stop = stop

    def run(self) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._dsn, autocommit=True) as connection:
                    self.pid = connection.info.backend_pid
                    self._relay(Engine(connection))
            except psycopg.OperationalError:
                self.deaths += 1

    def _relay(self, engine: Engine) -> None:
        while not self._stop.is_set():
            tick = engine.tick(self._random.randrange(2, 51))
            self.windows += tick.more
            if tick.unknown:
                engine.resolve(tick.unknown)
            elif tick.state in ("busy", "idle"):
                self._stop.wait(0.002)


def kill(tickers: list[Ticker], engine: Engine, chosen: random.Random, stop: threading.Event) -> None:
    while not stop.wait(KILL_EVERY):
        engine.rows("SELECT pg_terminate_backend(%s)", chosen.choice(tickers).pid)


def in_threads(calls: list[Callable[[], object]], failures: list[BaseException]) -> list[threading.Thread]:
    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def test_every_committed_event_is_delivered_once_in_order_and_nothing_else(
    cluster_of: ClusterOf, major: int, seed: str
) -> None:
    dsn = cluster_of(major).dsn()
    migrate(dsn, "eventbus")
    ledger, stop, stop_relays, failures = Ledger(), threading.Event(), threading.Event(), list[BaseException]()
    with ExitStack() as stack:
        bus = Engine(stack.enter_context(psycopg.connect(dsn, autocommit=True)))
        queues = bus.declare(everything="#", half="a.*")
        tickers = [Ticker(dsn, f"{seed}t{number}", stop_relays) for number in range(TICKERS)]
        publishers = [
            Publisher(stack.enter_context(psycopg.connect(dsn)), ledger, f"{seed}p{number}", stop)
            for number in range(PUBLISHERS)
        ]
        relaying = in_threads([ticker.run for ticker in tickers], failures)
        working = in_threads([publisher.run for publisher in publishers], failures)
        working += in_threads([lambda: kill(tickers, bus, random.Random(seed), stop)], failures)
        stop.wait(SECONDS)
        for flag, threads in ((stop, working), (stop_relays, relaying)):
            flag.set()
            for thread in threads:
                thread.join()
        assert failures == []
        bus.relay(50)
        check(bus, ledger, queues)
    assert sum(ticker.deaths for ticker in tickers) > SECONDS
    assert sum(ticker.windows for ticker in tickers) > SECONDS
    assert set(ledger.shapes) == {"plain", "bulk", "savepoints", "undone", "straggler", "two_phase", "two_phase_undone"}


def check(bus: Engine, ledger: Ledger, queues: dict[str, int]) -> None:
    everything = bus.delivered(queues["everything"])
    assert len(everything) == len(set(everything)), "delivered twice"
    assert set(everything) - set(ledger.committed) == set(), "never committed"
    assert set(ledger.committed) - set(everything) == set(), "lost"
    half = bus.delivered(queues["half"])
    assert half == [event for event in everything if ledger.committed[event].startswith("a.")]
    assert bus.rows("SELECT queue_id, max(seq) FROM {bus}.deliveries GROUP BY queue_id ORDER BY queue_id") == [
        (queues["everything"], len(everything)),
        (queues["half"], len(half)),
    ], "a gap in the numbers"
    for key, published in ledger.by_key.items():
        mine = set(published)
        assert [event for event in everything if event in mine] == published, f"order of {key}"


def test_a_transaction_that_stays_open_for_very_long_loses_nothing_and_delays_nobody(
    bus: Engine, session: NewSession
) -> None:
    bus.declare(audit="#")
    long, others = session(), session()
    with open_transaction(long), long.connection.transaction():
        first = long.publish(key="k")
        delivered: list[str] = []
        for window in (2, 3, 1000):
            late = session()
            with open_transaction(late):
                events = [others.publish() for _ in range(7)]
                straggler = late.publish()
                bus.relay(window)
                delivered += events
                assert bus.delivered(1) == delivered
            bus.relay(window)
            delivered.append(straggler)
            assert bus.delivered(1) == delivered
        last = long.publish(key="k")
        bus.relay()
        with suppress(psycopg.Error), open_transaction(others):
            others.publish()
            others.rows("SELECT 1 / 0")
        assert bus.tick().state == "idle"
    bus.relay()
    assert bus.delivered(1) == [*delivered, first, last]
    assert bus.delivered(1) == bus.delivered(2)
    assert bus.tick().state == "idle"
