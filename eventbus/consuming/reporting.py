"""Tells plugins and receivers of signals what happens to deliveries, and asks plugins what they may decide.

Before it: the consumer, the fetcher and the settler know that something happened. After it: hooks of plugins, signals.
Nothing here raises, and what nobody wants to know is not collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from eventbus import signals
from eventbus.consuming.holdings import chain
from eventbus.consuming.outcomes import Group, Part, outcome_name
from eventbus.consuming.watching import observe, sample
from eventbus.errors import passes
from eventbus.event import Event
from eventbus.plugins.registry import Plugins
from eventbus.plugins.values import Failure, Postpone
from eventbus.transport import Delivery, Verdict

log = logging.getLogger("eventbus")

_LONGEST_POSTPONEMENT: Final = 7 * 86_400.0
_MOST_WAITING: Final = 10_000
"""Calls of async receivers that may wait; more are dropped."""


class AsyncReceivers:
    """Awaits the async receivers of signals one after the other, so that none of them holds up what it is told of."""

    def __init__(self) -> None:
        self._calls: asyncio.Queue[tuple[Callable[..., Any], Any, Mapping[str, Any]]] = asyncio.Queue(_MOST_WAITING)
        self._dropped = 0

    def put(self, receiver: Callable[..., Any], sender: Any, what: Mapping[str, Any]) -> None:
        """Await ``receiver(sender, **what)`` later."""
        try:
            self._calls.put_nowait((receiver, sender, what))
        except asyncio.QueueFull:
            if not self._dropped:
                log.error(  # noqa: TRY400 - nothing failed
                    "async receivers of signals are too slow: what they are told of is dropped until they catch up"
                )
            self._dropped += 1

    async def run(self) -> None:
        """Await them until cancelled."""
        while True:
            receiver, sender, what = await self._calls.get()
            try:
                await receiver(sender, **what)
            except BaseException as error:
                if passes(error):
                    raise
                log.exception("the receiver %s of a signal failed; ignored", receiver)
            finally:
                self._calls.task_done()
            if self._dropped and self._calls.empty():
                log.warning("async receivers have caught up; %d calls were dropped", self._dropped)
                self._dropped = 0

    async def finish(self, seconds: float) -> None:
        """Wait until all were awaited, that long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._calls.join()


class Reporter:
    """What is the same for all queues of a worker. ``sender``: the bus, for signals."""

    def __init__(self, plugins: Plugins | None = None, sender: Any = None) -> None:
        self.plugins = plugins or Plugins()
        self.receivers = AsyncReceivers()
        self._sender = sender
        self._relayed = self.plugins.of("eventbus_relayed")

    def send(self, signal: signals.Signal, **what: Any) -> None:
        """Announce something."""
        if signal.receivers:
            signals.send(signal, self._sender, self.receivers.put, **what)

    def tell(self, hook: str, **given: Any) -> None:
        """Call a hook that is called rarely."""
        self.plugins.tell(self.plugins.of(hook), **given)

    @property
    def wants_relayed(self) -> bool:
        """Whether anybody wants to know what the relay does."""
        return bool(self._relayed or signals.relayed.receivers)

    def relayed(self, deliveries: Mapping[str, int]) -> None:
        """Events were moved into queues."""
        self.plugins.tell(self._relayed, deliveries=deliveries)
        self.send(signals.relayed, deliveries=deliveries)


