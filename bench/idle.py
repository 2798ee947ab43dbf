"""What a consumer costs while there is nothing to do."""

from __future__ import annotations

import time
from typing import Final

import psutil

from bench import children, wire
from bench.report import Figure, Target
from bench.rounds import say
from bench.servers import Server

_SETTLE: Final = 3.0
"""Seconds until what follows the start of a worker is over."""


def idle(server: Server, seconds: float) -> list[Figure]:
    """Statements per second and processor time of an idle worker: consumer, relay, listener and heartbeat."""
    with (
        server.database() as dsn,
        wire.counted(dsn) as (through, counter),
        children.ready("bench.consumer", "--dsn", through) as consumer,
    ):
        say(f"  {_SETTLE + seconds:.0f} seconds")
        time.sleep(_SETTLE)
        process = psutil.Process(consumer.pid)
        before, busy, started = counter.statements, _busy(process), time.monotonic()
        time.sleep(seconds)
        after, busy, elapsed = counter.statements, _busy(process) - busy, time.monotonic() - started
    note = f"{seconds:.0f} s"
    statements = (after - before) / elapsed
    return [
        Figure("idle", "statements", statements, "per second", Target("<=", 2.0), note=note),
        Figure("idle", "processor", 100 * busy / elapsed, "% of a core", Target("<=", 0.3), note=note),
    ]


def _busy(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
