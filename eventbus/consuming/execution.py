"""The call of one handler with one event, from the delivery to the verdict.

Before it: a runner has a free slot. After it: the consumer gives the verdict to the engine. Whatever a handler
raises, SystemExit and KeyboardInterrupt included, is a failed attempt: it never counts as done and never ends the
worker.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from eventbus.consuming.boundary import Boundary, Postponed, Results
from eventbus.consuming.results import conclude, finished, needs_waiting, outcome_of, refuse_unfinished
from eventbus.consuming.subscriptions import Subscription
from eventbus.consuming.surrounding import Surround
from eventbus.consuming.tenure import Tenure
from eventbus.consuming.verdicts import Verdicts
from eventbus.event import Event
from eventbus.transport import DONE, DUPLICATE, MISSING, RELEASED, Delivery, Outcome, Verdict

DEFERRED = Verdict("deferred", delay=1.0)

STUBBORN: Final = 1.0
"""Seconds that a cancelled handler gets before it counts as one that cannot be stopped."""

Read = Callable[[Any], Results]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a plain handler returned and somebody must wait for on the event loop: a coroutine, a future."""

    result: Any
    spent: float = 0.0
    """Seconds of the timeout that are over."""


@dataclass(slots=True, eq=False)
class ThreadCall:
    """One call with a timeout that is going on in a thread. ``since`` is monotonic."""

    deliveries: Sequence[Delivery]
    thread: str
    since: float
    reported: bool = False


