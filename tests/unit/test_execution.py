"""From one call of a handler to its verdict: nothing that a handler does is taken for done unless it is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pydantic
import pytest

from eventbus.consuming.execution import MISSING, Execution, Unfinished
from eventbus.consuming.subscriptions import Subscriptions
from eventbus.event import Event
from eventbus.retry import RetryPolicy
from eventbus.transport import DONE, RELEASED, DeadLetter, Delivery, Discard, Lease, Retry, Verdict


class Order(pydantic.BaseModel):
    """What a typed handler asks for."""

    number: int


def execution(handler: Callable[..., Any], *, timeout: float | None = None, jitter: bool = False) -> Execution:
    """Of a queue with this handler."""
    subscriptions = Subscriptions()
    policy = RetryPolicy(max_attempts=3, first=2.0, factor=10.0, jitter=jitter)
    subscriptions.subscribe("#", name="tests", retry=policy, timeout=timeout)(handler)
    [subscription] = subscriptions
    return Execution(subscription, lambda: 0.5)


def delivery(payload: str = "{}", *, attempt: int = 1) -> Delivery:
    """One event on its way to a handler."""
    event = Event(
        event_id=str(uuid4()), topic="orders.created", payload=payload, headers=None, key=None,
        published_at=datetime.now(UTC), queue="tests", attempt=attempt,
    )  # fmt: skip
    return Delivery(event, Lease(1, uuid4(), 0.0), 1)


async def verdict(handler: Callable[..., Any], given: Delivery | None = None, **options: Any) -> Verdict:
    """What comes of one call, on the event loop or in a thread."""
    given = given or delivery()
    made = execution(handler, **options)
    if inspect.iscoroutinefunction(handler):
        return await made.handle(given)
    result = await asyncio.to_thread(made.handle_blocking, given)
    return await made.handle_returned(given, result) if isinstance(result, Unfinished) else result


def both(result: Any) -> list[Callable[[Event], Any]]:
    """A plain and an async handler that return ``result``, or raise it."""

    def plain(event: Event) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    async def on_the_loop(event: Event) -> Any:
        return plain(event)

    return [plain, on_the_loop]


@pytest.mark.parametrize("handler", both(None) + both(False) + both({"any": "value"}) + both(Discard("a test")))
async def test_a_handler_that_returns_is_done(handler: Callable[..., Any]) -> None:
    assert await verdict(handler) == DONE


@pytest.mark.parametrize("handler", both(DeadLetter("no such customer")))
async def test_a_handler_can_give_up_at_its_first_attempt(handler: Callable[..., Any]) -> None:
    assert await verdict(handler) == Verdict("dead", reason="no such customer")


@pytest.mark.parametrize("handler", both(Retry(after=7.5, reason="busy")))
async def test_a_handler_decides_when_it_is_tried_again(handler: Callable[..., Any]) -> None:
    found = await verdict(handler)
    assert (found.outcome, found.delay) == ("retry", 7.5)
    assert found.error is not None
    assert found.error["message"] == "busy"


@pytest.mark.parametrize(("attempt", "wait"), [(1, 2.0), (2, 20.0)])
@pytest.mark.parametrize("handler", both(ValueError("no")) + both(Retry()))
async def test_without_a_wish_the_policy_decides_when(handler: Callable[..., Any], attempt: int, wait: float) -> None:
    found = await verdict(handler, delivery(attempt=attempt))
    assert (found.outcome, found.delay) == ("retry", wait)


async def test_waits_are_spread_by_the_random_numbers_that_were_passed_in() -> None:
    found = await verdict(both(ValueError())[0], jitter=True)
    assert found.delay == pytest.approx(2.0)


@pytest.mark.parametrize("handler", both(ValueError("no")) + both(Retry(after=0)))
async def test_the_last_attempt_ends_in_a_dead_letter_and_not_in_one_more_retry(handler: Callable[..., Any]) -> None:
    found = await verdict(handler, delivery(attempt=3))
    assert (found.outcome, found.reason) == ("dead", "gave up after 3 attempts")


FATAL = [
    SystemExit(0), SystemExit(1), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), TimeoutError(),
    BaseException("odd"), StopIteration(), concurrent.futures.CancelledError(),
]  # fmt: skip


@pytest.mark.parametrize("error", FATAL, ids=lambda error: type(error).__name__)
async def test_whatever_is_raised_is_a_failed_attempt_and_never_done(error: BaseException) -> None:
    for handler in both(error):
        assert (await verdict(handler)).outcome == "retry"


async def test_a_failure_keeps_type_message_and_traceback() -> None:
    def handle(event: Event) -> None:
        raise LookupError("no row")

    found = await verdict(handle)
    assert found.error is not None
    assert (found.error["type"], found.error["message"]) == ("LookupError", "no row")
    assert "test_execution.py" in found.error["traceback"]


async def test_a_payload_that_does_not_fit_is_not_tried_again() -> None:
    called = []

    async def handle(order: Order) -> None:
        called.append(order)

    def handle_in_thread(order: Order) -> None:
        called.append(order)

    for handler in (handle, handle_in_thread):
        found = await verdict(handler, delivery('{"number": "seven"}'))
        assert (found.outcome, found.reason) == ("dead", "payload mismatch")
        assert found.error is not None
        assert "number" in found.error["message"]
    assert not called


async def test_an_event_that_the_outbox_lost_is_dead_with_the_reason_and_no_handler_is_called() -> None:
    missing = Delivery(None, Lease(1, uuid4(), 0.0), 1)
    for handler in both(None):
        assert await verdict(handler, missing) == MISSING


async def test_a_cancelled_handler_is_released_in_a_stop_and_failed_otherwise() -> None:
    async def handle(event: Event) -> None:
        raise asyncio.CancelledError

    made = execution(handle)
    assert (await made.handle(delivery())).outcome == "retry"
    made.aborting = True
    assert await made.handle(delivery()) == RELEASED


async def test_a_handler_that_fails_by_itself_during_a_stop_has_failed() -> None:
    made = execution(both(ValueError("no"))[1])
    made.aborting = True
    assert (await made.handle(delivery())).outcome == "retry"


async def test_a_handler_that_takes_longer_than_its_timeout_has_failed() -> None:
    async def handle(event: Event) -> None:
        await asyncio.Event().wait()

    found = await verdict(handle, timeout=0.01)
    assert found.outcome == "retry"
    assert found.error is not None
    assert found.error["type"] == "TimeoutError"


async def test_the_timeout_covers_what_the_handler_has_returned_to_be_awaited() -> None:
    async def handle(event: Event) -> Any:
        return asyncio.Event().wait()

    assert (await verdict(handle, timeout=0.01)).outcome == "retry"


async def test_what_a_plain_handler_returns_is_waited_for_before_it_is_done() -> None:
    finished = []

    async def work() -> Retry:
        await asyncio.sleep(0)
        finished.append("coroutine")
        return Retry(after=1)

    def returns_a_coroutine(event: Event) -> Any:
        return work()

    assert (await verdict(returns_a_coroutine)).outcome == "retry"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def returns_a_future(event: Event) -> Any:
            return pool.submit(finished.append, "future")

        assert await verdict(returns_a_future) == DONE
    assert finished == ["coroutine", "future"]


async def test_a_coroutine_of_a_plain_handler_that_fails_is_a_failed_attempt() -> None:
    async def work() -> None:
        raise SystemExit(0)

    def handle(event: Event) -> Any:
        return work()

    assert (await verdict(handle)).outcome == "retry"


async def test_failures_and_dead_letters_are_logged_with_what_is_needed_to_find_the_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "eventbus"):
        given = delivery()
        assert given.event is not None
        await verdict(both(ValueError("no"))[0], given)
        await verdict(both(DeadLetter("never"))[0])
        await verdict(both(Discard("a test"))[0])
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "INFO"]
    first = caplog.records[0]
    assert (first.__dict__["queue"], first.__dict__["attempt"]) == ("tests", 1)
    assert first.__dict__["event_id"] == str(given.event.event_id)
    assert "ValueError: no" in first.message


async def swallows_its_cancellation(event: Event) -> None:
    """What many handlers do by accident."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return


