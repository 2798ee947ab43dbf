"""Fixtures that every test may use: databases on PostgreSQL 15 and 18, and clusters to stop and crash.

A test that takes ``server``, ``empty_dsn``, ``dsn``, ``conn`` or ``owned_cluster`` runs once per version. Where the
version cannot matter, one is enough::

    @pytest.mark.parametrize("major", [18], indirect=True)
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import hypothesis
import psycopg
import pytest

from tests.servers import MACHINE_DSN, Cluster, Dropping, Server, installed, remove_abandoned_clusters

if TYPE_CHECKING:
    from eventbus.plugins.registry import Plugins
    from eventbus.postgres.privileges import Right

MACHINE = 15
NewCluster = Callable[..., Cluster]
ServerOf = Callable[[int], Server]


def migrated(dsn: str, schema: str = "eventbus") -> list[str]:
    """Install the bus's schema with the tables of the plugins that are on by default; the steps that were applied."""
    from eventbus.postgres.migrate import migrate

    return migrate(dsn, schema, default_plugins().migrations())


def default_plugins() -> Plugins:
    """Those that are in use when the settings say nothing."""
    from eventbus.plugins.registry import loaded
    from eventbus.settings import Settings

    return loaded(Settings())


def consuming_rights() -> list[Right]:
    """What a role needs to consume with the plugins that are on by default."""
    from eventbus.postgres.privileges import CONSUME, Right

    return [*CONSUME, *(Right(table, privileges) for table, privileges in default_plugins().rights())]


def pytest_configure(config: pytest.Config) -> None:
    """Property tests look the same on every CI run, and a busy machine is no failure.

    Handlers of the bus's own tests fail on purpose, many times in a row: without the circuit breaker, which is on by
    default and would rightly pause them. Its own tests, and the pages of the documentation, have it.
    """
    os.environ.setdefault("EVENTBUS_PLUGINS", "stats")
    hypothesis.settings.register_profile("eventbus", deadline=None, derandomize="CI" in os.environ)
    hypothesis.settings.load_profile("eventbus")


@pytest.fixture(scope="session")
def run() -> str:
    """Name of this test run; part of the name of every database that it makes."""
    remove_abandoned_clusters()
    return uuid.uuid4().hex[:8]


@pytest.fixture(scope="session", params=[15, 18], ids=["pg15", "pg18"])
def major(request: pytest.FixtureRequest) -> int:
    """The PostgreSQL version under test."""
    return int(request.param)


@pytest.fixture(scope="session")
def server_of(run: str) -> Iterator[ServerOf]:
    """The shared server of each version; found or started when it is first asked for, and kept to the end."""
    with ExitStack() as stack:

        @functools.cache
        def start(major: int) -> Server:
            programs = installed(major)
            if major == MACHINE and (problem := _unreachable(MACHINE_DSN)) is None:
                found = Server(MACHINE_DSN, programs, stack.enter_context(Dropping()))
            elif programs is not None:
                found = Server(stack.enter_context(Cluster(programs)).dsn(), programs)
            else:
                pytest.skip(f"no PostgreSQL {major} here" + (f": {problem}" if major == MACHINE else ""))
            stack.enter_context(found.run(run))
            return found

        yield start


@pytest.fixture(scope="session")
def server(major: int, server_of: ServerOf) -> Server:
    """A shared server: the machine's own with its own settings, and a throw-away cluster of the embedded version."""
    return server_of(major)


@pytest.fixture(scope="session")
def template_of(server_of: ServerOf, run: str) -> Iterator[Callable[[int], str]]:
    """Name of a database on each version's server with the bus's schema; made when it is first asked for.

    Nobody may connect to it, so that it can be cloned at any time.
    """
    with ExitStack() as stack:

        @functools.cache
        def make(major: int) -> str:
            server = server_of(major)
            name = stack.enter_context(server.database(run))
            migrated(server.dsn(name))
            with psycopg.connect(server.admin_dsn, autocommit=True) as admin:
                admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            return name

        yield make


@pytest.fixture(scope="session")
def migrated_template(major: int, template_of: Callable[[int], str]) -> str:
    """Name of the database to clone."""
    return template_of(major)


@pytest.fixture
def empty_dsn(server: Server, run: str) -> Iterator[str]:
    """A new, empty database."""
    with server.database(run) as name:
        yield server.dsn(name)


@pytest.fixture
def dsn(server: Server, run: str, migrated_template: str) -> Iterator[str]:
    """A new database with the bus's schema ``eventbus``; nothing has been published there."""
    with server.database(run, template=migrated_template) as name:
        yield server.dsn(name)


@pytest.fixture
def conn(dsn: str) -> Iterator[psycopg.Connection]:
    """An autocommit connection to ``dsn``."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def new_cluster() -> Iterator[NewCluster]:
    """Make clusters: ``new_cluster(18, max_prepared_transactions=5)`` is running, and removed after the test."""
    with ExitStack() as stack:

        def new(major: int, **options: object) -> Cluster:
            programs = installed(major)
            if programs is None:
                pytest.skip(f"no programs of PostgreSQL {major} here")
            return stack.enter_context(Cluster(programs, **options))

        yield new


@pytest.fixture
def owned_cluster(major: int, new_cluster: NewCluster) -> Cluster:
    """A running, empty cluster that belongs to this test alone."""
    return new_cluster(major)


def _unreachable(dsn: str) -> str | None:
    try:
        psycopg.connect(dsn, connect_timeout=5).close()
    except psycopg.OperationalError as error:
        return str(error)
    return None
