"""One queue as one process sees it: its runner, its pace, and when to look for what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from eventbus.consuming.holdings import chain
from eventbus.consuming.idempotency import Completions
from eventbus.consuming.pace import Pace
from eventbus.consuming.reporting import QueueReporter
from eventbus.consuming.runners import Runner
from eventbus.transport import Delivery, Due, Lease, Pause, Verdict

NEVER: Final = float("inf")
_LIMITED_PAUSE: Final = 1.0
"""Seconds after which plugins are asked again that let nothing be claimed."""


@dataclass(slots=True, eq=False)
class QueueState:
    """One queue in this process. Times are monotonic seconds."""

    name: str
    runner: Runner
    pace: Pace
    reporter: QueueReporter
    finished: int = 0
    """Deliveries that were handled here, failures included."""
    completions: Completions | None = None
    """Completed executions, where executions are recorded."""
    skips: bool = False
    """Of an ordered queue: a dead letter does not keep later events of its key waiting."""
    behind: int = 0
    """Deliveries here that wait for an earlier one of their key."""
    dry: bool = False
    """The last claim found nothing more, and nothing was announced since."""
    due_at: float = 0.0
    """When to look for exceptions; at first, at once."""
    crashed_at: float = NEVER
    """When one that must run alone is due."""
    held_until: float = NEVER
    """When to look again whether the claims that others have open are settled."""
    suspended: bool = False
    """It was paused for all workers when the database was last asked. Fresh events are asked for before retries."""
    paused_until: float = 0.0
    """When to ask again, if it is suspended."""
    on_hold_until: float = 0.0
    fed: bool = False
    """Something was announced since the database was last asked."""
    unsure: bool = False
    """Something was announced since the database was last asked, perhaps a pause."""
    probe: UUID | None = None
    """The token of the last probe that this worker got."""
    probed: Callable[[UUID], None] = lambda _token: None
    """Told of a probe that was handled well."""
    limited_until: float = 0.0
    """When to ask the plugins again that let nothing be claimed."""
    release: Callable[[bool], bool] = lambda _probes: False
    """Gives back what has not started, probes too if they are to; whether there was anything. Set by the consumer."""

    @property
    def quiet(self) -> bool:
        """Nothing is waiting in the database, retries included."""
        return self.dry and self.due_at == self.crashed_at == self.held_until == NEVER

    @property
    def halted(self) -> bool:
        """It has work, and only somebody's resume lets it go on."""
        return self.suspended and self.paused_until == NEVER and not self.quiet

    def stands(self, now: float) -> bool:
        """Nothing starts here now, but for probes if it is not on hold."""
        return max(self.on_hold_until, self.paused_until) > now

    def admits(self, delivery: Delivery, now: float) -> bool:
        """Whether what was claimed may start now."""
        return self.on_hold_until <= now and (delivery.lease.probe or self.paused_until <= now)

    def claimable(self, now: float) -> bool:
        """There may be something to claim."""
        return not self.dry or self.held_until <= now or (self.suspended and self.due_at <= now)

    def retriable(self, now: float) -> bool:
        """An exception may be due, and fresh events do not come first."""
        return self.due_at <= now and not self.suspended

    @property
    def hungry(self) -> bool:
        """There is more to claim, and little enough waits here."""
        return not self.dry and self.waiting <= self.pace.refill

    @property
    def waiting(self) -> int:
        """Deliveries here that have not started."""
        return self.runner.waiting + self.behind

    def room(self, now: float) -> int:
        """How many more deliveries to claim now."""
        if self.stands(now) or self.limited_until > now:
            return 0
        room = self.pace.room(self.waiting, self.runner.running, now)
        if room > 0 and self.reporter.limits:
            room = self.reporter.limit(room, self.waiting + self.runner.running)
            self.limited_until = 0.0 if room else now + _LIMITED_PAUSE
        return room

    def left(self, room: int, now: float) -> int:
        """How much of ``room`` is left after retries were claimed; plugins may want less now."""
        return min(room, self.room(now)) if self.reporter.limits else room

    def offer(self, deliveries: Iterable[Delivery]) -> None:
        """Run these, and after each what follows it in its key."""
        claims = set()
        for delivery in deliveries:
            lease = delivery.lease
            if not lease.ordered:
                continue
            if not lease.claim_id:
                self.behind += sum(1 for _ in chain(delivery)) - 1
                continue
            lease.offered[delivery.seq] = delivery
            self.behind -= 1
            if lease not in claims:
                claims.add(lease)
                self.behind += lease.unfinished
        self.runner.offer(deliveries)

    def follow(self, delivery: Delivery) -> None:
        """The one before it in its key is done."""
        self.behind -= 1
        if delivery.lease.claim_id:
            delivery.lease.offered[delivery.seq] = delivery
        self.runner.resume(delivery)

    def cut(self, delivery: Delivery) -> list[Delivery]:
        """Take what follows a delivery out of the way; it does not start here."""
        behind = list(chain(delivery))[1:]
        delivery.following = None
        self.behind -= len(behind)
        return behind

    def feed(self) -> None:
        """The relay has brought something."""
        self.dry = False
        self.fed = True

    def announce(self) -> None:
        """Anything may be waiting, or the queue be paused or resumed: look."""
        self.feed()
        self.due_at = 0.0
        self.held_until = NEVER
        self.paused_until = self.limited_until = 0.0
        self.unsure = True

    def hold(self, seconds: float) -> None:
        """Let nothing start here for so long, in this process only, and give back what has not started; 0 ends it.

        For the moment until a pause is in the database.
        """
        self.on_hold_until = time.monotonic() + seconds if seconds > 0 else 0.0
        if seconds > 0:
            self.release(True)
        self.announce()
        self.runner.made_room()

    def pause(self, pause: Pause, now: float) -> None:
        """The database says that it is paused. What has not started is given back, but for the probe."""
        self.suspended = True
        if not self.unsure:
            self.paused_until = NEVER if pause.seconds is None else now + pause.seconds
        waiting = self.release(False) or pause.waiting or self.fed
        self.dry = not waiting
        self.due_at = self.paused_until if waiting else NEVER
        self.crashed_at = self.held_until = NEVER

    def await_probe(self) -> None:
        """The database says that the pause may be over, and that it gives one event out to see."""
        self.suspended = True
        self.release(False)

    def resume(self) -> None:
        """The database says that it is not paused any more."""
        self.suspended = False
        self.paused_until = 0.0
        self.dry = False
        self.due_at = 0.0

    def forget(self) -> None:
        """Drop what waits here and know nothing of the database."""
        self.runner.withdraw()
        self.behind = 0
        self.forget_completions()
        self.announce()
        self.crashed_at = NEVER

    def forget_completions(self) -> None:
        """What was committed may be gone after a reconnect."""
        if self.completions is not None:
            self.completions.clear()

    def expect(self, due: Due, now: float) -> None:
        """What the database said of the exceptions to come."""
        if due.due_in is not None:
            self.due_at = min(self.due_at, now + due.due_in)
        self.crashed_at = NEVER if due.crashed_in is None else now + due.crashed_in

    def settled(self, lease: Lease, now: float) -> None:
        """A lease was settled or lost: what it tells of what comes next, and of what is done."""
        self.expect_retries(lease.verdicts, now)
        if lease.ordered:  # its lane is free, and what was parked behind it may be due
            self.dry = False
            self.due_at = 0.0
            if self.suspended:  # whether anything of it is left
                self.announce()
        if self.completions is not None and lease.executed:
            self.completions.add(lease.executed, now)

    def expect_retries(self, verdicts: Iterable[tuple[int, Verdict]], now: float) -> None:
        """The engine has stored these: earlier, a look for them would have been in vain."""
        for _, verdict in verdicts:
            if verdict.outcome in ("retry", "deferred"):
                self.due_at = min(self.due_at, now + verdict.delay)
