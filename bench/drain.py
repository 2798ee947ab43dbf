"""Draining a backlog with one consumer process, against a bare row queue; also under an old snapshot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from bench import children, line, rowqueue
from bench.children import Drained
from bench.report import Figure, Target, median, ratio
from bench.rounds import take_turns
from bench.servers import Server

_ROW_QUEUE_PATIENCE = 20.0
"""Seconds after which a row queue that slows down under a snapshot is cut short, which flatters it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One drained backlog, and how fast the relay had filled the queue (0 when it was part of the draining)."""

    drained: Drained
    relayed_per_second: float = 0.0


def ours(server: Server, events: int, *, relayed: bool = True, held: bool = False, plain: bool = False) -> Measured:
    """Drain ``events`` with the bus. ``relayed``: before the clock starts. ``held``: under an old snapshot."""
    with server.database() as dsn, line.connect(dsn) as connection:
        line.declare(connection)
        with line.old_snapshot(dsn, held=held):
            line.fill(connection, events)
            rate = line.relay(connection) if relayed else 0.0
            line.checkpoint(connection)
            handler = ["--plain"] if plain else []
            drained = children.drained("bench.consumer", "--dsn", dsn, "--events", events, *handler)
            line.require_settled(connection, events)
    return Measured(drained, rate)


def theirs(server: Server, events: int, *, durable: bool = True, held: bool = False) -> Measured:
    """Drain ``events`` with the row queue. ``durable``: with the server's default synchronous_commit."""
    with server.database() as dsn, line.connect(dsn) as connection, line.old_snapshot(dsn, held=held):
        rowqueue.create(connection, events)
        arguments = [] if durable else ["--asynchronous-commit"]
        if held:
            arguments += ["--seconds", str(_ROW_QUEUE_PATIENCE)]
        return Measured(children.drained("bench.rowqueue", "--dsn", dsn, "--events", events, *arguments))


def drain(server: Server, events: int, rounds: int) -> list[Figure]:
    """Rates and ratios of draining, and the relay's rate by the way."""
    contenders: dict[str, Callable[[], Measured]] = {
        "bus, relayed before": functools.partial(ours, server, events),
        "bus, relay included": functools.partial(ours, server, events, relayed=False),
        "row queue": functools.partial(theirs, server, events),
        "row queue, asynchronous commit": functools.partial(theirs, server, events, durable=False),
    }
    results = take_turns(contenders, rounds)
    rates = {name: [result.drained.rate for result in found] for name, found in results.items()}
    figures = [median("drain", name, found, "events/s") for name, found in rates.items()]
    for name in ("bus, relayed before", "bus, relay included"):
        mine = rates[name]
        figures.append(ratio("drain", f"{name} / row queue", mine, rates["row queue"], target=Target(">=", 1.3)))
        unsafe = "row queue, asynchronous commit"
        figures.append(ratio("drain", f"{name} / {unsafe}", mine, rates[unsafe]))
    for name in contenders:
        spent = [result.drained.cpu_microseconds for result in results[name]]
        figures.append(median("drain", f"{name}: processor time of the consumer process", spent, "µs/event"))
    relayed = [result.relayed_per_second for result in results["bus, relayed before"]]
    return [*figures, median("relay", "relay, one queue", relayed, "events/s")]


def snapshot(server: Server, events: int, rounds: int) -> list[Figure]:
    """The same under a snapshot that is older than every event."""
    contenders: dict[str, Callable[[], Measured]] = {
        "bus": functools.partial(ours, server, events),
        "bus, old snapshot": functools.partial(ours, server, events, held=True),
        "row queue": functools.partial(theirs, server, events),
        "row queue, old snapshot": functools.partial(theirs, server, events, held=True),
    }
    results = take_turns(contenders, rounds)
    rates = {name: [result.drained.rate for result in found] for name, found in results.items()}
    figures = [median("snapshot", name, found, "events/s") for name, found in rates.items()]
    figures += [
        ratio("snapshot", f"{name}, old snapshot / without", rates[f"{name}, old snapshot"], rates[name], target=target)
        for name, target in (("bus", Target(">=", 0.95)), ("row queue", None))
    ]
    for name in ("bus, old snapshot", "row queue, old snapshot"):
        last = [result.drained.final_rate for result in results[name]]
        figures.append(median("snapshot", f"{name}: the last tenth", last, "events/s"))
    relayed = [[result.relayed_per_second for result in results[name]] for name in ("bus, old snapshot", "bus")]
    return [*figures, ratio("snapshot", "relay, old snapshot / without", *relayed)]


def sync(server: Server, events: int, rounds: int) -> list[Figure]:
    """Draining with a plain function as handler, which runs in threads."""
    rates = [ours(server, events, plain=True).drained.rate for _ in range(rounds)]
    return [median("sync", "bus, plain handler", rates, "events/s")]
