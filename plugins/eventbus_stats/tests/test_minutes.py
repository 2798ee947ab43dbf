"""The table of minutes: many workers add to the same rows at once, and old rows go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import orjson
import psycopg
import pytest

from eventbus.errors import Unavailable
from eventbus_stats import Stats
from eventbus_stats.sql import ADD, PURGE

SCHEMA = '"eventbus"'
one_server = pytest.mark.parametrize("major", [18], indirect=True)

Rows = Callable[..., Any]


def plugin(**settings: Any) -> Stats:
    return Stats(Stats.Settings(**settings))


def add(connection: psycopg.Connection, *rows: dict[str, Any]) -> None:
    connection.execute(ADD.replace("{schema}", SCHEMA).encode(), [orjson.dumps(rows).decode()])


def test_the_migration_says_what_it_is_for() -> None:
    [step] = plugin().eventbus_migrations()
    assert step.name == "0001_minutes"
    assert step.sql.startswith("-- Statistics: ")


def test_what_is_added_twice_in_a_minute_is_one_row_with_the_sums(table: psycopg.Connection) -> None:
    row = {
        "queue": "ledger", "published": 5, "handled": 3, "failed": 2, "retried": 1, "dead": 1, "duplicates": 4,
        "discarded": 6, "deferred": 7, "released": 8, "lost_leases": 9, "seconds_sum": 1.5, "seconds_max": 1.0,
        "waited_sum": 2.5, "waited_max": 2.0, "seconds_buckets": [1, 0, 2], "waited_buckets": [],
    }  # fmt: skip
    other = row | {"seconds_max": 0.5, "waited_max": 3.0, "seconds_buckets": [0, 1, 1, 4], "waited_buckets": [3]}
    found: list[tuple[Any, ...]] = []
    while len(found) != 1:  # two, if a minute ended in between
        table.execute("DELETE FROM eventbus.stats_minutes")
        add(table, row)
        add(table, other, {"queue": "mails", "handled": 1})
        found = table.execute("SELECT * FROM eventbus.stats_minutes WHERE queue = 'ledger'").fetchall()
    assert found[0][2:] == (10, 6, 4, 2, 2, 8, 12, 14, 16, 18, 3.0, 1.0, 5.0, 3.0, [1, 1, 3, 4], [3])


def test_the_minute_is_that_of_the_servers_clock(table: psycopg.Connection) -> None:
    table.execute("SET TimeZone = 'Asia/Kathmandu'")
    before = table.execute("SELECT clock_timestamp()").fetchall()[0][0]
    add(table, {"queue": "ledger", "handled": 1})
    [(minute,)] = table.execute("SELECT minute FROM eventbus.stats_minutes").fetchall()
    assert (minute.second, minute.microsecond) == (0, 0)
    assert -60 < (minute - before).total_seconds() <= 60


def test_an_empty_list_writes_nothing(table: psycopg.Connection) -> None:
    add(table)
    assert table.execute("SELECT count(*) FROM eventbus.stats_minutes").fetchall() == [(0,)]


def test_workers_that_write_the_same_queues_in_any_order_never_deadlock_and_lose_nothing(
    table: psycopg.Connection, dsn: str
) -> None:
    names = [f"queue{n}" for n in range(40)]

    def write(seed: int) -> None:
        draws = random.Random(seed)
        with psycopg.connect(dsn, autocommit=True) as connection:
            for _ in range(25):
                shuffled = draws.sample(names, len(names))
                add(connection, *({"queue": name, "handled": 1, "seconds_buckets": [0, 1]} for name in shuffled))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(write, range(6)))
    found = table.execute(
        "SELECT queue, sum(handled), sum(seconds_buckets[2]) FROM eventbus.stats_minutes GROUP BY queue"
    ).fetchall()
    assert {name: (int(handled), int(bucket)) for name, handled, bucket in found} == dict.fromkeys(names, (150, 150))


def aged(connection: psycopg.Connection, queue: str, days: float, rows: int = 1) -> None:
    connection.execute(
        "INSERT INTO eventbus.stats_minutes (minute, queue, handled)"
        " SELECT date_trunc('minute', now() - make_interval(secs => %s)) - make_interval(mins => n), %s, 1"
        " FROM generate_series(0, %s) n",
        [days * 86_400, queue, rows - 1],
    )


def runner(connection: psycopg.Connection, asked: list[Sequence[Any]]) -> Rows:
    async def rows(sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        asked.append(parameters)
        return connection.execute(sql.replace("{schema}", SCHEMA).encode(), parameters).fetchall()

    return rows


@one_server
async def test_minutes_older_than_the_retention_go_in_small_steps_and_younger_ones_stay(
    table: psycopg.Connection,
) -> None:
    aged(table, "ledger", 31, rows=4_500)
    aged(table, "ledger", 29)
    asked: list[Sequence[Any]] = []
    [duty] = plugin().eventbus_duties()
    assert await duty.run(runner(table, asked)) == 4_500
    assert asked == [(30 * 86_400.0, 2_000)] * 3
    assert table.execute("SELECT count(*) FROM eventbus.stats_minutes").fetchall() == [(1,)]
    [short] = plugin(retention=3_600 * 24 * 28).eventbus_duties()
    assert await short.run(runner(table, asked)) == 1


@one_server
def test_what_is_removed_is_found_by_the_index_however_much_is_kept(table: psycopg.Connection) -> None:
    aged(table, "ledger", 1, rows=20_000)
    aged(table, "ledger", 40, rows=100)
    with table.transaction():
        before = table_scans(table)
        [(removed,)] = table.execute(PURGE.replace("{schema}", SCHEMA).encode(), (30 * 86_400.0, 2_000)).fetchall()
        assert (removed, table_scans(table) - before) == (100, 0)


def table_scans(connection: psycopg.Connection) -> int:
    """How often this session has read the whole table, as far as nothing was reported yet."""
    [(scans,)] = connection.execute(
        "SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relname = 'stats_minutes'"
    ).fetchall()
    return int(scans)


class Worker:
    """What the plugin sees of a worker; ``problem`` is what its database says."""

    def __init__(self, answer: Callable[[str], list[tuple[Any, ...]]]) -> None:
        self.answer = answer
        self.problem: Exception | None = None
        self.written: list[Any] = []
        self.repeated: list[tuple[float, Callable[[], Any], str]] = []

    async def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        await asyncio.sleep(0)
        if self.problem is not None:
            raise self.problem
        if "stats_add" in sql:
            self.written.append(orjson.loads(parameters[0]))
        return self.answer(sql)

    def every(self, seconds: float, action: Callable[[], Any], name: str) -> None:
        self.repeated.append((seconds, action, name))


def now(sql: str) -> list[tuple[Any, ...]]:
    return [(datetime.now().astimezone().timestamp() if "clock" in sql else None,)]


async def test_a_worker_writes_at_the_interval_of_the_setting_and_once_more_when_it_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    stats, worker = plugin(interval=0.5), Worker(now)
    await stats.eventbus_worker_ready(worker)  # type: ignore[arg-type]
    [(seconds, write, _)] = worker.repeated
    assert seconds == 0.5
    await write()
    assert worker.written == [], "nothing happened, so nothing is written"
    stats.eventbus_relayed({"ledger": 3})
    await write()
    stats.eventbus_lease_lost("ledger")
    await stats.eventbus_worker_stopped(worker)  # type: ignore[arg-type]
    assert [
        [(row["queue"], row.get("published"), row.get("lost_leases")) for row in rows] for rows in worker.written
    ] == [
        [("ledger", 3, None)],
        [("ledger", None, 1)],
    ]
    assert caplog.records == []


@pytest.mark.parametrize("problem", [Unavailable("no connection"), psycopg.errors.UndefinedFunction("no stats_add")])
async def test_an_outage_is_one_line_and_its_end_another_and_what_was_dropped_never_comes_back(
    problem: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    stats, worker = plugin(), Worker(now)
    await stats.eventbus_worker_ready(worker)  # type: ignore[arg-type]
    [(_, write, _)] = worker.repeated
    for _ in range(2):
        worker.problem = problem
        for _ in range(3):
            stats.eventbus_relayed({"ledger": 1})
            await write()
        worker.problem = None
        await write()
        stats.eventbus_relayed({"ledger": 10})
        await write()
    messages = [record.message for record in caplog.records]
    assert (
        messages
        == [
            f"statistics are dropped until they can be written: {problem}",
            "statistics are written again",
        ]
        * 2
    )
    assert [[row["published"] for row in rows] for rows in worker.written] == [[10], [10]]


async def test_a_worker_that_starts_while_the_database_is_away_counts_all_the_same() -> None:
    stats, worker = plugin(), Worker(now)
    worker.problem = Unavailable("no connection")
    await stats.eventbus_worker_ready(worker)  # type: ignore[arg-type]
    worker.problem = None
    stats.eventbus_relayed({"ledger": 1})
    [(_, write, _)] = worker.repeated
    await write()
    assert len(worker.written) == 1