class Execution:
    """How deliveries of one subscription are handled. ``random`` returns numbers from 0 to 1.

    ``completed`` tells, for a delivery whose event another delivery of this queue is executing, whether that has
    completed meanwhile. ``boundary`` surrounds the calls of a transactional handler, and ``surround`` is what plugins
    put around every call.
    """

    def __init__(
        self,
        subscription: Subscription,
        random: Callable[[], float],
        *,
        completed: Callable[[Delivery], bool] = lambda _: False,
        boundary: Boundary | None = None,
        tenure: Tenure | None = None,
        surround: Surround | None = None,
    ) -> None:
        self.subscription = subscription
        self.tenure = tenure or Tenure()
        """No handler starts after it has run out."""
        self.aborting = False
        """A stop ran out of patience: a cancelled handler is released instead of failed."""
        self.boundary = boundary
        self.verdicts = Verdicts(subscription, random)
        self.thread_calls: dict[int, ThreadCall] = {}
        """Calls with a timeout that are going on in threads, by the number of the thread."""
        self.overran: Callable[[asyncio.Task[Any], Sequence[Delivery]], None] = lambda *_: None
        """Told of a task that goes on although its timeout has cancelled it."""
        self._completed = completed
        self._call = subscription.handler.call
        self._timeout = subscription.timeout
        self._surround = surround
        self.handle: Callable[[Delivery], Coroutine[Any, Any, Verdict]] = self._handle
        """Call an async handler and judge what came of it. Never raises."""
        self.handle_blocking: Callable[[Delivery], Verdict | Unfinished] = self._handle_blocking
        """Call a plain handler in this thread; unfinished work that it returned is given back. Never raises."""
        if self._timeout is not None or surround is not None or subscription.tracking == "transactional":
            self.handle, self.handle_blocking = self._handle_guarded, self._handle_blocking_guarded

    async def _handle(self, delivery: Delivery) -> Verdict:
        event = delivery.event
        if event is None:
            return MISSING
        if delivery.twin is not None and (known := self.known(delivery)) is not None:
            return known
        try:
            result = await self._call(event)
            if self.aborting:  # it may have swallowed its cancellation half-way
                return RELEASED
            return DONE if result is None else self.verdicts.of(await conclude(result), event)
        except BaseException as error:  # noqa: BLE001 - see the module's docstring
            return self.failed(error, delivery, event)

    async def _handle_guarded(self, delivery: Delivery) -> Verdict:
        event, known = delivery.event, self.known(delivery)
        if known is not None or event is None:
            return known or MISSING
        try:
            [outcome] = await self.attempt([delivery], (event,), _single)
            return self.verdict(outcome, delivery, event)
        except BaseException as error:  # noqa: BLE001 - see the module's docstring
            return self.failed(error, delivery, event)

    def _handle_blocking(self, delivery: Delivery) -> Verdict | Unfinished:
        event = delivery.event
        if event is None:
            return MISSING
        if delivery.twin is not None and (known := self.known(delivery)) is not None:
            return known
        try:
            result = self._call(event)
            if result is None:
                return DONE
            if needs_waiting(result):
                return Unfinished(result)
            return self.verdicts.of(outcome_of(result), event)
        except BaseException as error:  # noqa: BLE001 - see the module's docstring
            return self.failed(error, delivery, event)

    def _handle_blocking_guarded(self, delivery: Delivery) -> Verdict | Unfinished:
        event, known = delivery.event, self.known(delivery)
        if known is not None or event is None:
            return known or MISSING
        try:
            results = self.attempt_blocking([delivery], (event,), _single)
            return results if isinstance(results, Unfinished) else self.verdict(results[0], delivery, event)
        except BaseException as error:  # noqa: BLE001 - see the module's docstring
            return self.failed(error, delivery, event)

    async def handle_returned(self, delivery: Delivery, unfinished: Unfinished) -> Verdict:
        """Wait for what a plain handler has left unfinished. Never raises."""
        event = delivery.event
        assert event is not None
        try:
            [outcome] = await self.attempt_returned([delivery], unfinished, _single)
            return self.verdict(outcome, delivery, event)
        except BaseException as error:  # noqa: BLE001 - see the module's docstring
            return self.failed(error, delivery, event)

    def known(self, delivery: Delivery) -> Verdict | None:
        """The verdict that stands without calling the handler: another delivery of the event is or was executed."""
        if delivery.event is None:
            return MISSING
        if delivery.twin is None or self.subscription.tracking == "none":
            return None
        return DUPLICATE if delivery.twin == "completed" or self._completed(delivery) else DEFERRED

    def verdict(self, outcome: Outcome | BaseException, delivery: Delivery, event: Event) -> Verdict:
        """What one result of a call means for its event."""
        if isinstance(outcome, BaseException):
            return self.failed(outcome, delivery, event)
        return self.verdicts.of(outcome, event)

    def failed(self, error: BaseException, delivery: Delivery, event: Event) -> Verdict:
        """What an exception means for this event."""
        delivery.error = error
        if self.aborting and issubclass(type(error), asyncio.CancelledError | GeneratorExit):
            return RELEASED
        if type(error) is Postponed:
            return Verdict("deferred", delay=error.delay)
        return self.verdicts.failed(error, event)

    async def attempt(self, deliveries: Sequence[Delivery], arguments: tuple[Any, ...], read: Read) -> Results:
        """Call an async handler once, inside its boundary; raises what it raised."""
        if self.boundary is None:
            return await self._once(deliveries, arguments, read)
        return await self.boundary.run(
            deliveries, lambda connection: self._once(deliveries, self._with(connection, arguments), read)
        )

    def attempt_blocking(
        self, deliveries: Sequence[Delivery], arguments: tuple[Any, ...], read: Read
    ) -> Results | Unfinished:
        """Call a plain handler once, inside its boundary; raises what it raised."""
        if self.boundary is None:
            if self._surround is None:
                return self._read_blocking(deliveries, arguments, read)
            return self._surround.blocking(deliveries, lambda: self._read_blocking(deliveries, arguments, read))

        def attempt(connection: Any) -> Results:
            inner = self._with(connection, arguments)
            if self._surround is None:
                return self._refusing(deliveries, inner, read)
            return self._surround.blocking(deliveries, lambda: self._refusing(deliveries, inner, read))

        return self.boundary.run_blocking(deliveries, attempt)

    def _read_blocking(
        self, deliveries: Sequence[Delivery], arguments: tuple[Any, ...], read: Read
    ) -> Results | Unfinished:
        result, spent = self._once_blocking(deliveries, arguments)
        return Unfinished(result, spent) if needs_waiting(result) else read(result)

    def _refusing(self, deliveries: Sequence[Delivery], arguments: tuple[Any, ...], read: Read) -> Results:
        result, _ = self._once_blocking(deliveries, arguments)
        return read(refuse_unfinished(result))

    async def attempt_returned(self, deliveries: Sequence[Delivery], unfinished: Unfinished, read: Read) -> Results:
        """Wait for what a plain handler returned; raises what that raised."""
        work = functools.partial(finished, unfinished.result)
        if self._surround is None:
            return await self._concluded(deliveries, work, unfinished.spent, read)
        return await self._surround.running(deliveries, self._concluded(deliveries, work, unfinished.spent, read))

    def _with(self, connection: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*arguments, connection) if self.subscription.handler.takes_connection else arguments

    async def _once(self, deliveries: Sequence[Delivery], arguments: tuple[Any, ...], read: Read) -> Results:
        work = lambda: finished(self._call(*arguments))  # noqa: E731
        if self._surround is None:
            return await self._concluded(deliveries, work, 0.0, read)
        return await self._surround.running(deliveries, self._concluded(deliveries, work, 0.0, read))

    async def _concluded(
        self, deliveries: Sequence[Delivery], work: Callable[[], Awaitable[Any]], spent: float, read: Read
    ) -> Results:
        result = await (work() if self._timeout is None else self._in_time(deliveries, work, self._timeout - spent))
        if self.aborting:  # it may have swallowed its cancellation half-way
            raise asyncio.CancelledError
        return read(result)

    async def _in_time(self, deliveries: Sequence[Delivery], work: Callable[[], Awaitable[Any]], left: float) -> Any:
        """A handler that was cut short has failed, also if it swallowed its cancellation and returned."""
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.get_running_loop().call_later(left + STUBBORN, lambda: self.overran(task, deliveries))
        limit = asyncio.timeout(left)
        try:
            async with limit:
                result = await work()
        except TimeoutError as error:
            if limit.expired():
                raise self._late() from error
            raise
        finally:
            watch.cancel()
        if limit.expired():
            raise self._late()
        return result

    def _once_blocking(self, deliveries: Sequence[Delivery], arguments: tuple[Any, ...]) -> tuple[Any, float]:
        """What the handler returned, and the seconds it took if it has a timeout."""
        if self._timeout is None:
            return self._call(*arguments), 0.0
        number = threading.get_ident()
        self.thread_calls[number] = ThreadCall(deliveries, threading.current_thread().name, time.monotonic())
        try:
            result = self._call(*arguments)
        except BaseException as error:
            if self._over(number) >= self._timeout:
                raise self._late() from error
            raise
        spent = self._over(number)
        if spent >= self._timeout:
            raise self._late()
        return result, spent

    def _over(self, thread: int) -> float:
        """The call of this thread is over; the seconds it took."""
        return time.monotonic() - self.thread_calls.pop(thread).since

    def _late(self) -> TimeoutError:
        return TimeoutError(f"the handler took longer than its timeout of {self._timeout:g} s")


def _single(result: Any) -> Results:
    return (outcome_of(result),)
