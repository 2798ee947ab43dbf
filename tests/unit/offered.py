"""Deliveries to offer to a runner, and a collector of what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from eventbus.consuming.execution import Execution
from eventbus.consuming.runners import Runner, runner_for
from eventbus.consuming.subscriptions import Subscriptions
from eventbus.event import Event
from eventbus.retry import RetryPolicy
from eventbus.transport import Delivery, Lease, Verdict
from tests.waiting import wait_until


class Finished:
    """Collects verdicts and tells when there are enough of them."""

    def __init__(self) -> None:
        self.verdicts: list[tuple[int, Verdict]] = []
        self._news = asyncio.Event()

    def __call__(self, delivery: Delivery, verdict: Verdict) -> None:
        self.verdicts.append((delivery.seq, verdict))
        self._news.set()

    @property
    def outcomes(self) -> list[tuple[int, str]]:
        """Sequence numbers with what became of them, in the order of finishing."""
        return [(seq, verdict.outcome) for seq, verdict in self.verdicts]

    async def wait_for(self, count: int) -> None:
        """Wait until so many are finished."""
        async with asyncio.timeout(10):
            while len(self.verdicts) < count:
                self._news.clear()
                await self._news.wait()


def execution(handler: Callable[..., Any], **options: Any) -> Execution:
    """Of a queue with this handler."""
    subscriptions = Subscriptions()
    options.setdefault("retry", RetryPolicy(jitter=False))
    subscriptions.subscribe("#", name="tests", **options)(handler)
    return Execution(next(iter(subscriptions)), lambda: 0.5)


def runner(handler: Callable[..., Any], slots: int, finish: Finished, **options: Any) -> Runner:
    """Slots of the kind that this handler needs."""
    made = execution(handler, **options)
    return runner_for(made.subscription, made, slots, finish, "tests")


def deliveries(count: int) -> list[Delivery]:
    """Deliveries 1, 2, 3 … of one claim."""
    lease = Lease(1, uuid4(), 0.0, claim_id=1, lo=1, hi=count, unfinished=count)
    return [Delivery(event(number), lease, number) for number in range(1, count + 1)]


def event(number: int) -> Event:
    """An event whose payload is its number."""
    return Event(
        event_id=str(uuid4()), topic="a", payload=str(number), headers=None, key=None,
        published_at=datetime.now(UTC), queue="tests",
    )  # fmt: skip


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop and the threads run until something holds."""
    await asyncio.to_thread(wait_until, condition)
