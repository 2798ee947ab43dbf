"""Sixteen concurrent publishers, with and without the trigger that wakes a sleeping relay.

Three situations: the relay counts as awake and nobody consumes; a worker relays and consumes at the same time; and the
worst one, in which the last relay left while it slept, so that nobody ever wakes and every commit sends a NOTIFY, which
the server serialises. With a worker, the relay is woken from outside all the time, so that it has the same work to do
when the trigger does not wake it.
"""

from __future__ import annotations

import functools
import multiprocessing
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import psycopg

from bench import children, line
from bench.publishing import outbox, publish_one
from bench.report import Figure, Target, median, ratio
from bench.rounds import take_turns
from bench.servers import SCHEMA, Server

PUBLISHERS: Final = 16
_TARGET: Final = Target(">=", 0.9)
_TRIGGER: Final = "wake_relay"
_PGBENCH: Final = (
    f"INSERT INTO {SCHEMA}.outbox (event_id, topic, payload, size)"
    f" VALUES (gen_random_uuid(), '{line.TOPIC}', '\"{'x' * (line.PAYLOAD_BYTES - 2)}\"', {line.PAYLOAD_BYTES});"
)

Block = Callable[[], float]


def publishers(server: Server, seconds: float, rounds: int) -> list[Figure]:
    """Events per second of sixteen processes, and the ratio with and without the trigger."""
    figures = []
    for situation, target in (("relay awake", _TARGET), ("worker running", _TARGET), ("relay gone asleep", None)):
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
    """The contenders in one situation: each with the trigger, then without it."""
    with ExitStack() as stack:
        dsn = stack.enter_context(server.database())
        connection = stack.enter_context(line.connect(dsn))
        line.declare(connection)
        if situation == "worker running":
            stack.enter_context(children.ready("bench.consumer", "--dsn", dsn))
            stack.enter_context(_woken(dsn))
        team = stack.enter_context(_team(dsn))
        ways: dict[str, Block] = {"publish_event": functools.partial(_publish_together, team, seconds)}
        if shutil.which("pgbench") is not None:
            ways["pgbench INSERT"] = functools.partial(_pgbench, dsn, seconds)
        blocks: dict[str, Block] = {}
        for name, way in ways.items():
            block = functools.partial(_block, connection, way, asleep=situation == "relay gone asleep")
            blocks[name] = functools.partial(block, trigger=True)
            blocks[f"{name}, no trigger"] = functools.partial(block, trigger=False)
        yield blocks


def _block(connection: psycopg.Connection[Any], publish: Block, *, trigger: bool, asleep: bool) -> float:
    """Publish with or without the trigger; events per second."""
    if asleep:
        line.run(connection, "SELECT {s}.fall_asleep(86400)")
    if trigger:
        return publish()
    line.run(connection, f"ALTER TABLE {{s}}.outbox DISABLE TRIGGER {_TRIGGER}")
    try:
        return publish()
    finally:
        line.run(connection, f"ALTER TABLE {{s}}.outbox ENABLE TRIGGER {_TRIGGER}")


def _publish_together(team: list[Connection], seconds: float) -> float:
    """Let the whole team publish for some seconds; events per second."""
    start = time.monotonic() + 0.1
    for member in team:
        member.send((start, start + seconds))
    return float(sum(member.recv() for member in team) / seconds)


@contextmanager
def _woken(dsn: str) -> Iterator[None]:
    """Wake the relay every 20 ms while the block runs."""
    over = threading.Event()

    def wake() -> None:
        with line.connect(dsn) as connection:
            while not over.wait(0.02):
                connection.execute(f'NOTIFY "{SCHEMA}.relay"'.encode())

    thread = threading.Thread(target=wake, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


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


def _pgbench(dsn: str, seconds: float) -> float:
    """Sixteen clients of pgbench, which needs less of the processor than Python; transactions per second."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(_PGBENCH)
        script.flush()
        command = ["pgbench", "-n", "-M", "prepared", "-c", str(PUBLISHERS), "-j", "2", "-f", script.name]
        command += ["-T", str(max(1, round(seconds))), dsn]
        output = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"^tps = ([0-9.]+)", output.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pgbench said no rate:\n{output.stdout}{output.stderr}")
    return float(found[1])
