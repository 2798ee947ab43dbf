"""Publishers that do everything a program can do to an outbox, at random, and remember what they committed."""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from psycopg import IsolationLevel, errors

from tests.postgres.engine.driver import Connection, Engine

KEYS = 6


@dataclass(slots=True)
class Ledger:
    """What really happened, as the publishers saw it. Written by many threads, each appending."""

    committed: dict[str, str] = field(default_factory=dict)
    """Topic of every committed event."""
    undone: set[str] = field(default_factory=set)
    """Events of transactions and savepoints that were rolled back."""
    by_key: dict[str, list[str]] = field(default_factory=dict)
    """Committed events of each key, each published after the one before had committed."""
    shapes: Counter[str] = field(default_factory=Counter)
    """How often each kind of transaction happened."""
    locks: dict[str, threading.Lock] = field(
        default_factory=lambda: {f"key{number}": threading.Lock() for number in range(KEYS)}
    )


class Publisher:
    """One publisher on a connection of its own, which is not autocommit: two-phase transactions cannot begin there."""

    def __init__(self, connection: Connection, ledger: Ledger, seed: str, stop: threading.Event) -> None:
        self._engine = Engine(connection)
        self._connection = connection
        self._ledger = ledger
        self._random = random.Random(seed)
        self._stop = stop
        self._key: str | None = None
        self._events: dict[str, str] = {}

    def run(self) -> None:
        """Publish until stopped, and at least once."""
        shapes: list[Callable[[], bool]] = [self._plain, self._bulk, self._savepoints, self._undone]
        rare: list[Callable[[], bool]] = [self._straggler, self._two_phase, self._two_phase_undone]
        while True:
            shape = self._random.choice(rare if self._random.random() < 0.08 else shapes)
            self._with_key(shape)
            if self._stop.wait(self._random.random() * 0.02):
                return

    def _with_key(self, shape: Callable[[], bool]) -> None:
        """Hold one key, if one is free, from before the transaction until after its commit."""
        key = f"key{self._random.randrange(KEYS)}"
        lock = self._ledger.locks[key]
        self._key = key if lock.acquire(blocking=False) else None
        self._events = {}
        try:
            self._connection.isolation_level = self._random.choice(list(IsolationLevel))
            self._account(committed=shape())
            self._ledger.shapes[shape.__name__.strip("_")] += 1
        except errors.SerializationFailure:
            self._account(committed=False)
        finally:
            if self._key is not None:
                lock.release()

    def _account(self, *, committed: bool) -> None:
        if not committed:
            self._ledger.undone.update(self._events)
            return
        self._ledger.committed.update(self._events)
        if self._key is not None:
            self._ledger.by_key.setdefault(self._key, []).extend(self._events)

    def _event(self) -> str:
        topic = f"{self._random.choice('ab')}.t{self._random.randrange(30)}"
        event_id = self._engine.publish(topic, key=self._key)
        self._events[event_id] = topic
        return event_id

    def _plain(self) -> bool:
        with self._connection.transaction():
            for _ in range(self._random.randrange(1, 5)):
                self._event()
        return True

    def _bulk(self) -> bool:
        ids = [str(uuid.uuid4()) for _ in range(self._random.randrange(1, 30))]
        self._events = dict.fromkeys(ids, "a.bulk")
        with self._connection.transaction():
            self._engine.rows(
                "INSERT INTO {bus}.outbox (event_id, topic, key, payload, size)"
                " SELECT u.id, 'a.bulk', %s, '{}', 2 FROM unnest(%s::uuid[]) WITH ORDINALITY AS u (id, n) ORDER BY u.n",
                self._key,
                ids,
            )
        return True

    def _savepoints(self) -> bool:
        with self._connection.transaction():
            self._event()
            for undo in (True, False, self._random.random() < 0.5):
                kept = dict(self._events)
                with self._connection.transaction(force_rollback=undo):
                    self._event()
                    with self._connection.transaction():
                        self._event()
                if undo:
                    self._ledger.undone.update(self._events.keys() - kept.keys())
                    self._events = kept
        return True

    def _undone(self) -> bool:
        with self._connection.transaction(force_rollback=True):
            self._event()
            self._event()
        return False

    def _straggler(self) -> bool:
        with self._connection.transaction():
            self._event()
            self._stop.wait(self._random.random() * 3)
            self._event()
        return True

    def _two_phase(self, finish: str = "COMMIT") -> bool:
        name = uuid.uuid4().hex
        self._connection.tpc_begin(name)
        self._event()
        self._event()
        self._connection.tpc_prepare()
        self._stop.wait(self._random.random())
        (self._connection.tpc_commit if finish == "COMMIT" else self._connection.tpc_rollback)()
        return finish == "COMMIT"

    def _two_phase_undone(self) -> bool:
        return self._two_phase("ROLLBACK")