async def test_a_handler_that_swallows_its_timeout_has_failed_and_is_not_taken_for_done() -> None:
    found = await verdict(swallows_its_cancellation, timeout=0.01)
    assert found.outcome == "retry"
    assert found.error is not None
    assert found.error["type"] == "TimeoutError"


async def test_a_handler_that_a_stop_cut_short_is_released_even_if_it_swallowed_that() -> None:
    made = execution(swallows_its_cancellation)
    running = asyncio.create_task(made.handle(delivery()))
    await asyncio.sleep(0)
    made.aborting = True
    running.cancel()
    assert await running == RELEASED


class Broken(logging.Filter):
    """A filter of the user's that fails."""

    def filter(self, record: logging.LogRecord) -> bool:
        raise RuntimeError("a broken filter")


@pytest.mark.parametrize("handler", both(ValueError("no")) + both(Discard("no")) + both(DeadLetter("no")))
async def test_logging_that_fails_costs_no_verdict(handler: Callable[..., Any]) -> None:
    logger, broken = logging.getLogger("eventbus"), Broken()
    level = logger.level
    logger.addFilter(broken)
    logger.setLevel(logging.DEBUG)
    try:
        assert (await verdict(handler)).outcome in ("retry", "done", "dead")
    finally:
        logger.removeFilter(broken)
        logger.setLevel(level)
