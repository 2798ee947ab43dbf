"""Makes the values that hooks get, with what matters to a test and something sensible for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

import orjson

from eventbus.event import Event, new_event_id
from eventbus.plugins.values import Call, Failure, OutcomeName, QueueFacts, Result, Timing

QUEUE: Final = "bench"
_UNCALLED: Final = frozenset({"duplicate", "released", "parked"})
"""The outcomes of deliveries whose handler was not called, or did not end."""
_CALLED: Final = frozenset({"done", "discarded", "retry", "dead"})
"""Those of calls that have come to an end."""


@dataclass(slots=True)
class SettledResults:
    """A group of outcomes, as :class:`~eventbus.plugins.Settled` says."""

    queue: str
    results: Sequence[Result]

    @property
    def counts(self) -> Mapping[OutcomeName, int]:
        """How many of each outcome."""
        return Counter(result.outcome for result in self.results)

    @property
    def has_failures(self) -> bool:
        """Whether there is a retry or a dead letter among them."""
        return any(result.outcome in ("retry", "dead") for result in self.results)


@dataclass(slots=True)
class CountedResults:
    """The same in numbers, as :class:`~eventbus.plugins.Counted` says."""

    results: Sequence[Result]

    @property
    def counts(self) -> Mapping[OutcomeName, int]:
        """How many of each outcome."""
        return Counter(result.outcome for result in self.results)

    @property
    def calls(self) -> int:
        """How many calls have come to an end."""
        return len(self.timings)

    @property
    def failures(self) -> int:
        """How many of them failed, or were postponed by a plugin."""
        return sum(
            result.outcome in ("retry", "dead") or (result.outcome == "deferred" and result.error is not None)
            for result in self.results
        )

    @property
    def timings(self) -> Sequence[Timing]:
        """How long each of them took."""
        return [
            Timing(result.event.published_at if result.attempt == 1 else None, result.started_at, result.seconds)
            for result in self.results
            if result.event is not None and result.outcome in _CALLED
        ]


def new_event(
    topic: str = "bench.happened",
    payload: Any = None,
    *,
    queue: str = QUEUE,
    headers: Mapping[str, str] | None = None,
    key: str | None = None,
    attempt: int = 1,
) -> Event:
    """An event as a handler of ``queue`` gets it, published just now."""
    return Event(
        event_id=str(new_event_id()),
        topic=topic,
        payload=orjson.dumps(payload).decode(),
        headers=orjson.dumps(dict(headers)).decode() if headers else None,
        key=key,
        published_at=datetime.now(UTC),
        queue=queue,
        attempt=attempt,
    )


def new_queue(name: str = QUEUE, **different: Any) -> QueueFacts:
    """A queue with a plain async handler. ``different``: what is not as it is by default."""
    usual: dict[str, Any] = {
        "patterns": ("bench.#",),
        "handler": "bench.handle",
        "is_async": True,
        "idempotent": False,
        "transactional": False,
        "ordered": False,
        "batch": None,
        "concurrency": 10,
        "timeout": None,
        "max_attempts": 5,
    }
    return QueueFacts(name, **(usual | different))


def new_call(*events: Event, queue: str = QUEUE) -> Call:
    """A call of a handler; with a new event if none is given."""
    return Call(queue, events or (new_event(queue=queue),))


def new_failure(
    error: BaseException | None = None,
    *,
    event: Event | None = None,
    queue: str = QUEUE,
    outcome: Literal["retry", "dead"] = "retry",
    probe: bool = False,
    started_at: float = 1.0,
) -> Failure:
    """A call that failed with ``error``; None: its handler returned :class:`~eventbus.Retry`."""
    return Failure(queue, event or new_event(queue=queue), error, outcome, probe, started_at)


def new_result(
    outcome: OutcomeName = "done",
    *,
    event: Event | None = None,
    queue: str = QUEUE,
    seconds: float = 0.01,
    started_at: float = 1.0,
    **more: Any,
) -> Result:
    """What came of one delivery. ``more``: ``probe``, ``delay``, ``reason``, ``error`` as in :class:`Result`."""
    event = event or new_event(queue=queue)
    if outcome in _UNCALLED:
        seconds = started_at = 0.0
    return Result(queue, event, outcome, event.attempt, started_at, seconds, **more)


def new_settled(*results: Result | OutcomeName, queue: str = QUEUE) -> SettledResults:
    """A group of outcomes that were stored together; a name stands for a result with that outcome."""
    return SettledResults(queue, [new_result(each, queue=queue) if isinstance(each, str) else each for each in results])


def new_counted(*results: Result | OutcomeName, queue: str = QUEUE) -> CountedResults:
    """The same in numbers."""
    return CountedResults(new_settled(*results, queue=queue).results)