class QueueReporter:
    """The same for one queue, with the plugins that are chosen for it."""

    def __init__(self, reporter: Reporter, queue: str) -> None:
        plugins = reporter.plugins
        self._reporter = reporter
        self._queue = queue
        self._claimed = plugins.of("eventbus_claimed", queue)
        self._limits = plugins.of("eventbus_limit_claim", queue)
        self._failed = plugins.of("eventbus_handler_failed", queue)
        self._counted = plugins.of("eventbus_counted", queue)
        self._probed = plugins.of("eventbus_probed", queue)
        self._settled = plugins.of("eventbus_settled", queue)
        self._lost = plugins.of("eventbus_lease_lost", queue)

    @property
    def decides(self) -> bool:
        """Whether a plugin may postpone what failed."""
        return bool(self._failed)

    @property
    def limits(self) -> bool:
        """Whether a plugin may want to claim less."""
        return bool(self._limits)

    def limit(self, room: int, held: int) -> int:
        """How many to claim of ``room``, ``held`` being here."""
        answers = self._reporter.plugins.tell(self._limits, queue=self._queue, room=room, held=held)
        numbers = [int(answer) for answer in answers if isinstance(answer, int)]
        return max(0, min([room, *numbers]))

    def claimed(self, deliveries: Sequence[Delivery]) -> None:
        """These were claimed: keep what of them anybody wants to know when it is known what comes of them."""
        probe = deliveries[0].lease.probe
        if self._settled or (probe and self._probed) or any(signal.receivers for signal in signals.OF_OUTCOMES):
            observe(deliveries)
        if self._counted:
            sample(deliveries)
        if probe:
            self._reporter.send(signals.probing, queue=self._queue)
        if self._claimed or signals.claimed.receivers:
            count = len(deliveries)
            if deliveries[0].lease.ordered:
                count = sum(1 for delivery in deliveries for _ in chain(delivery))
            self._reporter.plugins.tell(self._claimed, queue=self._queue, count=count)
            self._reporter.send(signals.claimed, queue=self._queue, count=count)

    def judged(self, delivery: Delivery, verdict: Verdict) -> Verdict:
        """The verdict that stands: plugins may postpone what has failed."""
        error, delivery.error = delivery.error, None
        event = delivery.event
        if event is None or verdict.outcome not in ("retry", "dead"):
            return verdict
        if self._failed and (postponed := self._postponed(delivery, event, error, verdict)) is not None:
            return postponed
        if verdict.say is not None:
            verdict.say()
        return verdict

    def _postponed(
        self, delivery: Delivery, event: Event, error: BaseException | None, verdict: Verdict
    ) -> Verdict | None:
        """The first postponement counts."""
        outcome: Any = verdict.outcome
        failure = Failure(self._queue, event, error, outcome, delivery.lease.probe, delivery.began)
        for implementation in self._failed:
            for answer in self._reporter.plugins.tell([implementation], queue=self._queue, failure=failure):
                plugin = implementation.plugin.name
                seconds = answer.seconds if isinstance(answer, Postpone) else None
                if not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST_POSTPONEMENT:
                    problem = TypeError(f"it returned {answer!r}; return None or Postpone(seconds), a week at most")
                    self._reporter.plugins.complaints.failed(plugin, implementation.hook, problem)
                else:
                    log.info(
                        "plugin %s postpones %s, which failed, by %.1f s; no attempt counts", plugin, event, seconds,
                        extra={"queue": self._queue, "event_id": event.event_id_text},
                    )  # fmt: skip
                    return Verdict("deferred", seconds, verdict.reason, verdict.error)
        return None

    def stored(self, parts: Sequence[Part]) -> None:
        """What came of these was stored."""
        if not parts:
            return
        group, tell = Group(self._queue, parts), self._reporter.plugins.tell
        if self._counted:
            tell(self._counted, queue=self._queue, counted=group)
        if self._probed:
            for result in group.probes():
                tell(self._probed, queue=self._queue, result=result)
        parts = [part for part in parts if part.lease.observed]
        if not parts:
            return
        group = Group(self._queue, parts)
        if self._settled:
            tell(self._settled, queue=self._queue, settled=group)
        if any(signal.receivers for signal in signals.OF_OUTCOMES):
            for delivery, verdict in group.outcomes():
                self._announce(delivery, verdict)

    def lost(self, deliveries: int) -> None:
        """A lease was lost with so many deliveries."""
        self._reporter.plugins.tell(self._lost, queue=self._queue, deliveries=deliveries)
        self._reporter.send(signals.lease_lost, queue=self._queue, deliveries=deliveries)

    def paused(self, seconds: float | None) -> None:
        """The queue turned out to be paused."""
        self._reporter.send(signals.queue_paused, queue=self._queue, seconds=seconds)

    def _announce(self, delivery: Delivery, verdict: Verdict) -> None:
        send, event, queue = self._reporter.send, delivery.event, self._queue
        attempt = 1 if event is None else event.attempt
        match outcome_name(verdict):
            case "done":
                send(signals.handled, queue=queue, event=event, attempt=attempt, seconds=delivery.spent)
            case "duplicate":
                send(signals.skipped, queue=queue, event=event)
            case "discarded":
                send(signals.discarded, queue=queue, event=event, attempt=attempt, reason=verdict.reason)
            case "retry":
                again = {"delay": verdict.delay, "error": verdict.error}
                send(signals.retried, queue=queue, event=event, attempt=attempt, **again)
            case "dead":
                why = {"reason": verdict.reason, "error": verdict.error}
                send(signals.dead_lettered, queue=queue, event=event, attempt=attempt, **why)
            case "released":
                send(signals.released, queue=queue, event=event)
            case "deferred":
                send(signals.deferred, queue=queue, event=event, delay=verdict.delay)
            case "parked":
                send(signals.parked, queue=queue, event=event)
