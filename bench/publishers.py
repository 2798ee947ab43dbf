"""Sixteen concurrent publishers, with and without the trigger that wakes a sleeping relay.

Three situations: the relay is awake and nobody consumes; a worker relays and consumes at the same time, asleep when it
starts; and the worst one, in which the relay said that it sleeps and nothing ever wakes it, because its process died.
Then every commit sends a NOTIFY, which the server serialises.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import psycopg

from bench import children, line
from bench.publishing import create_bare, outbox, publish_one
from bench.report import Figure, Target, median, ratio
from bench.rounds import take_turns
from bench.servers import SCHEMA, Server

PUBLISHERS: Final = 16
_TARGET: Final = Target(">=", 0.9)
_TRIGGER: Final = "wake_relay"
_PGBENCH: Final = (
    "INSERT INTO {table} (event_id, topic, payload, size)"
    f" VALUES (gen_random_uuid(), '{line.TOPIC}', '\"{'x' * (line.PAYLOAD_BYTES - 2)}\"', {line.PAYLOAD_BYTES});"
)

Block = Callable[[], float]


def publishers(server: Server, seconds: float, rounds: int) -> list[Figure]:
    """Events per second of sixteen processes, and the ratio with and without the trigger."""
    figures = []
    for situation, target in (("relay awake", _TARGET), ("worker running", _TARGET), ("relay died asleep", None)):
        with _published(server, situation, seconds) as blocks:
            results = take_turns(blocks, rounds)
        for name, found in results.items():
            figures.append(median("publishers", f"{name}, {situation}", found, "events/s"))
        names = list(blocks)
        for with_trigger, without in zip(names[::2], names[1::2], strict=True):
            name = f"{with_trigger} / no trigger, {situation}"
            figures.append(ratio("publishers", name, results[with_trigger], results[without], target=target))
    return figures


@contextmanager
def _published(server: Server, situation: str, seconds: float) -> Iterator[dict[str, Block]]:
    """The contenders in one situation."""
    with ExitStack() as stack:
        dsn = stack.enter_context(server.database())
        connection = stack.enter_context(line.connect(dsn))
        create_bare(connection)
        line.declare(connection)
        if situation == "worker running":
            stack.enter_context(children.ready("bench.consumer", "--dsn", dsn))
        team = stack.enter_context(_team(dsn))
        asleep = situation == "relay died asleep"
        blocks: dict[str, Block] = {
            "publish_event": functools.partial(_block, connection, team, seconds, trigger=True, asleep=asleep),
            "publish_event, no trigger": functools.partial(
                _block, connection, team, seconds, trigger=False, asleep=asleep
            ),
        }
        if shutil.which("pgbench") is not None and situation != "worker running":
            blocks["pgbench INSERT"] = functools.partial(_pgbench, dsn, "outbox", seconds)
            blocks["pgbench INSERT, no trigger"] = functools.partial(_pgbench, dsn, "bare", seconds)
        yield blocks


def _block(
    connection: psycopg.Connection[Any], team: list[Connection], seconds: float, *, trigger: bool, asleep: bool
) -> float:
    """Let the whole team publish for some seconds; events per second."""
    line.run(connection, f"ALTER TABLE {{s}}.outbox {'ENABLE' if trigger else 'DISABLE'} TRIGGER {_TRIGGER}")
    if asleep:
        line.run(connection, "SELECT setval('{s}.relay_sleep', 1)")
    start = time.monotonic() + 0.1
    for member in team:
        member.send((start, start + seconds))
    published = sum(member.recv() for member in team)
    line.run(connection, f"ALTER TABLE {{s}}.outbox ENABLE TRIGGER {_TRIGGER}")
    return float(published / seconds)


@contextmanager
def _team(dsn: str) -> Iterator[list[Connection]]:
    """Sixteen processes that are connected and have published once; one pipe to each."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(PUBLISHERS)]
    processes = [context.Process(target=_publisher, args=(dsn, theirs), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    team = [ours for ours, _ in pipes]
    try:
        for member in team:
            member.recv()
        yield team
        for member in team:
            member.send(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()


def _publisher(dsn: str, orders: Connection) -> None:
    """One publisher's process: publish from start to end, tell how many, wait for the next order."""
    target = outbox(dsn)
    with psycopg.connect(dsn) as connection:
        for _ in range(10):
            publish_one(connection, target)
        orders.send(0)
        while (order := orders.recv()) is not None:
            start, end = order
            time.sleep(max(0.0, start - time.monotonic()))
            published = 0
            while time.monotonic() < end:
                publish_one(connection, target)
                published += 1
            orders.send(published)


def _pgbench(dsn: str, table: str, seconds: float) -> float:
    """Sixteen clients of pgbench, which needs less of the processor than Python; transactions per second."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(_PGBENCH.format(table=f"{SCHEMA}.{table}"))
        script.flush()
        command = ["pgbench", "-n", "-M", "prepared", "-c", str(PUBLISHERS), "-j", "2", "-f", script.name]
        command += ["-T", str(max(1, round(seconds))), dsn]
        output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(script.name).parent)
    found = re.search(r"^tps = ([0-9.]+)", output.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pgbench said no rate:\n{output.stdout}{output.stderr}")
    return float(found[1])
