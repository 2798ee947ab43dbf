"""The example's own tables and connections, in the same database as the bus: that is what one transaction needs."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping

import psycopg
from psycopg import sql

_TABLES = """
-- Written by the publisher, in the transaction that publishes.
CREATE TABLE flights (
    name text PRIMARY KEY,
    carrier text NOT NULL,
    origin text NOT NULL,
    destination text NOT NULL,
    scheduled timestamptz NOT NULL,
    departure_delay integer,
    arrival_delay integer
);

-- Written by the consumer carrier-delays: one row per departure, so that a second delivery changes nothing.
CREATE TABLE departures (
    event_id uuid PRIMARY KEY,
    carrier text NOT NULL,
    delay integer NOT NULL
);
CREATE VIEW carrier_delays AS
    SELECT carrier, count(*) AS flights, sum(delay) AS minutes, count(*) FILTER (WHERE delay > 15) AS late,
           max(delay) AS worst
    FROM departures GROUP BY carrier;

-- Written by the consumer airport-board: one row per flight and airport.
CREATE TABLE board (
    airport text NOT NULL,
    flight text NOT NULL,
    status text NOT NULL CHECK (status IN ('departed', 'cancelled', 'arrived', 'diverted')),
    delay integer,
    PRIMARY KEY (airport, flight)
);
CREATE VIEW airport_board AS
    SELECT airport, status, count(*) AS flights, coalesce(sum(delay), 0) AS minutes FROM board GROUP BY airport, status;

-- Written by the consumer audit: every event once, and how often it was delivered.
CREATE TABLE audit (
    event_id uuid PRIMARY KEY,
    topic text NOT NULL,
    deliveries integer NOT NULL DEFAULT 1
);
CREATE VIEW audit_count AS
    SELECT topic, count(*) AS events, sum(deliveries) AS deliveries FROM audit GROUP BY topic;
"""


def connect(environment: Mapping[str, str] = os.environ) -> psycopg.Connection:
    """A new connection in autocommit mode, to the schema ``FLIGHTS_SCHEMA`` of the database ``EVENTBUS_DSN``."""
    connection = psycopg.connect(environment["EVENTBUS_DSN"], autocommit=True)
    connection.execute(sql.SQL("SET search_path TO {}").format(_schema(environment)))
    return connection


def create_tables(environment: Mapping[str, str] = os.environ) -> None:
    """Create the schema and its tables; a second call does nothing."""
    with connect(environment) as connection, connection.transaction():
        if connection.execute("SELECT to_regclass('flights') IS NULL").fetchone() == (True,):
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(_schema(environment)))
            connection.execute(_TABLES)


def connection() -> psycopg.Connection:
    """The connection of the calling thread; a new one if the server has ended the last."""
    thread = _per_thread()
    kept: psycopg.Connection | None = getattr(thread, "connection", None)
    if kept is None or kept.closed:
        thread.connection = kept = connect()
    return kept


def _schema(environment: Mapping[str, str]) -> sql.Identifier:
    return sql.Identifier(environment.get("FLIGHTS_SCHEMA", "flights"))


@functools.cache
def _per_thread() -> threading.local:
    return threading.local()
