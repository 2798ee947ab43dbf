"""Points on the path of an event at which a test lets the server stop, wait, fail or lose the connection.

Before it: a database with the bus's schema, and a role that owns it. After it: whatever calls the engine's functions.
A point is a trigger on one of the bus's tables, there only while it is armed: the engine itself has none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import psycopg

from eventbus.postgres.statements import Statements

Deed = Literal["stop", "delay", "fail", "kill"]


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the engine. ``written``: what its transaction has written by then; none of it is committed."""

    name: str
    table: str
    moment: str
    written: str
    afterwards: str
    """What must hold when the transaction ends here."""


CATALOGUE = (
    Point("published", "outbox", "AFTER INSERT", "the events", "none of these events is ever delivered"),
    Point("mid_tick", "ticks", "BEFORE INSERT", "deliveries, no position", "the next tick delivers them, once"),
    Point("claimed", "claims", "AFTER INSERT", "the claim", "the next claim gets the same range"),
    Point(
        "mid_settle", "settlements", "AFTER INSERT", "settlements, no exceptions", "the claim is open and can settle"
    ),
    Point("mid_progress", "progress", "AFTER INSERT", "progress, exceptions", "the claim is as open as it was"),
    Point("mid_take_over", "workers", "AFTER UPDATE OF state", "the worker is dead", "it lives and holds what it held"),
    Point("mid_redrive", "dead_letters", "AFTER DELETE", "exceptions, no letter", "it is a dead letter as before"),
    Point("mid_replay", "replays", "AFTER UPDATE", "deliveries, how far it is", "the next step appends them, once"),
    Point("paused", "pauses", "AFTER INSERT", "the pause", "the queue is not paused"),
    Point("resumed", "pauses", "AFTER DELETE", "no pause", "the queue is as paused as before"),
    Point("mid_purge", "processed_events", "AFTER DELETE", "no executions", "every execution is remembered"),
)


@dataclass(frozen=True, slots=True)
class Armed:
    """What the point does, for the first ``times`` that it is reached; ``seconds`` of a delay, ``sqlstate`` to fail."""

    deed: Deed
    times: int = 1
    seconds: float = 0.1
    sqlstate: str = "40001"


class Failpoints:
    """Arms the points of one bus, one at a time, on an autocommit connection of its own."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str = "eventbus") -> None:
        self._connection = connection
        self._statements = Statements("failpoints", schema)

    @contextmanager
    def armed(self, point: Point, how: Armed) -> Iterator[None]:
        """Arm a point for the block. Waits for transactions that write to its table, at the beginning and the end."""
        arm = self._statements.text("arm").replace("{moment}", point.moment).replace("{table}", point.table)
        for name in ("deed", "times", "seconds", "sqlstate"):
            arm = arm.replace(f"{{{name}}}", f"'{getattr(how, name)}'")
        self._connection.execute(self._statements["install"])
        try:
            self._connection.execute(arm.encode())
            self._connection.execute(self._statements["close_gate"])
            yield
        finally:
            self._connection.execute(self._statements["open_gate"])
            self._connection.execute(self._statements["drop"])

    def stopped(self) -> list[int]:
        """Process ids of the server's side of who waits at the armed point."""
        return [pid for (pid,) in self._connection.execute(self._statements["stopped"])]

    def release(self) -> None:
        """Let those that wait go on; returns when their transactions have ended."""
        self._connection.execute(self._statements["open_gate"])
        self._connection.execute(self._statements["close_gate"])
