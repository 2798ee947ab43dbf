"""The tables of the plugin in a database of the bus."""

from __future__ import annotations

import psycopg
import pytest

from eventbus_stats import Stats


@pytest.fixture
def table(conn: psycopg.Connection) -> psycopg.Connection:
    """A connection to a database with the plugin's tables."""
    for step in Stats(Stats.Settings()).eventbus_migrations():
        conn.execute(step.sql.replace("{schema}", '"eventbus"').encode())
    return conn
