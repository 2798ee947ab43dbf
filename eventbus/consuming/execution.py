"""The call of one handler with one event, from the delivery to the verdict.

Before it: a runner has a free slot. After it: the consumer gives the verdict to the engine. Whatever a handler
raises, SystemExit and KeyboardInterrupt included, is a failed attempt: it never counts as done and never ends the
worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

from eventbus.consuming.results import Failure, conclude, failure, needs_waiting, outcome_of
from eventbus.consuming.subscriptions import Subscription
from eventbus.errors import PayloadMismatch
from eventbus.event import Event
from eventbus.transport import (
    DONE,
    RELEASED,
    DeadLetter,
    Delivery,
    Discard,
    Done,
    Outcome,
    Released,
    Retry,
    Verdict,
)

log = logging.getLogger("eventbus")

MISSING = Verdict("dead", reason="event missing: the outbox no longer has it")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a plain handler returned and somebody must wait for on the event loop: a coroutine, a future."""

    result: Any


class Execution:
    """How deliveries of one subscription are handled. ``random`` returns numbers from 0 to 1."""

    def __init__(self, subscription: Subscription, random: Callable[[], float]) -> None:
        self.subscription = subscription
        self.aborting = False
        """A stop ran out of patience: a cancelled handler is released instead of failed."""
        self._call = subscription.handler.call
        self._timeout = subscription.timeout
        self._random = random

    async def handle(self, delivery: Delivery) -> Verdict:
        """Call an async handler and judge what came of it. Never raises."""
        event = delivery.event
        if event is None:
            return MISSING
        try:
            if self._timeout is not None:
                return await self._handle_in_time(event, self._timeout)
            result = await self._call(event)
            if self.aborting:  # it may have swallowed its cancellation half-way
                return RELEASED
            return DONE if result is None else self._judge(await conclude(result), event)
        except BaseException as error:  # noqa: BLE001 - see the module's docstring
            return self._failed(error, event)

    async def _handle_in_time(self, event: Event, seconds: float) -> Verdict:
        """A handler that was cut short has failed, also if it swallowed its cancellation and returned."""
        async with asyncio.timeout(seconds) as limit:
            outcome = await conclude(self._call(event))
        if limit.expired():
            raise TimeoutError(f"the handler was cut short after {seconds:g} s")
        return RELEASED if self.aborting else self._judge(outcome, event)

    def handle_blocking(self, delivery: Delivery) -> Verdict | Unfinished:
        """Call a plain handler in this thread; unfinished work that it returned is given back. Never raises."""
        event = delivery.event
        if event is None:
            return MISSING
        try:
            result = self._call(event)
            if result is None:
                return DONE
            if needs_waiting(result):
                return Unfinished(result)
            return self._judge(outcome_of(result), event)
        except BaseException as error:  # noqa: BLE001 - see the module's docstring
            return self._failed(error, event)

    async def handle_returned(self, delivery: Delivery, unfinished: Unfinished) -> Verdict:
        """Wait for what a plain handler has left unfinished. Never raises."""
        event = delivery.event
        assert event is not None
        try:
            outcome = await conclude(unfinished.result)
            return RELEASED if self.aborting else self._judge(outcome, event)
        except BaseException as error:  # noqa: BLE001 - see the module's docstring
            return self._failed(error, event)

    def _judge(self, outcome: Outcome, event: Event) -> Verdict:
        match outcome:
            case Done():
                return DONE
            case Discard(reason):
                _say(logging.INFO, "discarded %s: %s", event, reason, about=event)
                return DONE
            case DeadLetter(reason):
                return self._dead(event, reason or "the handler gave up", None)
            case Retry(after, reason):
                return self._retry(event, after, None if reason is None else Failure("Retry", reason, ""))
            case Released():
                return RELEASED
            case _:
                assert_never(outcome)

    def _failed(self, error: BaseException, event: Event) -> Verdict:
        if self.aborting and isinstance(error, asyncio.CancelledError | GeneratorExit):
            return RELEASED
        if isinstance(error, PayloadMismatch):
            return self._dead(event, "payload mismatch", failure(error))
        return self._retry(event, None, failure(error))

    def _retry(self, event: Event, after: float | None, problem: Failure | None) -> Verdict:
        policy = self.subscription.retry
        if policy.exhausted(event.attempt):
            attempts = "1 attempt" if event.attempt == 1 else f"{event.attempt} attempts"
            return self._dead(event, f"gave up after {attempts}", problem)
        delay = policy.delay(event.attempt, self._random) if after is None else after
        _say(
            logging.WARNING, "attempt %d of %d failed, again in %.1f s: %s: %s",
            event.attempt, policy.max_attempts, delay, event, _brief(problem), about=event,
        )  # fmt: skip
        return Verdict("retry", delay=delay, error=_stored(problem))

    def _dead(self, event: Event, reason: str, problem: Failure | None) -> Verdict:
        _say(logging.ERROR, "dead letter (%s): %s: %s", reason, event, _brief(problem), about=event)
        return Verdict("dead", reason=reason, error=_stored(problem))


def _say(level: int, message: str, *values: object, about: Event) -> None:
    """Log, whatever the program's filters and handlers of logging raise: a verdict does not depend on them."""
    with contextlib.suppress(Exception):
        log.log(level, message, *values, extra=_about(about))


def _about(event: Event) -> dict[str, Any]:
    return {
        "queue": event.queue, "topic": event.topic, "event_id": str(event.event_id), "attempt": event.attempt,
    }  # fmt: skip


def _brief(problem: Failure | None) -> str:
    return "no error" if problem is None else f"{problem.type}: {problem.message}"[:500]


def _stored(problem: Failure | None) -> dict[str, str] | None:
    if problem is None:
        return None
    return {"type": problem.type, "message": problem.message, "traceback": problem.traceback}
