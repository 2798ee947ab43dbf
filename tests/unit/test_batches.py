"""Handlers of batches: what a user would lose if one bad event failed its neighbours, or a batch were lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from eventbus.consuming.batches import Batches, Verdicts
from eventbus.consuming.boundary import Results
from eventbus.consuming.execution import Execution, Unfinished
from eventbus.errors import PayloadMismatch
from eventbus.event import Event
from eventbus.retry import RetryPolicy
from eventbus.transport import DONE, MISSING, RELEASED, DeadLetter, Delivery, Discard, Done, Retry
from tests.unit.offered import deliveries, execution


class Order(BaseModel):
    number: int


def orders(*payloads: str) -> list[Delivery]:
    made = deliveries(len(payloads))
    for delivery, payload in zip(made, payloads, strict=True):
        assert delivery.event is not None
        delivery.event._payload_text = payload
    return made


async def verdicts(handler: Callable[..., Any], given: Sequence[Delivery], **options: Any) -> Verdicts:
    """What comes of one call, on the event loop or in a thread."""
    options.setdefault("batch", 100)
    return await called(execution(handler, **options), given)


async def called(made: Execution, given: Sequence[Delivery]) -> Verdicts:
    batches = Batches(made)
    if made.subscription.handler.is_async:
        return await batches.handle(given)
    came = await asyncio.to_thread(batches.handle_blocking, given)
    return await batches.handle_returned(came) if isinstance(came, Unfinished) else came


def both(result: Any) -> list[Callable[[list[Event]], Any]]:
    """A plain and an async handler that return ``result``, or raise it."""

    def plain(events: list[Event]) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    async def on_the_loop(events: list[Event]) -> Any:
        return plain(events)

    def later(events: list[Event]) -> Any:
        return on_the_loop(events)

    return [plain, on_the_loop, later]


def outcomes(found: Verdicts) -> list[str]:
    return ["again" if verdict is None else verdict.outcome for verdict in found]


@pytest.mark.parametrize("handler", both(None) + both([None] * 3) + both((1, False, "x")) + both(17))
async def test_a_batch_whose_handler_returns_is_done(handler: Callable[..., Any]) -> None:
    assert await verdicts(handler, deliveries(3)) == [DONE] * 3


@pytest.mark.parametrize(
    "handler", both([None, Retry(after=7), Discard("test"), DeadLetter("never"), KeyError("no"), Done, Retry])
)
async def test_each_event_of_a_batch_can_come_to_something_else(handler: Callable[..., Any]) -> None:
    found = await verdicts(handler, deliveries(7))
    assert outcomes(found) == ["done", "retry", "done", "dead", "retry", "done", "retry"]
    assert found[1] is not None
    assert found[1].delay == 7
    assert found[3] is not None
    assert found[3].reason == "never"
    assert found[4] is not None
    assert found[4].error is not None
    assert found[4].error["type"] == "KeyError"


async def test_rules_for_exceptions_hold_for_the_events_of_a_batch_too() -> None:
    for handler in both([KeyError(), ValueError(), OSError()]):
        found = await verdicts(handler, deliveries(3), discard_on=KeyError, retry_on=OSError)
        assert outcomes(found) == ["done", "dead", "retry"]


@pytest.mark.parametrize("result", [[None], [None] * 4, []])
async def test_results_that_cannot_be_told_apart_are_a_failure_of_all(result: list[None]) -> None:
    for handler in both(result):
        found = await verdicts(handler, deliveries(3))
        assert outcomes(found) == ["retry"] * 3
        assert found[0] is not None
        assert found[0].error is not None
        assert found[0].error["message"] == f"the handler returned {len(result)} results for 3 events"


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(1), asyncio.CancelledError(), PayloadMismatch("x")])
async def test_after_a_failure_of_the_whole_every_event_runs_again_by_itself_and_the_log_says_so_once(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    for handler in both(error):
        caplog.clear()
        assert await verdicts(handler, deliveries(3)) == [None] * 3
        [record] = caplog.records
        assert record.levelname == "WARNING"
        assert f"batch of 3 events, which now run one by one: <Event a {record.__dict__['event_id']}" in record.message


async def test_a_batch_of_one_that_fails_has_failed() -> None:
    for handler in both(ValueError("bad")):
        assert outcomes(await verdicts(handler, deliveries(1))) == ["retry"]


async def test_a_payload_that_does_not_fit_is_a_dead_letter_and_the_others_are_handled() -> None:
    seen: list[int] = []

    def handle(given: list[Order]) -> list[Discard | None]:
        seen.extend(order.number for order in given)
        return [None, Discard("three")]

    found = await verdicts(handle, orders('{"number": 1}', '{"number": "two"}', '{"number": 3}'))
    assert outcomes(found) == ["done", "dead", "done"]
    assert found[1] is not None
    assert found[1].reason == "payload mismatch"
    assert seen == [1, 3]


async def test_a_batch_without_one_payload_that_fits_calls_nothing() -> None:
    def handle(given: list[Order]) -> None:
        raise AssertionError("called")

    assert outcomes(await verdicts(handle, orders("{}", "[]"))) == ["dead", "dead"]


async def test_events_that_are_gone_and_those_of_a_lost_lease_are_left_out() -> None:
    seen: list[int] = []

    async def handle(events: list[Event]) -> None:
        seen.extend(event.payload for event in events)

    given = deliveries(4)
    given[1].event = None
    [lost] = deliveries(1)
    lost.lease.dropped = True
    assert await verdicts(handle, [*given, lost]) == [DONE, MISSING, DONE, DONE, RELEASED]
    assert seen == [1, 3, 4]
    assert (given[0].lease.started, lost.lease.started) == (4, 0)


async def test_each_parameter_of_a_handler_of_batches_gets_its_list() -> None:
    seen: list[Any] = []

    def everything(orders: Sequence[Order], *, events: list[Event]) -> None:
        seen.append(([order.number for order in orders], [event.payload["number"] for event in events]))

    async def unannotated(events: Any = None, *, payloads: list[dict[str, int]]) -> None:
        seen.append(payloads)

    def bare(events):  # type: ignore[no-untyped-def]
        seen.append([event.payload for event in events])

    for handler in (everything, unannotated, bare):
        assert await verdicts(handler, orders('{"number": 1}', '{"number": 2}')) == [DONE, DONE]
    numbers = [{"number": 1}, {"number": 2}]
    assert seen == [([1, 2], [1, 2]), numbers, numbers]


async def test_a_batch_that_takes_too_long_runs_again_one_by_one_and_a_single_event_has_failed() -> None:
    async def on_the_loop(events: list[Event]) -> None:
        await asyncio.Event().wait()

    def in_a_thread(events: list[Event]) -> None:
        threading.Event().wait(0.05)

    def later(events: list[Event]) -> Any:
        return on_the_loop(events)

    for handler in (on_the_loop, in_a_thread, later):
        assert await verdicts(handler, deliveries(2), timeout=0.01) == [None, None]
        [found] = await verdicts(handler, deliveries(1), timeout=0.01)
        assert found is not None
        assert found.error is not None
        assert found.error["type"] == "TimeoutError"


async def test_a_batch_that_a_stop_cuts_short_is_released() -> None:
    async def handle(events: list[Event]) -> None:
        await asyncio.Event().wait()

    made = execution(handle, batch=10)
    running = asyncio.create_task(Batches(made).handle(deliveries(3)))
    await asyncio.sleep(0)
    made.aborting = True
    running.cancel()
    assert await running == [RELEASED] * 3


class Transaction:
    """A boundary that says what it has done."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def run(self, deliveries: Sequence[Delivery], attempt: Callable[[Any], Awaitable[Results]]) -> Results:
        try:
            return self._end(await attempt(self))
        except BaseException:
            self.ends.append("rollback")
            raise

    def run_blocking(self, deliveries: Sequence[Delivery], attempt: Callable[[Any], Results]) -> Results:
        try:
            return self._end(attempt(self))
        except BaseException:
            self.ends.append("rollback")
            raise

    def _end(self, results: Results) -> Results:
        done = all(isinstance(result, Done | Discard) for result in results)
        self.ends.append("commit" if done else "rollback")
        return results


