"""The queues of a torture run, one for each kind of handler, and what a handler does with an event."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from eventbus.testing.torture.facts import Promise

TOPIC: Final = "torture.happened"
MAX_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """One queue: what is promised of it, and how its handler is made."""

    promise: Promise
    shape: str = "task"
    """``task``, ``thread`` or ``batch``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What ``subscribe`` gets, apart from the topic, the name and the retries."""


KINDS: Final = (
    Kind(Promise("plain")),
    Kind(Promise("threads"), "thread"),
    Kind(Promise("batch"), "batch", {"batch": 20, "batch_wait": 0.02}),
    Kind(Promise("prioritized"), options={"priorities": 3}),
    Kind(Promise("parking", ordered=True, parks=True), options={"ordered": True}),
    Kind(Promise("skipping", ordered=True), "thread", {"ordered": True, "when_exhausted": "skip"}),
    Kind(Promise("idempotent", by_event_id=True), options={"idempotent": True}),
    Kind(Promise("transactional", by_event_id=True, effects=True), "thread", {"transactional": True}),
)


def decided(seed: str, queue: str, token: str, attempt: int) -> tuple[str, float]:
    """What the handler tells in this attempt, and the seconds it takes for it; the same whenever it is asked."""
    chance = random.Random(f"{seed} {queue} {token} {attempt}")  # noqa: S311 - it has to come again
    seconds = chance.choices((0.0, 0.002, 0.02, 0.2), (60, 25, 12, 3))[0]
    told = chance.choices(("done", "raise", "retry", "discard", "dead"), (90, 5, 3, 1.5, 0.5))[0]
    return told, seconds
