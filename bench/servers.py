"""Where the benchmarks run: a PostgreSQL that is already there, or an embedded one, and throw-away databases in it.

Every measurement gets a new database, so that none inherits dead rows, statistics or cached plans of another.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psycopg
from psycopg import conninfo, sql

from eventbus.plugins.registry import loaded
from eventbus.postgres.migrate import migrate
from eventbus.runtime import embedded
from eventbus.settings import Settings

DEFAULT_DSN: Final = "postgresql://127.0.0.1:5432/postgres"
PREFIX: Final = "eventbus_bench_"
SCHEMA: Final = "eventbus"

Choice = Literal["auto", "machine", "embedded"]


@dataclass(frozen=True, slots=True)
class Server:
    """A running server in which the benchmarks may create databases. ``kind`` is for the report."""

    admin_dsn: str
    kind: Literal["machine", "embedded"]

    @contextmanager
    def database(self) -> Iterator[str]:
        """The DSN of a new database with the bus's schema; dropped afterwards, with whoever is still connected."""
        name = PREFIX + uuid.uuid4().hex[:12]
        with psycopg.connect(self.admin_dsn, autocommit=True) as admin:
            admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        dsn = conninfo.make_conninfo(self.admin_dsn, dbname=name)
        try:
            migrate(dsn, SCHEMA, loaded(Settings()).migrations())
            yield dsn
        finally:
            with psycopg.connect(self.admin_dsn, autocommit=True) as admin:
                admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def server(choice: Choice) -> Iterator[Server]:
    """The server to measure. ``auto``: the machine's if it answers, else an embedded one.

    The machine's is at ``BENCH_DSN``, which must allow creating databases. An embedded one lives in a
    temporary folder and is stopped afterwards.
    """
    dsn = os.environ.get("BENCH_DSN", DEFAULT_DSN)
    if choice == "machine" or (choice == "auto" and _answers(dsn)):
        yield Server(dsn, "machine")
        return
    with tempfile.TemporaryDirectory(prefix="eventbus-bench-") as folder:
        Path(folder).chmod(0o755)
        with embedded.start(Path(folder)) as started:
            yield Server(started.dsn, "embedded")


def _answers(dsn: str) -> bool:
    try:
        psycopg.connect(dsn, connect_timeout=3).close()
    except psycopg.OperationalError:
        return False
    return True
