"""What came of deliveries whose outcomes were stored together, for plugins and signals; lists are made when asked for.

Before it: ``watching`` has kept what of a lease somebody wants to know, and the settler has stored its outcomes. After
it: ``reporting`` tells of it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eventbus.consuming.holdings import SLOW
from eventbus.consuming.watching import watched
from eventbus.plugins.values import OutcomeName, Result, Timing
from eventbus.transport import DONE, MISSING, Delivery, Lease, Verdict


@dataclass(frozen=True, slots=True)
class Part:
    """What was stored of one lease that is watched. ``done``: seqs whose handlers ended well."""

    lease: Lease
    done: Sequence[int]
    others: Sequence[tuple[int, Verdict]]
    whole: bool
    """It is everything that the lease was about."""

    def without(self, seqs: Collection[int]) -> Part:
        """The same without some deliveries."""
        others = [pair for pair in self.others if pair[0] not in seqs]
        return replace(self, done=[seq for seq in self.done if seq not in seqs], others=others, whole=False)

    def outcomes(self) -> Iterator[tuple[Delivery, Verdict]]:
        """Every delivery and what came of it; only of a lease all of whose deliveries were kept."""
        observed = self.lease.observed
        for seq in self.done:
            yield observed[seq], DONE
        for seq, verdict in self.others:
            yield observed[seq], verdict

    def timings(self) -> list[Timing]:
        """How long calls took: the slow ones and those that failed singly, of the others a sample for all of them."""
        verdicts = dict(self.others)
        done = None if self.whole else frozenset(self.done)

        def called(delivery: Delivery) -> bool:
            if (verdict := verdicts.get(delivery.seq)) is not None:
                return was_called(verdict)
            return done is None or delivery.seq in done

        if self.lease.every == 1:
            return [_timing(delivery, 1) for delivery in self.lease.sample if called(delivery)]
        singly = [delivery for delivery in self.lease.kept if called(delivery)]
        sample = [
            delivery
            for delivery in self.lease.sample
            if delivery.spent <= SLOW and delivery.seq not in verdicts and called(delivery)
        ]
        fast = len(self.done) - sum(delivery.seq not in verdicts for delivery in singly)
        each, more = divmod(fast, len(sample)) if sample else (0, 0)
        shares = [each + (number < more) for number in range(len(sample))]
        return [_timing(delivery, 1) for delivery in singly] + [
            _timing(delivery, calls) for delivery, calls in zip(sample, shares, strict=True) if calls
        ]


class Group:
    """Deliveries of one queue whose outcomes were stored together.

    It is :class:`eventbus.plugins.Counted`, and :class:`eventbus.plugins.Settled` if all deliveries were kept.
    """

    __slots__ = ("_counts", "_parts", "_results", "queue")

    def __init__(self, queue: str, parts: Sequence[Part]) -> None:
        self.queue = queue
        self._parts = parts
        self._counts: Mapping[OutcomeName, int] | None = None
        self._results: list[Result] | None = None

    @property
    def counts(self) -> Mapping[OutcomeName, int]:
        """How many of each outcome."""
        if self._counts is None:
            counts: Counter[OutcomeName] = Counter(outcome_name(verdict) for _, verdict in self._others())
            if done := sum(len(part.done) for part in self._parts):
                counts["done"] += done
            self._counts = counts
        return self._counts

    @property
    def failures(self) -> int:
        """How many calls failed: those that are retried, were given up, or were postponed after an error."""
        return sum(
            verdict.outcome in ("retry", "dead") or (verdict.outcome == "deferred" and verdict.error is not None)
            for _, verdict in self._others()
        )

    @property
    def calls(self) -> int:
        """How many handler calls have come to an end."""
        return sum(len(part.done) for part in self._parts) + sum(was_called(verdict) for _, verdict in self._others())

    @property
    def timings(self) -> Sequence[Timing]:
        """How long calls took."""
        return [timing for part in self._parts for timing in part.timings()]

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

    def outcomes(self) -> Iterator[tuple[Delivery, Verdict]]:
        """Every delivery and what came of it."""
        return itertools.chain.from_iterable(part.outcomes() for part in self._parts)

    def probes(self) -> Iterator[Result]:
        """What came of those that tried a paused queue."""
        for part in self._parts:
            if part.lease.probe:
                for delivery, verdict in part.outcomes():
                    yield _result(self.queue, delivery, verdict)

    def _others(self) -> Iterator[tuple[int, Verdict]]:
        return itertools.chain.from_iterable(part.others for part in self._parts)


def part_of(lease: Lease) -> Part | None:
    """What is about to be stored of a lease; None if nobody wants to know."""
    if not watched(lease) or not (lease.done or lease.verdicts):
        return None
    kinds, others = lease.kinds, lease.verdicts
    if lease.observed:
        others = [pair for pair in others if pair[0] in lease.observed]
    whole = not (lease.unfinished or lease.recorded)
    if not kinds:
        return Part(lease, lease.done, others, whole)
    others = others + [(seq, kinds[seq]) for seq in lease.done if seq in kinds]
    return Part(lease, [seq for seq in lease.done if seq not in kinds], others, whole)


def outcome_name(verdict: Verdict) -> OutcomeName:
    """The outcome of a verdict as plugins call it."""
    return verdict.kind or verdict.outcome


def was_called(verdict: Verdict) -> bool:
    """Whether the handler was called, and came to an end."""
    if verdict is MISSING:
        return False
    return verdict.kind == "discarded" or verdict.outcome in ("retry", "dead") or verdict is DONE


def size(lease: Lease) -> int:
    """How many deliveries a lease is about."""
    return 1 if lease.exception_id else lease.hi - lease.lo + 1


def _timing(delivery: Delivery, calls: int) -> Timing:
    event = delivery.event
    fresh = event is not None and not event.replay_id and not delivery.lease.exception_id
    return Timing(event.published_at if fresh and event is not None else None, delivery.began, delivery.spent, calls)


def _result(queue: str, delivery: Delivery, verdict: Verdict) -> Result:
    event, called = delivery.event, was_called(verdict) or verdict.outcome == "deferred"
    return Result(
        queue=queue,
        event=event,
        outcome=outcome_name(verdict),
        attempt=1 if event is None else event.attempt,
        started_at=delivery.began if called else 0.0,
        seconds=delivery.spent if called else 0.0,
        probe=delivery.lease.probe,
        delay=verdict.delay,
        reason=verdict.reason,
        error=verdict.error,
    )
