"""The relay: from committed events to one numbered line of deliveries per lane of each queue.

The position is a set, as a snapshot is one: what commits late is fresh then, whatever was relayed before. What does not
fit into one tick stays in an open window, and nothing that commits meanwhile gets into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eventbus.errors import ConfigurationError
from eventbus.testing.model.publishing import Publishing
from eventbus.testing.model.state import lane_of
from eventbus.testing.model.values import Delivery, Event, Queue, Tick
from eventbus.topics import matches, validate_pattern, validate_queue_name


class Relaying(Publishing):
    """Queues, routes and ticks."""

    def __init__(self) -> None:
        super().__init__()
        self.window: list[int] | None = None
        self.window_upto = 0
        self.ids_upto = 0

    def declare_queue(
        self,
        name: str,
        pattern: str = "#",
        *,
        kind: str | None = None,
        lanes: int | None = None,
        tracking: str | None = None,
        when_exhausted: str | None = None,
    ) -> int:
        """Create a queue, or change its pattern and rules; its number. What is left out stays as it is.

        A new queue gets what is relayed from now on. Raises :class:`ConfigurationError` for another kind or number of
        lanes than the queue has: the model has one layout per queue.
        """
        found = [queue for queue in self.queues.values() if queue.name == name]
        if not found:
            number = self.next("queue")
            kind = kind or "plain"
            count = {"plain": 1, "ordered": lanes or 16, "prioritized": lanes or 3}[kind]
            found = [Queue(number, validate_queue_name(name), frozenset(), kind, count)]
            self.queues[number] = found[0]
        queue = found[0]
        if kind not in {None, queue.kind} or (queue.kind != "plain" and lanes not in {None, queue.lanes}):
            raise ConfigurationError(f"queue {name!r} has another layout; the model keeps the one it was made with")
        queue.tracking = tracking or queue.tracking
        queue.when_exhausted = when_exhausted or queue.when_exhausted
        patterns = frozenset({validate_pattern(pattern)})
        self.bindings_version += queue.patterns != patterns
        queue.patterns = patterns
        return queue.id

    def resolve(self, topics: Iterable[str]) -> None:
        """Compute and keep where topics go, by the bindings that there are now."""
        for topic in topics:
            queues = [q.id for q in self.queues.values() if any(matches(pattern, topic) for pattern in q.patterns)]
            self.routes[topic] = (self.bindings_version, sorted(queues))

    def tick(self, limit: int = 1000, *, now: float) -> Tick:
        """One step: at most ``limit`` deliveries, at least one event, and nothing after the first unknown topic."""
        if self.paused:
            return Tick("paused")
        new = self.window is None
        window = sorted(self.fresh) if self.window is None else self.window
        upto = self.numbers["outbox"] if new else self.window_upto
        fresh = [self.outbox[number] for number in window[:limit]]
        unknown = sorted({event.topic for event in fresh if self._route(event) is None})
        taken = self._taken(fresh, limit)
        if not taken and (fresh or (new and upto - self.ids_upto <= limit)):
            return Tick("unknown" if fresh else "idle", unknown=unknown, due_in=self.next_due(now))
        fed = self._append(taken)
        self.fresh -= {event.id for event in taken}
        more = len(taken) < len(fresh) or len(fresh) >= limit
        self.window = window[len(taken) :] if more else None
        self.window_upto = upto
        self.ids_upto = self.ids_upto if more else upto
        return Tick("ticked", more, len(taken), len(fed), sorted(set(fed)), unknown, self.next_due(now))

    def relay(self, limit: int = 1000, *, now: float) -> list[Tick]:
        """Tick and resolve until nothing is fresh; the ticks that relayed something."""
        ticks = []
        while (tick := self.tick(limit, now=now)).state not in {"idle", "paused"}:
            if tick.state == "unknown":
                self.resolve(tick.unknown)
            else:
                ticks.append(tick)
        return ticks

    def delivered(self, queue_id: int) -> list[str]:
        """Event ids of everything that was ever delivered into a queue, lane by lane in its order."""
        lanes = range(self.queues[queue_id].lanes)
        return [one.event.event_id for lane in lanes for one in self.line(queue_id, lane)]

    def _route(self, event: Event) -> list[int] | None:
        version, queues = self.routes.get(event.topic, (0, []))
        return queues if version == self.bindings_version else None

    def _taken(self, fresh: Sequence[Event], limit: int) -> list[Event]:
        taken: list[Event] = []
        copies = 0
        for event in fresh:
            queues = self._route(event)
            copies += len(queues or ())
            if queues is None or (copies > limit and taken):
                break
            taken.append(event)
        return taken

    def _append(self, events: Sequence[Event]) -> list[int]:
        """Give each event to its queues; the queue of each delivery."""
        fed = []
        for event in events:
            queues = self._route(event) or []
            if not queues:
                self.unrouted[event.topic] += 1
            for number in queues:
                lane = lane_of(self.queues[number], event)
                line = self.line(number, lane)
                line.append(Delivery(number, lane, len(line) + 1, event))
                fed.append(number)
        return fed
