"""The handlers of a torture run: ``eventbus consume tests.torture.handlers``, one for each kind of queue.

``TORTURE_FOLDER`` is where their journals are, ``TORTURE_KINDS`` the names of the queues with commas between. Each
call is written down before it does anything and after it is decided what it tells; what it decides is in ``plan``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg

from eventbus import DeadLetter, Discard, Event, Retry, RetryPolicy, subscribe
from tests.torture.history import Journal
from tests.torture.kinds import EVERYBODY, MAX_ATTEMPTS, Kind, chosen
from tests.torture.plan import SUCCESSES, Step, step

EFFECT = "INSERT INTO torture_effects (queue, event_id, call) VALUES (%s, %s, %s)"


class Planned(Exception):
    """A handler fails as it should."""


class Calls:
    """Writes down the calls of the handlers of this process."""

    def __init__(self) -> None:
        self._journal = Journal(Path(os.environ["TORTURE_FOLDER"]), f"handlers-{os.getpid()}-{time.time_ns()}")
        self._numbers = itertools.count(1)

    def start(self, kind: Kind, event: Event) -> tuple[Step, int]:
        """A handler was called; what it is to do, and the number of the call."""
        token, number = event.payload["token"], next(self._numbers)
        self._journal.write(
            "start", run=number, pid=os.getpid(), queue=kind.queue, token=token, event_id=str(event.event_id),
            key=event.key, attempt=event.attempt, redriven=event.redriven,
        )  # fmt: skip
        return step(kind.queue, token, event.attempt, redriven=event.redriven), number

    def end(self, number: int, told: str) -> None:
        """The handler will now tell this."""
        self._journal.write("end", run=number, pid=os.getpid(), told=told)


calls = Calls()


def in_task(kind: Kind) -> Callable[..., Any]:
    """A handler of single events on the event loop."""

    async def handle(event: Event, conn: psycopg.AsyncConnection | None = None) -> Any:
        plan, number = calls.start(kind, event)
        try:
            await asyncio.sleep(plan.seconds)
            if conn is not None and plan.told != "discard":
                await conn.execute(EFFECT, _effect(kind, event, number))
        except BaseException as problem:
            calls.end(number, _what_broke(problem))
            raise
        calls.end(number, plan.told)
        return tell(plan)

    async def handle_transactional(event: Event, conn: psycopg.AsyncConnection) -> Any:
        return await handle(event, conn)

    async def handle_plain(event: Event) -> Any:
        return await handle(event)

    return handle_transactional if kind.tracking == "transactional" else handle_plain


def in_thread(kind: Kind) -> Callable[..., Any]:
    """A handler of single events in a thread."""

    def handle(event: Event, conn: psycopg.Connection | None = None) -> Any:
        plan, number = calls.start(kind, event)
        try:
            time.sleep(plan.seconds)
            if conn is not None and plan.told != "discard":
                conn.execute(EFFECT, _effect(kind, event, number))
        except BaseException as problem:
            calls.end(number, _what_broke(problem))
            raise
        calls.end(number, plan.told)
        return tell(plan)

    def handle_transactional(event: Event, conn: psycopg.Connection) -> Any:
        return handle(event, conn)

    def handle_plain(event: Event) -> Any:
        return handle(event)

    return handle_transactional if kind.tracking == "transactional" else handle_plain


def in_batches(kind: Kind) -> Callable[..., Any]:
    """A handler of batches. It fails as a whole when one of several events spoils them all, and its transaction fails
    as a whole when one of them is not done: then they run again one by one, in the same attempt.
    """

    async def handle(events: Sequence[Event], conn: psycopg.AsyncConnection | None) -> list[Any]:
        started = [calls.start(kind, event) for event in events]
        try:
            await asyncio.sleep(max(plan.seconds for plan, _ in started))
            for (plan, number), event in zip(started, events, strict=True):
                if conn is not None and plan.told != "discard":
                    await conn.execute(EFFECT, _effect(kind, event, number))
        except BaseException as problem:
            for _, number in started:
                calls.end(number, _what_broke(problem) if len(events) == 1 else "batch")
            raise
        one_for_all = kind.tracking == "transactional"
        spoiled = len(events) > 1 and any(
            plan.spoils_batch or (one_for_all and plan.told not in SUCCESSES) for plan, _ in started
        )
        for plan, number in started:
            calls.end(number, "batch" if spoiled else plan.told)
        if spoiled and not one_for_all:
            raise Planned
        return [Planned() if plan.told == "raise" else tell(plan) for plan, _ in started]

    async def handle_transactional(events: list[Event], conn: psycopg.AsyncConnection) -> list[Any]:
        return await handle(events, conn)

    async def handle_plain(events: list[Event]) -> list[Any]:
        return await handle(events, None)

    return handle_transactional if kind.tracking == "transactional" else handle_plain


def tell(plan: Step) -> Any:
    """Return or raise what the plan says."""
    match plan.told:
        case "raise":
            raise Planned
        case "retry":
            return Retry(after=0.05, reason="planned")
        case "discard":
            return Discard("planned")
        case "dead":
            return DeadLetter("planned")
        case _:
            return None


def _effect(kind: Kind, event: Event, number: int) -> tuple[str, str, str]:
    return kind.queue, str(event.event_id), f"{os.getpid()}-{number}"


def _what_broke(problem: BaseException) -> str:
    return "cut" if isinstance(problem, asyncio.CancelledError | GeneratorExit) else "broken"


def handler(kind: Kind) -> Callable[..., Any]:
    """The handler of one queue."""
    if kind.batch:
        return in_batches(kind)
    return in_task(kind) if kind.is_async else in_thread(kind)


for _kind in chosen(os.environ.get("TORTURE_KINDS", "")):
    subscribe(
        EVERYBODY,
        f"torture.{_kind.queue}",
        name=_kind.queue,
        retry=RetryPolicy(max_attempts=MAX_ATTEMPTS, first=0.02, cap=0.2),
        **_kind.options,
    )(handler(_kind))
