"""What came of deliveries whose outcomes were stored together, for plugins and signals; lists are made when asked for.

Before it: the settler has stored what a lease knows of its deliveries. After it: ``reporting`` tells of it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import overload

from eventbus.consuming.holdings import chain
from eventbus.plugins.values import OutcomeName, Result
from eventbus.transport import DONE, Delivery, Lease, Verdict

Timing = tuple[datetime | None, float, float]


@dataclass(frozen=True, slots=True)
class Part:
    """What was stored of one lease that is observed. ``done``: seqs whose handlers ended well."""

    lease: Lease
    done: Sequence[int]
    others: Sequence[tuple[int, Verdict]]


class Timings(Sequence[Timing]):
    """The timings of deliveries; each is made when it is asked for, which most of them never are."""

    __slots__ = ("_deliveries",)

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self._deliveries = deliveries

    def __len__(self) -> int:
        return len(self._deliveries)

    @overload
    def __getitem__(self, at: int) -> Timing: ...
    @overload
    def __getitem__(self, at: slice) -> Timings: ...
    def __getitem__(self, at: int | slice) -> Timing | Timings:
        """One of them, or some."""
        if isinstance(at, slice):
            return Timings(self._deliveries[at])
        return _timing(self._deliveries[at])

    def __iter__(self) -> Iterator[Timing]:
        return map(_timing, self._deliveries)


class Group:
    """Deliveries of one queue whose outcomes were stored together: :class:`eventbus.plugins.Settled`."""

    __slots__ = ("_calls", "_parts", "_results", "queue")

    def __init__(self, queue: str, parts: Sequence[Part]) -> None:
        self.queue = queue
        self._parts = parts
        self._calls: list[Delivery] | None = None
        self._results: list[Result] | None = None

    @property
    def counts(self) -> Mapping[OutcomeName, int]:
        """How many of each outcome."""
        counts: Counter[OutcomeName] = Counter(outcome_name(verdict) for _, verdict in self._others())
        if done := sum(len(part.done) for part in self._parts):
            counts["done"] += done
        return counts

    @property
    def timings(self) -> Timings:
        """When published (of first attempts of fresh events), when called, and how long it took."""
        return Timings(self._called())

    @property
    def seconds(self) -> Sequence[float]:
        """How long the handlers took."""
        return [delivery.spent for delivery in self._called()]

    @property
    def results(self) -> Sequence[Result]:
        """One for each delivery."""
        if self._results is None:
            self._results = [_result(self.queue, delivery, verdict) for delivery, verdict in self.outcomes()]
        return self._results

    @property
    def has_failures(self) -> bool:
        """Whether a handler failed or gave up."""
        return any(verdict.outcome in ("retry", "dead") for _, verdict in self._others())

    @property
    def has_probe(self) -> bool:
        """Whether one of them tried a paused queue."""
        return any(part.lease.probe for part in self._parts)

    def outcomes(self) -> Iterator[tuple[Delivery, Verdict]]:
        """Every delivery and what came of it."""
        for part in self._parts:
            for seq in part.done:
                yield part.lease.observed[seq], DONE
            for seq, verdict in part.others:
                yield part.lease.observed[seq], verdict

    def _called(self) -> list[Delivery]:
        """Those whose handlers were called."""
        if self._calls is None:
            self._calls = []
            for part in self._parts:
                observed = part.lease.observed
                if len(part.done) == len(observed):
                    self._calls += observed.values()
                    continue
                seqs = [*part.done, *(seq for seq, verdict in part.others if was_called(verdict))]
                self._calls += [observed[seq] for seq in seqs if observed[seq].event is not None]
        return self._calls

    def _others(self) -> Iterator[tuple[int, Verdict]]:
        return itertools.chain.from_iterable(part.others for part in self._parts)


def _timing(delivery: Delivery) -> Timing:
    event = delivery.event
    fresh = event is not None and not event.replay_id and not delivery.lease.exception_id
    return event.published_at if fresh and event is not None else None, delivery.began, delivery.spent


def observe(deliveries: Sequence[Delivery]) -> None:
    """Keep the deliveries of these leases until their outcomes are stored."""
    first = deliveries[0].lease
    if first.claim_id and first is deliveries[-1].lease and not first.ordered:
        first.observed = {delivery.seq: delivery for delivery in deliveries}
        return
    for delivery in deliveries:
        for each in chain(delivery):
            each.lease.observed[each.seq] = each


def part_of(lease: Lease) -> Part | None:
    """What is about to be stored of a lease; None if nobody wants to know."""
    if not lease.observed or not (lease.done or lease.verdicts):
        return None
    kinds, known = lease.kinds, lease.observed
    others = [pair for pair in lease.verdicts if pair[0] in known]
    if not kinds:
        return Part(lease, lease.done, others)
    others += [(seq, kinds[seq]) for seq in lease.done if seq in kinds]
    return Part(lease, [seq for seq in lease.done if seq not in kinds], others)


def outcome_name(verdict: Verdict) -> OutcomeName:
    """The outcome of a verdict as plugins call it."""
    return verdict.kind or verdict.outcome


def was_called(verdict: Verdict) -> bool:
    """Whether the handler was called, and came to an end."""
    return verdict.kind == "discarded" or verdict.outcome in ("retry", "dead") or verdict is DONE


def size(lease: Lease) -> int:
    """How many deliveries a lease is about."""
    return 1 if lease.exception_id else lease.hi - lease.lo + 1


def _result(queue: str, delivery: Delivery, verdict: Verdict) -> Result:
    event, called = delivery.event, was_called(verdict) or verdict.outcome == "deferred"
    return Result(
        queue=queue,
        event=event,
        outcome=outcome_name(verdict),
        attempt=1 if event is None else event.attempt,
        started_at=delivery.began if called and event is not None else 0.0,
        seconds=delivery.spent if called and event is not None else 0.0,
        probe=delivery.lease.probe,
        delay=verdict.delay,
        reason=verdict.reason,
        error=verdict.error,
    )
