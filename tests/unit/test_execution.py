"""From one call of a handler to its verdict: nothing that a handler does is taken for done unless it is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg
import pydantic
import pytest

from eventbus.consuming.boundary import Results
from eventbus.consuming.execution import Execution, Unfinished
from eventbus.consuming.subscriptions import Subscriptions
from eventbus.event import Event
from eventbus.retry import RetryPolicy
from eventbus.transport import DONE, MISSING, RELEASED, DeadLetter, Delivery, Discard, Done, Lease, Retry, Verdict


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
    assert (await verdict(handler)).outcome == "done"


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


def twin(state: Any) -> Delivery:
    """A delivery of an event of which there is another one in the queue."""
    made = delivery()
    made.twin = state
    return made


@pytest.mark.parametrize("limit", [None, 5.0])
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_an_execution_that_is_completed_or_under_way_elsewhere_is_not_repeated(
    kind: str, limit: float | None
) -> None:
    called: list[Event] = []

    def plain(event: Event) -> None:
        called.append(event)

    async def on_the_loop(event: Event) -> None:
        called.append(event)

    subscriptions = Subscriptions()
    handler: Callable[..., Any] = plain if kind == "plain" else on_the_loop
    subscriptions.subscribe("#", name="tests", idempotent=True, timeout=limit)(handler)
    completed: list[Delivery] = []
    made = Execution(next(iter(subscriptions)), lambda: 0.5, completed=completed.__contains__)

    async def run(given: Delivery) -> Verdict | Unfinished:
        return made.handle_blocking(given) if kind == "plain" else await made.handle(given)

    assert await run(twin("completed")) == DONE
    pending = twin("pending")
    assert await run(pending) == Verdict("deferred", delay=1.0)
    completed.append(pending)
    assert await run(pending) == DONE
    assert called == []
    mine = delivery()
    assert await run(mine) == DONE
    assert called == [mine.event]


async def test_a_queue_that_records_nothing_runs_every_delivery_without_a_look_at_others() -> None:
    called: list[Event] = []
    made = execution(called.append)
    assert made.handle_blocking(twin("completed")) == DONE
    assert len(called) == 1


class Transaction:
    """A boundary that says what it has done."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def run(self, deliveries: Sequence[Delivery], attempt: Callable[[Any], Awaitable[Results]]) -> Results:
        results: Results = [Retry()]
        try:
            results = await attempt(self)
        finally:
            self._end(results)
        return results

    def run_blocking(self, deliveries: Sequence[Delivery], attempt: Callable[[Any], Results]) -> Results:
        results: Results = [Retry()]
        try:
            results = attempt(self)
        finally:
            self._end(results)
        return results

    def _end(self, results: Results) -> None:
        done = all(isinstance(result, Done | Discard) for result in results)
        self.ends.append("commit" if done else "rollback")


async def in_transaction(handler: Callable[..., Any], **options: Any) -> tuple[Verdict, list[str]]:
    subscriptions = Subscriptions()
    subscriptions.subscribe("#", name="tests", transactional=True, **options)(handler)
    boundary = Transaction()
    made = Execution(next(iter(subscriptions)), lambda: 0.5, boundary=boundary)
    if made.subscription.handler.is_async:
        return await made.handle(delivery()), boundary.ends
    came = await asyncio.to_thread(made.handle_blocking, delivery())
    assert isinstance(came, Verdict)
    return came, boundary.ends


@pytest.mark.parametrize(
    ("result", "outcome", "end"),
    [(None, "done", "commit"), (Discard(), "done", "commit"), (Retry(), "retry", "rollback"),
     (DeadLetter(), "dead", "rollback"), (ValueError("no"), "retry", "rollback")],
)  # fmt: skip
async def test_a_transactional_handler_runs_inside_its_transaction(result: Any, outcome: str, end: str) -> None:
    for handler in both(result):
        verdict, ends = await in_transaction(handler)
        assert (verdict.outcome, ends) == (outcome, [end])


async def test_a_transactional_handler_that_takes_too_long_is_rolled_back() -> None:
    async def handle(event: Event) -> None:
        await asyncio.Event().wait()

    verdict, ends = await in_transaction(handle, timeout=0.01)
    assert (verdict.outcome, ends) == ("retry", ["rollback"])


async def test_a_transactional_handler_gets_the_connection_it_asks_for() -> None:
    seen: list[Any] = []

    async def on_the_loop(event: Event, connection: psycopg.AsyncConnection) -> None:
        seen.append(connection)

    def plain(connection: psycopg.Connection, event: Event) -> None:
        seen.append(connection)

    for handler in (on_the_loop, plain):
        assert (await in_transaction(handler))[0] == DONE
    assert [type(connection) for connection in seen] == [Transaction, Transaction]


async def test_work_that_would_outlive_its_transaction_is_refused() -> None:
    def handle(event: Event) -> Any:
        return asyncio.sleep(0)

    verdict, ends = await in_transaction(handle)
    assert (verdict.outcome, ends) == ("retry", ["rollback"])
    assert verdict.error is not None
    assert "make the handler async def" in verdict.error["message"]


async def test_a_stop_commits_nothing_that_it_cut_short() -> None:
    subscriptions = Subscriptions()
    subscriptions.subscribe("#", name="tests", transactional=True)(swallows_its_cancellation)
    boundary = Transaction()
    made = Execution(next(iter(subscriptions)), lambda: 0.5, boundary=boundary)
    running = asyncio.create_task(made.handle(delivery()))
    await asyncio.sleep(0)
    made.aborting = True
    running.cancel()
    assert await running == RELEASED
    assert boundary.ends == ["rollback"]


async def test_a_plain_handler_that_takes_longer_than_its_timeout_has_failed_whatever_it_returns() -> None:
    def handle(event: Event) -> None:
        threading.Event().wait(0.02)

    async def slow() -> None:
        await asyncio.Event().wait()

    def returns_slow_work(event: Event) -> Any:
        return slow()

    for handler in (handle, returns_slow_work):
        found = await verdict(handler, timeout=0.01)
        assert found.error is not None
        assert (found.outcome, found.error["type"]) == ("retry", "TimeoutError")
        assert "took longer than its timeout of 0.01 s" in found.error["message"]
