"""One publisher of a torture run: ``python -m eventbus.testing.torture.publisher NUMBER``, until SIGTERM.

Each transaction writes a row for each event that it publishes: what the table of the business says is the truth, also
where a connection was lost in a COMMIT. A key belongs to one connection of one publisher, so that its order is known.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import uuid
from contextlib import suppress
from typing import Final

import psycopg
from psycopg import sql

from eventbus.postgres.publishing import PublishStatements
from eventbus.publishing.outbox import Outbox
from eventbus.settings import load
from eventbus.testing.torture.postgres.tables import NAME, ROW, business
from eventbus.testing.torture.queues import TOPIC

PAUSE: Final = 0.1
"""Average seconds between two transactions of a publisher, of about two events each."""


class Undo(Exception):
    """The publisher changes its mind."""


class Publisher:
    """Publishes transactions of every shape; which ones is decided by the seed."""

    def __init__(self, number: str) -> None:
        settings = load()
        assert settings.dsn is not None
        self._dsn = settings.dsn
        self._number = number
        self._chance = random.Random(f"{os.environ['TORTURE_SEED']} publisher {number}")  # noqa: S311 - it must repeat
        self._outbox = Outbox(PublishStatements(settings.schema_name), settings)
        self._row = sql.SQL(ROW).format(sql.Identifier(business(settings.schema_name)))
        self._numbers = itertools.count(1)
        self._connections = itertools.count(1)
        self._last_id = uuid.uuid4()
        self._stopping = False
        self._began = 0

    def stop(self, *_: object) -> None:
        """Publish no more after the transaction that is under way."""
        self._stopping = True

    def run(self) -> None:
        """Publish until it is stopped; a lost connection is replaced."""
        while not self._stopping:
            with suppress(psycopg.OperationalError), psycopg.connect(self._dsn, autocommit=True) as connection:
                connection.execute(NAME, (os.environ["TORTURE_NAME"],))
                family = f"{self._number}/{next(self._connections)}"
                while not self._stopping:
                    self._transact(connection, family)
                    time.sleep(self._chance.random() * 2 * PAUSE)

    def _transact(self, connection: psycopg.Connection, family: str) -> None:
        shape = self._chance.choices(("commit", "savepoints", "roll back"), (75, 15, 10))[0]
        self._began = time.time_ns()  # a delay counts from the beginning of the transaction
        with suppress(Undo), connection.transaction():
            for _ in range(self._chance.randrange(1, 4)):
                if shape == "savepoints":
                    with suppress(Undo), connection.transaction():
                        self._publish(connection, family)
                        _undo(wanted=self._chance.random() < 0.5)
                else:
                    self._publish(connection, family)
            _undo(wanted=shape == "roll back")

    def _publish(self, connection: psycopg.Connection, family: str) -> None:
        chance, number = self._chance, next(self._numbers)
        key = f"{family}/{chance.randrange(5)}" if chance.random() < 0.6 else None
        delay = chance.random() * 2 if key is None and chance.random() < 0.1 else None
        event_id = uuid.uuid4()
        if key is None and chance.random() < 0.1:
            event_id = self._last_id
        elif key is None:
            self._last_id = event_id
        token, due = f"{self._number}-{number}", self._began + int((delay or 0) * 1e9)
        self._outbox.publish_event(TOPIC, {"token": token}, key=key, delay=delay, event_id=event_id,
                                   priority=chance.choice((0, 0, 5, 9)), conn=connection)  # fmt: skip
        connection.execute(self._row, (token, str(event_id), key, number, due if delay else 0))


def _undo(*, wanted: bool) -> None:
    if wanted:
        raise Undo


if __name__ == "__main__":
    publisher = Publisher(sys.argv[1])
    signal.signal(signal.SIGTERM, publisher.stop)
    publisher.run()
