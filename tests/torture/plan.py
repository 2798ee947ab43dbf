"""What a handler does with an event, drawn from the queue, the event and the attempt: it can be computed again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

from tests.torture.kinds import MAX_ATTEMPTS

Told = Literal["done", "discard", "raise", "retry", "dead"]
FAILURES: Final = frozenset({"raise", "retry"})
"""What a handler tells that is tried again while attempts are left."""
SUCCESSES: Final = frozenset({"done", "discard"})
"""What a handler tells that ends a delivery well."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the handler does in one attempt: work for some seconds, then tell how it went."""

    told: Told
    seconds: float
    spoils_batch: bool
    """In a batch of several, the handler fails as a whole rather than for this event."""


def step(queue: str, token: str, attempt: int, *, redriven: bool) -> Step:
    """What happens in this attempt. A redriven event is done, so that a run comes to its end."""
    doomed = random.Random(f"{queue} {token}").random() < 0.004 and not redriven
    chance = random.Random(f"{queue} {token} {attempt}")
    seconds = chance.choices((0.0, 0.001, 0.01, 0.1), (70, 20, 9.5, 0.5))[0]
    told: Told = chance.choices(("done", "raise", "retry", "discard", "dead"), (90, 5, 3, 1.7, 0.3))[0]
    if doomed and told in SUCCESSES:
        told = "raise"
    if redriven and told not in SUCCESSES:
        told = "done"
    return Step(told, seconds, spoils_batch=chance.random() < 0.3 and told == "raise")


def fate(queue: str, token: str) -> tuple[Told, int]:
    """How an event ends if nothing but its handler goes wrong, and in which attempt: done, discard or dead."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        told = step(queue, token, attempt, redriven=False).told
        if told not in FAILURES:
            return told, attempt
    return "dead", MAX_ATTEMPTS
