"""Memory of a consumer process that drains a large backlog: it must be bounded and flat."""

from __future__ import annotations

import time

import psutil

from bench import children, line
from bench.report import Figure, Target
from bench.rounds import say
from bench.servers import Server

_EVERY = 0.05


def memory(server: Server, events: int) -> list[Figure]:
    """The largest resident set, and by how much the second half of the run needed more than the first."""
    with server.database() as dsn, line.connect(dsn) as connection:
        line.declare(connection)
        say(f"  {events:,} events")
        line.fill(connection, events)
        line.relay(connection)
        with children.ready("bench.consumer", "--dsn", dsn, "--events", events) as consumer:
            samples = _watch(consumer.pid)
            children.read_drained(consumer)
        line.require_settled(connection, events)
    half = len(samples) // 2
    peak, growth = max(samples), max(samples[half:]) - max(samples[:half])
    note = f"{events:,} events, {len(samples)} samples"
    return [
        Figure("memory", "largest resident set", peak, "MB", Target("<=", 120.0), note=note),
        Figure("memory", "second half above first half", growth, "MB", Target("<=", 5.0), note=note),
        Figure("memory", "at the start", samples[0], "MB"),
    ]


def _watch(pid: int) -> list[float]:
    """The resident set in megabytes (10^6 bytes), sampled until the process ends."""
    process = psutil.Process(pid)
    samples = []
    try:
        while (size := process.memory_info().rss) > 0:
            samples.append(size / 1e6)
            time.sleep(_EVERY)
    except psutil.NoSuchProcess:
        pass
    if len(samples) < 10:
        raise RuntimeError("the consumer ended before its memory could be sampled; use more events")
    return samples
