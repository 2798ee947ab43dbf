"""Fixtures of the engine's tests: a bus driven by hand, more sessions on its database, and calls that may block."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from eventbus.postgres.migrate import migrate
from tests.postgres.engine.driver import Engine
from tests.postgres.engine.rewinding import Rewinding
from tests.postgres.engine.sessions import Background, NewSession
from tests.servers import Cluster, Server, installed

NewBus = Callable[[str], Engine]
ClusterOf = Callable[[int], Cluster]


@pytest.fixture(scope="session")
def cluster_of() -> Iterator[ClusterOf]:
    """One cluster of our own for each version, with prepared transactions; started when it is first asked for."""
    with ExitStack() as stack:

        @functools.cache
        def start(major: int) -> Cluster:
            programs = installed(major)
            if programs is None:
                pytest.skip(f"no programs of PostgreSQL {major} here")
            return stack.enter_context(Cluster(programs))

        yield start


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


@pytest.fixture(scope="session")
def rewinding(shared_dsn: str) -> Iterator[Rewinding]:
    """The bus that is used again and again."""
    schema = f"bus-{uuid.uuid4().hex[:12]}"
    migrate(shared_dsn, schema)
    with psycopg.connect(shared_dsn, autocommit=True) as connection:
        yield Rewinding(Engine(connection, schema))


@pytest.fixture
def bus(rewinding: Rewinding, shared_dsn: str) -> Iterator[Engine]:
    """A fresh bus; its queue ``orders`` (number 1) gets every topic that starts with ``orders``."""
    with psycopg.connect(shared_dsn, autocommit=True) as connection:
        yield with_orders(Engine(connection, rewinding.engine.schema))
    rewinding.rewind()


@pytest.fixture
def own_bus(new_bus: NewBus) -> Engine:
    """The same in a schema of its own, for a test that changes the schema or reads statistics."""
    return with_orders(new_bus(f"bus-{uuid.uuid4().hex[:12]}"))


def with_orders(engine: Engine) -> Engine:
    assert engine.declare(orders="orders.#") == {"orders": 1}
    return engine


def bus_of(request: pytest.FixtureRequest) -> Engine:
    """The bus that the test uses."""
    bus = request.getfixturevalue("own_bus" if "own_bus" in request.fixturenames else "bus")
    assert isinstance(bus, Engine)
    return bus


@pytest.fixture
def session(request: pytest.FixtureRequest, shared_dsn: str) -> Iterator[NewSession]:
    """Open another session on the bus of the test."""
    bus = bus_of(request)
    with ExitStack() as stack:
        yield lambda: Engine(stack.enter_context(psycopg.connect(shared_dsn, autocommit=True)), bus.schema)


@pytest.fixture
def background(request: pytest.FixtureRequest) -> Iterator[Background]:
    """Calls in other threads. Whatever still waits at the end of the test is ended by closing its session."""
    bus = bus_of(request)
    with ThreadPoolExecutor(max_workers=8) as threads:
        calls = Background(threads, bus)
        yield calls
        calls.end()
