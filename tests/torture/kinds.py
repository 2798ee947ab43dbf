"""The queues of a torture run: one per kind of handler. Shares nothing with the bus, which must be as it says here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

MAX_ATTEMPTS: Final = 3
EVERYBODY: Final = "torture.all"
"""The topic that every queue gets; ``torture.<queue>`` is for one, any other for none."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One queue, what is promised of it, and how its handler is made."""

    queue: str
    is_async: bool = True
    tracking: Literal["none", "idempotent", "transactional"] = "none"
    ordered: bool = False
    parks: bool = False
    """An ordered queue that lets nothing of a key pass a dead letter."""
    batch: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """What ``subscribe`` gets, apart from the topics, the name and the retries."""

    def wants(self, topic: str) -> bool:
        """Whether an event of this topic belongs into the queue."""
        return topic in (EVERYBODY, f"torture.{self.queue}")


KINDS: Final = (
    Kind("plain-async"),
    Kind("plain-sync", is_async=False),
    Kind("idempotent", tracking="idempotent", options={"idempotent": True}),
    Kind("transactional-async", tracking="transactional", options={"transactional": True}),
    Kind("transactional-sync", is_async=False, tracking="transactional", options={"transactional": True}),
    Kind("parking", ordered=True, parks=True, options={"ordered": True}),
    Kind("skipping", is_async=False, ordered=True, options={"ordered": True, "when_exhausted": "skip"}),
    Kind("prioritized", options={"priorities": 3}),
    Kind("batch", batch=True, options={"batch": 20, "batch_wait": 0.02}),
    Kind(
        "transactional-batch", tracking="transactional", batch=True,
        options={"batch": 20, "batch_wait": 0.02, "transactional": True},
    ),
    Kind(
        "parking-idempotent", tracking="idempotent", ordered=True, parks=True,
        options={"ordered": True, "idempotent": True},
    ),
)  # fmt: skip


def chosen(names: str) -> tuple[Kind, ...]:
    """Some kinds by the names of their queues, with commas between; all of them for an empty text."""
    wanted = set(names.split(",")) if names else {kind.queue for kind in KINDS}
    assert wanted <= {kind.queue for kind in KINDS}, names
    return tuple(kind for kind in KINDS if kind.queue in wanted)
