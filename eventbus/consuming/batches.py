"""The call of one handler with a batch of events, from the deliveries to a verdict for each.

Before it: a runner has a free slot and a batch. After it: the consumer gives the verdicts to the engine. One bad event
must not fail its neighbours: a payload that does not fit is left out, and after a call that failed as a whole every
event runs again by itself.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eventbus.consuming.boundary import Postponed, Results
from eventbus.consuming.execution import DEFERRED, Execution, Unfinished
from eventbus.consuming.idempotency import execution_of
from eventbus.consuming.results import outcomes_of
from eventbus.consuming.verdicts import warn_of_batch
from eventbus.event import Event
from eventbus.transport import RELEASED, Delivery, Discard, Done, Verdict

Verdicts = list[Verdict | None]
"""One for each delivery, in their order. None: it has to run again by itself, in the same attempt."""


@dataclass(slots=True, eq=False)
class BatchCall:
    """One call in the making. ``verdicts`` has what is known without it; ``places`` are those of the events in it."""

    verdicts: Verdicts
    places: list[int] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    payloads: list[Any] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def conclude(self, verdicts: Sequence[Verdict | None]) -> Verdicts:
        """The verdicts of all, those of the call included."""
        spent = time.monotonic() - self.began
        for place, delivery, verdict in zip(self.places, self.deliveries, verdicts, strict=True):
            self.verdicts[place] = verdict
            delivery.began, delivery.spent = self.began, spent
        return self.verdicts


@dataclass(frozen=True, slots=True)
class UnfinishedBatch(Unfinished):
    """What a plain handler returned for a batch and somebody must wait for."""

    call: BatchCall | None = None


class Batches:
    """The calls of a handler of batches; the counterpart of ``Execution.handle``. Nothing here raises."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._load = execution.subscription.handler.load

    async def handle(self, deliveries: Sequence[Delivery]) -> Verdicts:
        """Call an async handler and judge what came of it."""
        call = self._prepare(deliveries)
        if not call.events:
            return call.verdicts
        read = functools.partial(outcomes_of, events=len(call.events))
        try:
            return self._judge(call, await self._execution.attempt(call.deliveries, (call.events, call.payloads), read))
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises is a failed attempt
            return self._failed(call, error)

    def handle_blocking(self, deliveries: Sequence[Delivery]) -> Verdicts | UnfinishedBatch:
        """Call a plain handler in this thread; unfinished work that it returned is given back."""
        call = self._prepare(deliveries)
        if not call.events:
            return call.verdicts
        read = functools.partial(outcomes_of, events=len(call.events))
        try:
            came = self._execution.attempt_blocking(call.deliveries, (call.events, call.payloads), read)
            if isinstance(came, Unfinished):
                return UnfinishedBatch(came.result, came.spent, call)
            return self._judge(call, came)
        except BaseException as error:  # noqa: BLE001 - the same
            return self._failed(call, error)

    async def handle_returned(self, unfinished: UnfinishedBatch) -> Verdicts:
        """Wait for what a plain handler has left unfinished."""
        call = unfinished.call
        assert call is not None
        read = functools.partial(outcomes_of, events=len(call.events))
        try:
            return self._judge(call, await self._execution.attempt_returned(call.deliveries, unfinished, read))
        except BaseException as error:  # noqa: BLE001 - the same
            return self._failed(call, error)

    def _prepare(self, deliveries: Sequence[Delivery]) -> BatchCall:
        """Leave out what needs no call, and read the payloads of the rest."""
        call = BatchCall([None] * len(deliveries))
        seen: set[Any] = set()
        for place, delivery in enumerate(deliveries):
            lease, event = delivery.lease, delivery.event
            if lease.dropped:
                call.verdicts[place] = RELEASED
                continue
            lease.started = max(lease.started, delivery.seq)
            known = self._known(delivery, seen)
            if known is not None or event is None:
                call.verdicts[place] = known
                continue
            try:
                payload = None if self._load is None else self._load(event)
            except BaseException as error:  # noqa: BLE001 - a payload can fail its event and no other
                call.verdicts[place] = self._execution.failed(error, delivery, event)
                continue
            call.places.append(place)
            call.deliveries.append(delivery)
            call.events.append(event)
            call.payloads.append(payload)
        return call

    def _known(self, delivery: Delivery, seen: set[Any]) -> Verdict | None:
        """The verdict that stands without a call. A transaction completes an event once: its copy comes later."""
        known = self._execution.known(delivery)
        if known is None and self._execution.boundary is not None and delivery.event is not None:
            execution = execution_of(delivery.event)
            if execution in seen:
                return DEFERRED
            seen.add(execution)
        return known

    def _judge(self, call: BatchCall, results: Results) -> Verdicts:
        if self._execution.boundary is not None and len(results) > 1:
            undone = [result for result in results if not isinstance(result, Done | Discard)]
            if undone:
                return self._one_by_one(call, f"its transaction was rolled back: {undone[0]!r}"[:500])
        return call.conclude(list(map(self._execution.verdict, results, call.deliveries, call.events)))

    def _failed(self, call: BatchCall, error: BaseException) -> Verdicts:
        if len(call.events) == 1 or type(error) is Postponed:
            failed = self._execution.failed
            return call.conclude(list(map(failed, [error] * len(call.events), call.deliveries, call.events)))
        if self._execution.aborting:
            return call.conclude([RELEASED] * len(call.events))
        return self._one_by_one(call, error)

    def _one_by_one(self, call: BatchCall, why: BaseException | str) -> Verdicts:
        warn_of_batch(call.events, why)
        return call.conclude([None] * len(call.events))
