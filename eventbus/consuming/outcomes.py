"""What came of deliveries whose outcomes were stored together, for plugins and signals; lists are made when asked for.

Before it: the settler has stored what a lease knows of its deliveries. After it: ``reporting`` tells of it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from eventbus.plugins.values import OutcomeName, Result
from eventbus.transport import DONE, Delivery, Lease, Verdict


@dataclass(frozen=True, slots=True)
class Part:
    """What was stored of one lease that is observed. ``done``: seqs whose handlers ended well."""

    lease: Lease
    done: Sequence[int]
    others: Sequence[tuple[int, Verdict]]


class Group:
    """Deliveries of one queue whose outcomes were stored together: :class:`eventbus.plugins.Settled`."""

    __slots__ = ("_parts", "_results", "queue")

    def __init__(self, queue: str, parts: Sequence[Part]) -> None:
        self.queue = queue
        self._parts = parts
        self._results: list[Result] | None = None

    @property
    def counts(self) -> Mapping[OutcomeName, int]:
        """How many of each outcome."""
        counts: Counter[OutcomeName] = Counter(outcome_name(verdict) for _, verdict in self._others())
        if done := sum(len(part.done) for part in self._parts):
            counts["done"] += done
        return counts

    @property
    def timings(self) -> Sequence[tuple[datetime | None, float, float]]:
        """When published (of first attempts of fresh events), when called, and how long it took."""
        found: list[tuple[datetime | None, float, float]] = []
        for part in self._parts:
            observed, kept = part.lease.observed, part.lease.exception_id
            seqs = [*part.done, *(seq for seq, verdict in part.others if was_called(verdict))]
            found += [
                (None if kept or event.replay_id else event.published_at, delivery.began, delivery.spent)
                for delivery in map(observed.__getitem__, seqs)
                if (event := delivery.event) is not None
            ]
        return found

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

    def _others(self) -> Iterator[tuple[int, Verdict]]:
        return itertools.chain.from_iterable(part.others for part in self._parts)


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
