"""Fixtures of the engine's tests: a bus driven by hand, more sessions on its database, and calls that may block."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from eventbus.postgres.migrate import migrate
from tests.postgres.engine.driver import Engine
from tests.postgres.engine.sessions import Background, NewSession
from tests.servers import Server

NewBus = Callable[[str], Engine]


@pytest.fixture(scope="session")
def shared_dsn(server: Server, run: str) -> Iterator[str]:
    """One database for all these tests: a bus in a schema of its own is cheaper, and must be as good."""
    with server.database(run) as name:
        yield make_conninfo(server.dsn(name), options="-c synchronous_commit=off -c lock_timeout=30s")


@pytest.fixture
def new_bus(shared_dsn: str) -> Iterator[NewBus]:
    """Make a bus in a new schema of the shared database."""
    with ExitStack() as stack:

        def new(schema: str) -> Engine:
            migrate(shared_dsn, schema)
            connection = stack.enter_context(psycopg.connect(shared_dsn, autocommit=True))
            return Engine(connection, schema)

        yield new


@pytest.fixture
def bus(new_bus: NewBus) -> Engine:
    """A fresh bus; its queue ``orders`` (number 1) gets every topic that starts with ``orders``."""
    engine = new_bus(f"bus-{uuid.uuid4().hex[:12]}")
    assert engine.declare(orders="orders.#") == {"orders": 1}
    return engine


@pytest.fixture
def session(bus: Engine, shared_dsn: str) -> Iterator[NewSession]:
    """Open another session on the bus."""
    with ExitStack() as stack:
        yield lambda: Engine(stack.enter_context(psycopg.connect(shared_dsn, autocommit=True)), bus.schema)


@pytest.fixture
def background(bus: Engine) -> Iterator[Background]:
    """Calls in other threads. Whatever still waits at the end of the test is ended by closing its session."""
    with ThreadPoolExecutor(max_workers=8) as threads:
        calls = Background(threads, bus)
        yield calls
        calls.end()