async def in_transaction(handler: Callable[..., Any], count: int) -> tuple[list[str], list[str]]:
    """The outcomes, and how the transaction ended."""
    made = execution(handler, batch=10, transactional=True)
    made.boundary = boundary = Transaction()
    return outcomes(await called(made, deliveries(count))), boundary.ends


async def test_a_transaction_that_one_event_of_a_batch_spoils_is_tried_again_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for handler in both([None, Discard("test")])[:2]:
        assert await in_transaction(handler, 2) == (["done", "done"], ["commit"])
    for handler in both([None, Retry(after=1)])[:2]:
        assert await in_transaction(handler, 2) == (["again", "again"], ["rollback"])
    for handler in both([Retry(after=1)])[:2]:
        assert await in_transaction(handler, 1) == (["retry"], ["rollback"])
    for handler in both(ValueError("bad"))[:2]:
        assert await in_transaction(handler, 2) == (["again", "again"], ["rollback"])
    assert any("its transaction was rolled back: Retry(after=1" in record.message for record in caplog.records)


async def test_attempts_of_events_that_run_again_by_themselves_are_not_counted_twice() -> None:
    for handler in both(ValueError("bad")):
        given = deliveries(2)
        await verdicts(handler, given, retry=RetryPolicy(max_attempts=1))
        found = [await verdicts(handler, [each], retry=RetryPolicy(max_attempts=2)) for each in given]
        assert [outcomes(each) for each in found] == [["retry"], ["retry"]]
