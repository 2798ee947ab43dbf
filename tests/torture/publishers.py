"""Publishers of a torture run: transactions of every shape, and what they committed in a table of the application."""

from __future__ import annotations

import itertools
import random
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from eventbus.publishing.outbox import Outbox
from tests.torture.history import Journal
from tests.torture.kinds import EVERYBODY, Kind

KEYS = 1_000
HOT_KEY = "hot"
ROW = "INSERT INTO torture_published VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"


class Undo(Exception):
    """The publisher changes its mind."""


@dataclass(slots=True)
class Counters:
    """What all publishers of a run share."""

    left: int
    """Events that are still to be published."""
    transactions: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, most: int) -> int:
        """Up to so many of the events that are left."""
        with self.lock:
            taken = min(most, self.left)
            self.left -= taken
            return taken


class Publisher:
    """One connection that publishes until nothing is left; a killed backend costs it the open transaction."""

    def __init__(self, dsn: str, outbox: Outbox, kinds: Sequence[Kind], number: int, folder: Path) -> None:
        self._dsn = dsn
        self._outbox = outbox
        self._number = number
        self._topics = [EVERYBODY, *(f"torture.{kind.queue}" for kind in kinds), "torture.nobody"]
        self._chance = random.Random(f"publisher {number}")
        self._journal = Journal(folder, f"publisher-{number}")
        self._tokens = itertools.count(1)
        self._sent: list[tuple[uuid.UUID, str, str | None]] = []

    def run(self, counters: Counters, pause: float) -> None:
        """Publish what is left, with pauses of about so many seconds between transactions."""
        while counters.left:
            with suppress(psycopg.OperationalError), psycopg.connect(self._dsn) as connection:
                connection.execute("SET application_name = 'torture publisher'")
                connection.commit()
                while (count := counters.take(self._chance.randrange(1, 6))) > 0:
                    self._transact(connection, count, next(counters.transactions))
                    time.sleep(self._chance.random() * 2 * pause)

    def _transact(self, connection: psycopg.Connection, count: int, transaction: int) -> None:
        shape = self._chance.choices(("commit", "savepoints", "roll back"), (80, 12, 8))[0]
        try:
            with connection.transaction():
                for place in range(count):
                    self._publish_or_undo(connection, transaction, place, shape)
                _undo(shape == "roll back")
        except Undo:
            return
        self._journal.write("commit", transaction=transaction)

    def _publish_or_undo(self, connection: psycopg.Connection, transaction: int, place: int, shape: str) -> None:
        if shape != "savepoints":
            self._publish(connection, transaction, place)
            return
        with suppress(Undo), connection.transaction():
            self._publish(connection, transaction, place)
            _undo(self._chance.random() < 0.5)

    def _publish(self, connection: psycopg.Connection, transaction: int, place: int) -> None:
        chance = self._chance
        event_id, key = uuid.uuid4(), self._key()
        topic = chance.choices(self._topics, [len(self._topics)] + [1] * (len(self._topics) - 1))[0]
        if self._sent and chance.random() < 0.02:
            event_id, topic, key = chance.choice(self._sent)
        self._sent = [*self._sent[-20:], (event_id, topic, key)]
        token = f"{self._number}-{next(self._tokens)}"
        delay = chance.random() if chance.random() < 0.03 else None
        headers = {"x-token": token} if chance.random() < 0.2 else None
        published_at = time.time_ns()
        self._outbox.publish_event(
            topic, {"token": token}, key=key, headers=headers, delay=delay, event_id=event_id,
            priority=chance.choice((0, 0, 0, 5, 9)), conn=connection,
        )  # fmt: skip
        payload, sent_headers = f'{{"token":"{token}"}}', f'{{"x-token":"{token}"}}' if headers else None
        row = (token, str(event_id), topic, key, payload, sent_headers, delay is not None, transaction, place)
        connection.execute(ROW, (*row, published_at))

    def _key(self) -> str | None:
        return self._chance.choices(
            (None, HOT_KEY, f"key {self._chance.randrange(KEYS)}", f"few {self._chance.randrange(10)}"), (20, 3, 70, 7)
        )[0]


def _undo(wanted: bool) -> None:
    if wanted:
        raise Undo
