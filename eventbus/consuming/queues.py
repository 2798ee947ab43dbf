"""One queue as one process sees it: its runner, its pace, and when to look for what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from eventbus.consuming.pace import Pace
from eventbus.consuming.runners import Runner
from eventbus.transport import Due, Verdict

NEVER: Final = float("inf")


@dataclass(slots=True, eq=False)
class QueueState:
    """One queue in this process. Times are monotonic seconds."""

    name: str
    runner: Runner
    pace: Pace
    dry: bool = False
    """The last claim found nothing more, and nothing was announced since."""
    due_at: float = 0.0
    """When to look for exceptions; at first, at once."""
    crashed_at: float = NEVER
    """When one that must run alone is due."""

    @property
    def quiet(self) -> bool:
        """Nothing is waiting in the database, retries included."""
        return self.dry and self.due_at == self.crashed_at == NEVER

    @property
    def hungry(self) -> bool:
        """There is more to claim, and little enough waits here."""
        return not self.dry and self.runner.waiting <= self.pace.refill

    def room(self, now: float) -> int:
        """How many more deliveries to claim now."""
        return self.pace.room(self.runner.waiting, self.runner.running, now)

    def announce(self) -> None:
        """Anything may be waiting: look."""
        self.dry = False
        self.due_at = 0.0

    def forget(self) -> None:
        """Drop what waits here and know nothing of the database."""
        self.runner.withdraw()
        self.announce()
        self.crashed_at = NEVER

    def expect(self, due: Due, now: float) -> None:
        """What the database said of the exceptions to come."""
        if due.due_in is not None:
            self.due_at = min(self.due_at, now + due.due_in)
        self.crashed_at = NEVER if due.crashed_in is None else now + due.crashed_in

    def expect_retries(self, verdicts: Iterable[tuple[int, Verdict]], now: float) -> None:
        """The engine has stored these: earlier, a look for them would have been in vain."""
        for _, verdict in verdicts:
            if verdict.outcome == "retry":
                self.due_at = min(self.due_at, now + verdict.delay)
