"""Publishers: their transactions, and events that are due later. What commits here waits for the relay."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from eventbus.testing.model.state import State
from eventbus.testing.model.values import Event, Scheduled, Transaction, Waits
from eventbus.topics import validate_headers, validate_key, validate_priority, validate_topic


class Publishing(State):
    """Publish, commit, roll back, cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: set[int] = set()
        """Committed and not relayed."""

    def begin(self) -> int:
        """Open a transaction of a publisher; its token."""
        number = self.next("transaction")
        self.transactions[number] = Transaction()
        return number

    def commit(self, tx: int) -> None:
        """End a transaction: all that it published is there at once, and what it cancelled is gone."""
        done = self.transactions.pop(tx)
        self.outbox |= {event.id: event for event in done.events}
        self.fresh |= {event.id for event in done.events}
        self.scheduled |= {one.id: one for one in done.scheduled}
        for number in done.cancelled:
            del self.scheduled[number]

    def rollback(self, tx: int) -> None:
        """End a transaction: nothing of it was ever there. Ids are not used again."""
        del self.transactions[tx]

    def savepoint(self, tx: int) -> int:
        """Set a savepoint; its depth."""
        open_one = self.transactions[tx]
        open_one.savepoints.append((len(open_one.events), list(open_one.scheduled), len(open_one.cancelled)))
        return len(open_one.savepoints)

    def release(self, tx: int, savepoint: int) -> None:
        """Forget a savepoint and those after it; what was written stays."""
        del self.transactions[tx].savepoints[savepoint - 1 :]

    def rollback_to(self, tx: int, savepoint: int) -> None:
        """Undo what was written after a savepoint, which stays."""
        open_one = self.transactions[tx]
        events, scheduled, cancelled = open_one.savepoints[savepoint - 1]
        del open_one.savepoints[savepoint:]
        del open_one.events[events:]
        open_one.scheduled = list(scheduled)
        del open_one.cancelled[cancelled:]

    def publish(
        self,
        topic: str = "orders.created",
        payload: str = "{}",
        key: str | None = None,
        *,
        now: float,
        headers: Mapping[str, str] | None = None,
        delay: float | None = None,
        event_id: str | None = None,
        priority: int = 0,
        tx: int | None = None,
    ) -> str:
        """Publish one event in an open transaction, or in its own; its event id. ``delay`` in seconds.

        Raises what :mod:`eventbus.topics` raises for topics, keys, headers and priorities that cannot be.
        """
        mine = self.begin() if tx is None else tx
        named = event_id or str(UUID(int=self.next("event") + (1 << 64)))
        number = self.next("outbox" if delay is None else "scheduled")
        event = Event(
            number, named, validate_topic(topic), payload, None if key is None else validate_key(key),
            None if headers is None else validate_headers(headers), validate_priority(priority), now,
        )  # fmt: skip
        if delay is None:
            self.transactions[mine].events.append(event)
        else:
            self.transactions[mine].scheduled.append(Scheduled(number, now + delay, event))
        if tx is None:
            self.commit(mine)
        return named

    def cancel(self, event_id: str, tx: int | None = None) -> bool:
        """Take back a delayed event that has not fired; false if there is none that this transaction sees.

        Raises :class:`Waits` where another open transaction cancels the same one: the database waits for its end.
        """
        mine = self.begin() if tx is None else tx
        open_one = self.transactions[mine]
        found = [one.id for one in self.scheduled.values() if one.event.event_id == event_id]
        locked = {number for other, its in self.transactions.items() if other != mine for number in its.cancelled}
        if locked & set(found):
            if tx is None:
                self.rollback(mine)
            raise Waits(f"another transaction is cancelling {event_id}")
        found = [number for number in found if number not in open_one.cancelled]
        own = [one for one in open_one.scheduled if one.event.event_id == event_id]
        open_one.scheduled = [one for one in open_one.scheduled if one not in own]
        open_one.cancelled += found
        if tx is None:
            self.commit(mine)
        return bool(found or own)

    def fire_due(self, limit: int = 1000, *, now: float) -> int:
        """Publish what is due, oldest first; how many. What somebody is cancelling is left alone."""
        locked = {number for open_one in self.transactions.values() for number in open_one.cancelled}
        due = [one for one in self.scheduled.values() if one.due_at <= now and one.id not in locked]
        due = sorted(due, key=lambda one: (one.due_at, one.id))[:limit]
        for one in due:
            del self.scheduled[one.id]
            said = one.event
            self.publish(
                said.topic, said.payload, said.key, now=now, headers=said.headers, event_id=said.event_id,
                priority=said.priority,
            )  # fmt: skip
        return len(due)

    def next_due(self, now: float) -> float | None:
        """Seconds until the first scheduled event is due; none without one."""
        return min((one.due_at - now for one in self.scheduled.values()), default=None)
