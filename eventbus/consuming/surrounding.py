"""What plugins put around every call of a handler, so that none of it can change what comes of the call.

Before it: ``execution`` is about to call the handler. After it: the handler's result or exception, untouched.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from eventbus.consuming.subscriptions import Subscription
from eventbus.hookspecs import Around, AsyncAround
from eventbus.plugins.registry import Complaints, Plugins
from eventbus.plugins.values import Call, QueueFacts
from eventbus.transport import Delivery

Came = TypeVar("Came")

_AROUND = "eventbus_around_handler"
_ASYNC_AROUND = "eventbus_around_async_handler"


@dataclass(frozen=True, slots=True)
class Surround:
    """The context managers of one queue, the outermost first, each with the name of its plugin."""

    queue: str
    complaints: Complaints
    arounds: Sequence[tuple[str, Around]]
    async_arounds: Sequence[tuple[str, AsyncAround]] = ()

    def blocking(self, deliveries: Sequence[Delivery], attempt: Callable[[], Came]) -> Came:
        """Make a call in this thread. What ``attempt`` returns are the results, or what is to be awaited for them."""
        call = self._call(deliveries)
        entered: list[tuple[str, Any]] = []
        try:
            self._enter(call, entered)
            came = attempt()
        except BaseException as error:
            self.complaints.left(_AROUND, entered, error)
            raise
        if isinstance(came, tuple | list):
            call.outcomes = came
        self.complaints.left(_AROUND, entered, None)
        return came

    async def running(self, deliveries: Sequence[Delivery], attempt: Awaitable[Came]) -> Came:
        """Make a call on the event loop. Wherever it is cancelled, what was entered is left and ``attempt`` closed."""
        call = self._call(deliveries)
        entered: list[tuple[str, Any]] = []
        try:
            self._enter(call, entered)
            came = await (self._inside(call, attempt) if self.async_arounds else attempt)
        except BaseException as error:
            if inspect.iscoroutine(attempt):
                attempt.close()
            self.complaints.left(_AROUND, entered, error)
            raise
        if isinstance(came, tuple | list):
            call.outcomes = came
        self.complaints.left(_AROUND, entered, None)
        return came

    async def _inside(self, call: Call, attempt: Awaitable[Came]) -> Came:
        """The same, for the async context managers."""
        entered: list[tuple[str, Any]] = []
        try:
            await self._enter_async(call, entered)
            came = await attempt
        except BaseException as error:
            await self._leave_async(entered, error)
            raise
        if isinstance(came, tuple | list):
            call.outcomes = came
        await self._leave_async(entered, None)
        return came

    def _call(self, deliveries: Sequence[Delivery]) -> Call:
        return Call(self.queue, [delivery.event for delivery in deliveries if delivery.event is not None])

    def _enter(self, call: Call, entered: list[tuple[str, Any]]) -> None:
        for plugin, around in self.arounds:
            try:
                manager = around(call)
                manager.__enter__()
                entered.append((plugin, manager))
            except BaseException as error:
                if self.complaints.goes_on(plugin, _AROUND, error):
                    raise

    async def _enter_async(self, call: Call, entered: list[tuple[str, Any]]) -> None:
        for plugin, around in self.async_arounds:
            try:
                manager = around(call)
                await manager.__aenter__()
                entered.append((plugin, manager))
            except BaseException as error:
                if self.complaints.goes_on(plugin, _ASYNC_AROUND, error):
                    raise

    async def _leave_async(self, entered: Sequence[tuple[str, Any]], error: BaseException | None) -> None:
        cut: BaseException | None = None
        for plugin, manager in reversed(entered):
            try:
                await manager.__aexit__(None if error is None else type(error), error, error and error.__traceback__)
            except BaseException as problem:  # noqa: BLE001 - raised when all are left
                if problem is not error and self.complaints.goes_on(plugin, _ASYNC_AROUND, problem):
                    cut = error = problem
        if cut is not None:
            raise cut


def surround_of(plugins: Plugins, facts: QueueFacts) -> Surround | None:
    """What the plugins put around the calls of one queue; None: nothing. Raises what makes a start fail."""
    arounds = [(plugin.name, around) for plugin, around in plugins.ask(_AROUND, facts.name, queue=facts)]
    async_arounds = []
    if facts.is_async:
        found = plugins.ask(_ASYNC_AROUND, facts.name, queue=facts)
        async_arounds = [(plugin.name, around) for plugin, around in found]
    if not arounds and not async_arounds:
        return None
    return Surround(facts.name, plugins.complaints, arounds, async_arounds)


def facts_of(subscription: Subscription, concurrency: int) -> QueueFacts:
    """A subscription as plugins see it. ``concurrency``: the setting, for those that do not say their own."""
    definition = subscription.handler.definition
    return QueueFacts(
        name=subscription.name,
        patterns=subscription.patterns,
        handler=f"{definition.module}.{definition.qualname}",
        is_async=subscription.handler.is_async,
        idempotent=subscription.idempotent,
        transactional=subscription.transactional,
        ordered=subscription.ordered,
        batch=subscription.batch,
        concurrency=subscription.concurrency or concurrency,
        timeout=subscription.timeout,
        max_attempts=subscription.retry.max_attempts,
        discard_on=subscription.discard_on,
    )
