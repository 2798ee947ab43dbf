"""The handlers of a torture run, one for each kind: ``eventbus consume eventbus.testing.torture.handlers:bus``.

``TORTURE_HISTORY`` and ``TORTURE_SEED`` in the environment say where to write, and what to decide. Each call is written
down before it does anything, and again when it is decided what it tells.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from eventbus import DeadLetter, Discard, Event, EventBus, Retry, RetryPolicy
from eventbus.testing.torture.history import Journal
from eventbus.testing.torture.postgres.tables import EFFECT, business
from eventbus.testing.torture.queues import KINDS, MAX_ATTEMPTS, TOPIC, Kind, decided


class Planned(Exception):
    """A handler fails as it should."""


class Calls:
    """Writes down the calls of one handler."""

    def __init__(self, kind: Kind) -> None:
        self._queue = kind.promise.queue
        self._journal = Journal(Path(os.environ["TORTURE_HISTORY"]))
        self._seed = os.environ["TORTURE_SEED"]
        self._numbers = itertools.count(1)

    def start(self, event: Event) -> tuple[str, str, float]:
        """The name of the call, what it is to tell, and the seconds it takes."""
        token, pid = event.payload["token"], os.getpid()
        name = f"{pid}-{self._queue}-{next(self._numbers)}-{time.monotonic_ns()}"
        self._journal.write("start", name=name, pid=pid, queue=self._queue, token=token, key=event.key,
                            event_id=str(event.event_id), attempt=event.attempt)  # fmt: skip
        return name, *decided(self._seed, self._queue, token, event.attempt)

    def end(self, name: str, told: str) -> Any:
        """Write down what the call tells, and tell it."""
        self._journal.write("end", name=name, told=told)
        match told:
            case "raise":
                return Planned()
            case "retry":
                return Retry(after=0.05, reason="planned")
            case "discard":
                return Discard("planned")
            case "dead":
                return DeadLetter("planned")
            case _:
                return None


def handler(kind: Kind) -> Callable[..., Any]:
    """The handler of one queue."""
    calls = Calls(kind)

    async def in_task(event: Event) -> Any:
        name, told, seconds = calls.start(event)
        await asyncio.sleep(seconds)
        return _raised(calls.end(name, told))

    def in_thread(event: Event) -> Any:
        name, told, seconds = calls.start(event)
        time.sleep(seconds)
        return _raised(calls.end(name, told))

    async def in_batch(events: list[Event]) -> list[Any]:
        started = [calls.start(event) for event in events]
        await asyncio.sleep(max(seconds for _, _, seconds in started))
        return [calls.end(name, told) for name, told, _ in started]

    def with_effect(event: Event, conn: psycopg.Connection) -> Any:
        name, told, seconds = calls.start(event)
        time.sleep(seconds)
        schema = sql.Identifier(business(os.environ["EVENTBUS_SCHEMA"]))
        conn.execute(sql.SQL(EFFECT).format(schema), (kind.promise.queue, str(event.event_id), name))
        return _raised(calls.end(name, "done" if told == "discard" else told))

    if kind.promise.effects:
        return with_effect
    shapes: dict[str, Callable[..., Any]] = {"task": in_task, "thread": in_thread, "batch": in_batch}
    return shapes[kind.shape]


def _raised(told: Any) -> Any:
    if isinstance(told, Planned):
        raise told
    return told


def __getattr__(name: str) -> Any:
    """``bus``, made when it is asked for: importing this module needs nothing from the environment."""
    if name != "bus":
        raise AttributeError(name)
    bus = EventBus()
    for kind in KINDS:
        retry = RetryPolicy(max_attempts=MAX_ATTEMPTS, first=0.02, cap=0.2)
        bus.subscribe(TOPIC, name=kind.promise.queue, retry=retry, **kind.options)(handler(kind))
    return bus
