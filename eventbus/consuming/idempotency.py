"""Completed executions that this process remembers, so that the same event published twice needs no second look.

Before it: a settlement that is known to be committed. After it: a delivery that found another one of its event under
way asks here before it waits. It only ever holds completed executions; the guarantee is the engine's.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from eventbus.event import Event
from eventbus.transport import Delivery

Execution = tuple[str, int]
"""An event id as text, and the number of the replay, 0 for none."""

MOST: Final = 10_000
LONGEST: Final = 600.0


def execution_of(event: Event) -> Execution:
    """Which execution handling this event is."""
    return event.event_id_text, event.replay_id


class Completions:
    """Those of one queue: at most ``most``, for at most ``seconds`` each. Times are monotonic seconds."""

    def __init__(self, most: int = MOST, seconds: float = LONGEST) -> None:
        self.lookups = 0
        self.hits = 0
        self._most = most
        self._seconds = seconds
        self._completed: OrderedDict[Execution, float] = OrderedDict()

    def add(self, executions: Iterable[Execution], now: float) -> None:
        """Remember executions whose completion is committed."""
        completed = self._completed
        for execution in executions:
            completed[execution] = now
            completed.move_to_end(execution)
        while len(completed) > self._most:
            completed.popitem(last=False)
        while completed and now - next(iter(completed.values())) > self._seconds:
            completed.popitem(last=False)

    def has(self, execution: Execution, now: float) -> bool:
        """Whether it is remembered; counted as a lookup, and as a hit if so."""
        self.lookups += 1
        completed_at = self._completed.get(execution)
        if completed_at is None or now - completed_at > self._seconds:
            return False
        self.hits += 1
        return True

    def clear(self) -> None:
        """Forget everything: a reconnect may lead to a server that has lost the newest commits."""
        self._completed.clear()

    def __len__(self) -> int:
        return len(self._completed)


def knower(completions: Completions | None) -> Callable[[Delivery], bool]:
    """Whether a delivery's event is known to be completed by another delivery."""

    def completed(delivery: Delivery) -> bool:
        if completions is None or delivery.event is None:
            return False
        return completions.has(execution_of(delivery.event), time.monotonic())

    return completed
