"""Says whether what happened was right. Reads the journal, the business table and the engine's tables by SQL.

Shares no code with the bus: a mistake there cannot excuse itself here. What was committed is what is in ``business``,
a table that publishers fill in the same transaction.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.waiting import wait_until

STANDING = """
SELECT (SELECT count(*) FROM eventbus.deliveries d WHERE d.queue_id = q.id),
    (SELECT coalesce(sum(
        coalesce((SELECT max(d.seq) FROM eventbus.deliveries d WHERE d.queue_id = q.id AND d.lane = n.lane), 0)
        - coalesce((SELECT max(c.hi) FROM eventbus.claims c WHERE c.queue_id = q.id AND c.lane = n.lane), 0)), 0)
     FROM (SELECT DISTINCT d.lane FROM eventbus.deliveries d WHERE d.queue_id = q.id) n),
    coalesce((SELECT sum(c.hi - c.lo + 1 - (SELECT count(*) FROM eventbus.progress p WHERE p.claim_id = c.id))
              FROM eventbus.claims c WHERE c.queue_id = q.id
              AND NOT EXISTS (SELECT 1 FROM eventbus.settlements s WHERE s.claim_id = c.id)), 0),
    coalesce((SELECT sum(coalesce(e.range_hi, e.seq) - e.seq + 1)
              FROM eventbus.exceptions e WHERE e.queue_id = q.id AND e.state = 'waiting'), 0),
    (SELECT count(*) FROM eventbus.exceptions e WHERE e.queue_id = q.id AND e.state = 'claimed'),
    (SELECT count(*) FROM eventbus.exceptions e WHERE e.queue_id = q.id AND e.state = 'parked'),
    (SELECT count(*) FROM eventbus.dead_letters l WHERE l.queue_id = q.id)
FROM eventbus.queues q WHERE q.name = %s
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal."""

    what: str
    event_id: str
    queue: str
    topic: str
    attempt: int
    pid: int
    at: float


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the deliveries of one queue are. ``held`` counts those in open claims, ``running`` held exceptions,
    ``parked`` those that wait behind an earlier event of their key.
    """

    delivered: int
    waiting: int
    held: int
    retrying: int
    running: int
    parked: int
    dead: int

    @property
    def undone(self) -> int:
        """How many are neither done nor dead."""
        return self.waiting + self.held + self.retrying + self.running + self.parked


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter."""

    event_id: str
    reason: str
    attempts: int
    crashes: int
    error: str | None


class Checker:
    """Compares what publishers committed with what handlers did."""

    def __init__(self, dsn: str, journal: Path) -> None:
        self._dsn = dsn
        self._journal = journal

    def entries(self, queue: str, what: str | None = None) -> list[Entry]:
        """What happened in one queue, in the order in which it was written down."""
        if not self._journal.exists():
            return []
        lines = self._journal.read_text(encoding="utf-8").splitlines()
        entries = (Entry(**json.loads(line)) for line in lines if line.endswith("}"))
        return [entry for entry in entries if entry.queue == queue and what in (None, entry.what)]

    def runs(self, queue: str) -> Counter[str]:
        """How often the handler was started for each event."""
        return Counter(entry.event_id for entry in self.entries(queue, "start"))

    def successes(self, queue: str) -> Counter[str]:
        """How often the handler came to its end for each event."""
        return Counter(entry.event_id for entry in self.entries(queue, "end"))

    def effects(self, queue: str) -> Counter[str]:
        """How often each event took effect in the database, by a transactional handler of this queue."""
        with psycopg.connect(self._dsn) as connection:
            rows = connection.execute("SELECT event_id::text FROM effects WHERE queue = %s", (queue,)).fetchall()
        return Counter(event_id for (event_id,) in rows)

    def committed(self, topics: Iterable[str] | None = None) -> set[str]:
        """The ids of the events whose transaction was committed."""
        with psycopg.connect(self._dsn) as connection:
            rows = connection.execute("SELECT event_id::text, topic FROM business").fetchall()
        return {event_id for event_id, topic in rows if topics is None or topic in topics}

    def standing(self, queue: str) -> Standing:
        """Where the deliveries of a queue are now; all zero before there is such a queue."""
        with psycopg.connect(self._dsn) as connection:
            row = connection.execute(STANDING, (queue,)).fetchone()
        return Standing(*map(int, row or [0] * 7))

    def dead(self, queue: str) -> dict[str, Letter]:
        """The dead letters of a queue by event id."""
        with psycopg.connect(self._dsn) as connection:
            rows = connection.execute(
                "SELECT l.event_id::text, l.reason, l.attempts, l.crashes, l.last_error ->> 'message'"
                " FROM eventbus.dead_letters l JOIN eventbus.queues q ON q.id = l.queue_id WHERE q.name = %s",
                (queue,),
            ).fetchall()
        assert len({row[0] for row in rows}) == len(rows), "an event died twice in one queue"
        return {row[0]: Letter(*row) for row in rows}

    def wait_until_quiet(self, queue: str, topics: Iterable[str] | None = None, timeout: float = 60.0) -> None:
        """Wait until everything that was committed is delivered, and done or dead."""

        def quiet() -> bool:
            standing = self.standing(queue)
            return standing.delivered >= len(self.committed(topics)) and standing.undone == 0

        try:
            wait_until(quiet, timeout)
        except AssertionError as problem:
            missing = self.committed(topics) - set(self.successes(queue))
            raise AssertionError(f"not quiet: {self.standing(queue)}, {len(missing)} never handled") from problem

    def verify(self, queue: str, topics: Iterable[str] | None = None, *, most_repeated: int = 0) -> None:
        """Conservation: each committed event is soon done or dead, no other was ever seen.

        ``most_repeated``: how many successful runs more than one per event there may be, because of crashes.
        """
        self.wait_until_quiet(queue, topics)  # a handler that has come to its end is not settled yet
        self.verify_now(queue, topics, most_repeated=most_repeated)

    def verify_now(self, queue: str, topics: Iterable[str] | None = None, *, most_repeated: int = 0) -> None:
        """The same of this very moment: for processes that promised to leave nothing undone, and have ended."""
        committed, standing = self.committed(topics), self.standing(queue)
        successes, dead = self.successes(queue), self.dead(queue)
        assert standing.undone == 0, standing
        assert standing.delivered == len(committed), "an event was delivered twice, or not at all"
        assert set(self.runs(queue)) <= committed, "a handler saw an event that was never committed"
        assert set(successes) | set(dead) == committed, "an event is lost"
        assert not set(successes) & set(dead), "an event is both done and dead"
        repeated = sum(successes.values()) - len(successes)
        assert repeated <= most_repeated, f"{repeated} events were handled more than once"

    def verify_attempts(self, queue: str) -> None:
        """Every event was tried with 1, 2, 3 …; a number comes again only after a run that never ended."""
        tried: dict[str, list[int]] = defaultdict(list)
        for entry in self.entries(queue, "start"):
            tried[entry.event_id].append(entry.attempt)
        for event_id, attempts in tried.items():
            assert sorted(set(attempts)) == list(range(1, max(attempts) + 1)), (event_id, attempts)
