"""A consumer on a scripted engine, and a handler that waits for the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from eventbus.consuming.consumer import Consumer, Limits
from eventbus.consuming.execution import Execution
from eventbus.consuming.idempotency import Completions, execution_of
from eventbus.consuming.pace import Pace
from eventbus.consuming.queues import QueueState
from eventbus.consuming.reporting import QueueReporter, Reporter
from eventbus.consuming.runners import TaskRunner
from eventbus.consuming.subscriptions import Subscriptions
from eventbus.event import Event
from eventbus.retry import RetryPolicy
from eventbus.transport import Delivery
from tests.unit.scripted_engine import ScriptedEngine

Handler = Callable[[Event], Any]
QUEUE, OTHER = 1, 2


async def fine(event: Event) -> None:
    """A handler that has nothing to do."""


class Gate:
    """A handler that waits for its event's payload to be let through."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self._open: dict[str, asyncio.Event] = {}

    async def wait(self, event: Event) -> None:
        """Handle an event."""
        self.started.append(event.payload)
        try:
            await self._of(event.payload).wait()
        except asyncio.CancelledError:
            self.cancelled.append(event.payload)
            raise
        self.ended.append(event.payload)

    def open(self, *payloads: str) -> None:
        """Let these through."""
        for payload in payloads:
            self._of(payload).set()

    def _of(self, payload: str) -> asyncio.Event:
        return self._open.setdefault(payload, asyncio.Event())


class Line:
    """A consumer with its two loops."""

    def __init__(self, engine: ScriptedEngine, limits: Limits) -> None:
        self.engine = engine
        self.consumer = Consumer(engine, limits)
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, queue_id: int, handler: Handler, slots: int = 4, **options: Any) -> QueueState:
        """Consume a queue; the options are those of a subscription."""
        subscriptions = Subscriptions()
        policy = RetryPolicy(max_attempts=2, first=0.05, jitter=False)
        subscriptions.subscribe("#", name=f"queue-{queue_id}", retry=policy, **options)(handler)
        [subscription] = subscriptions
        completions = None if subscription.tracking == "none" else Completions()

        def completed(delivery: Delivery) -> bool:
            assert delivery.event is not None
            return completions is not None and completions.has(execution_of(delivery.event), time.monotonic())

        execution = Execution(subscription, lambda: 0.5, completed=completed)
        state: QueueState
        runner = TaskRunner(execution, slots, lambda delivery, verdict: self.consumer.finish(delivery, verdict, state))
        state = QueueState(
            subscription.name, runner, Pace(slots, 1_000, time.monotonic()),
            QueueReporter(Reporter(), subscription.name), completions=completions,
            skips=subscription.when_exhausted == "skip",
        )  # fmt: skip
        if subscription.ordered:
            self.engine.ordered.add(queue_id)
        self.consumer.add(queue_id, state)
        return state

    def start(self) -> None:
        """Fetch and settle from now on."""
        self.consumer.poll_every(600)
        self.tasks = [asyncio.create_task(self.consumer.fetch()), asyncio.create_task(self.consumer.settle())]

    async def stop(self, seconds: float = 5.0) -> None:
        """Stop as a worker does, and fail with what a loop has failed with."""
        await self.consumer.drain(seconds)
        async with asyncio.timeout(5):
            await asyncio.gather(*self.tasks)

    async def still(self) -> None:
        """Wait until the loops have nothing to do but to wait for news."""
        calls = -1
        while calls != len(self.engine.order):
            calls = len(self.engine.order)
            for _ in range(20):
                await asyncio.sleep(0)


@asynccontextmanager
async def line(
    handler: Handler = fine,
    *,
    slots: int = 4,
    prefetch_bytes: int = 1_000_000,
    interval: float = 0.0,
    **options: Any,
) -> AsyncIterator[Line]:
    """A consumer of one queue that runs within the block and is stopped afterwards."""
    made = Line(ScriptedEngine(), Limits(batch=100, prefetch_bytes=prefetch_bytes, settle_interval=interval))
    made.add(QUEUE, handler, slots, **options)
    try:
        yield made
        if made.tasks:
            await made.stop()
    finally:
        for queue in made.consumer.queues.values():
            queue.runner.withdraw()
            queue.runner.abort()
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
