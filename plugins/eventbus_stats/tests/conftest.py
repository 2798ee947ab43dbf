"""The tables of the plugin in a database of the bus."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from eventbus.postgres.migrate import migrate
from eventbus_stats import Stats


@pytest.fixture(scope="session")
def install() -> Callable[[str], None]:
    """Makes the tables of the bus and of the plugin in a database."""
    steps = [("stats", step) for step in Stats(Stats.Settings()).eventbus_migrations()]

    def run(dsn: str) -> None:
        migrate(dsn, "eventbus", steps)

    return run


@pytest.fixture
def table(dsn: str, conn: psycopg.Connection, install: Callable[[str], None]) -> psycopg.Connection:
    """A connection to a database with the plugin's tables."""
    install(dsn)
    return conn
