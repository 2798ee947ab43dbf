"""What the promises of a handler cost: draining a backlog with each, as a ratio to a plain handler in the same run."""

from __future__ import annotations

import functools
from typing import Any, Final

from bench import children, line
from bench.consumer import KINDS
from bench.report import Figure, Target, median, ratio
from bench.rounds import take_turns
from bench.servers import Server

_KEYS: Final = 1_000
_TARGETS: Final = {"idempotent": 0.45, "ordered": 0.5, "transactional-batch": 0.3}
_DECLARED: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "idempotent": {"tracking": "idempotent"},
    "ordered": {"kind": "ordered"},
    "prioritized": {"kind": "prioritized", "lanes": 3},
    "batch": {},
    "transactional": {"tracking": "transactional"},
    "transactional-batch": {"tracking": "transactional"},
}
_SLOW: Final = {"transactional": 20}
"""How many times fewer events: each is a transaction of its own, with its own flush to disk."""


def drained(server: Server, events: int, kind: str) -> float:
    """Events per second of one handler; its queue was filled before."""
    count = max(1_000, events // _SLOW.get(kind, 1))
    with server.database() as dsn, line.connect(dsn) as connection:
        line.declare(connection, **_DECLARED[kind])
        line.fill(connection, count, _KEYS)
        line.relay(connection)
        line.checkpoint(connection)
        result = children.drained("bench.consumer", "--dsn", dsn, "--events", count, "--kind", kind)
        line.require_settled(connection, count)
    return result.rate


def promises(server: Server, events: int, rounds: int) -> list[Figure]:
    """Rates of every kind of handler, and their ratios to a plain one. All do nothing, all events have 1,000 keys."""
    contenders = {kind: functools.partial(drained, server, events, kind) for kind in KINDS}
    rates = take_turns(contenders, rounds)
    figures = [median("promises", kind, found, "events/s") for kind, found in rates.items()]
    for kind, found in rates.items():
        if kind != "plain":
            target = Target(">=", _TARGETS[kind]) if kind in _TARGETS else None
            figures.append(ratio("promises", f"{kind} / plain", found, rates["plain"], target=target))
    return figures
