"""History and tables brought together: who may have done what, and when. The guarantees are judged by this."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Final, TypeVar

from tests.torture.history import FOREVER, History, Incarnation, Run
from tests.torture.kinds import MAX_ATTEMPTS, Kind
from tests.torture.plan import FAILURES, SUCCESSES
from tests.torture.tables import Published, Spot, Tables

UNCLEAR: Final = frozenset({"broken", "cut", None})
"""A run that ended by a broken connection, by a cancellation, or never."""

MOMENT: Final = 500_000_000
"""Nanoseconds around a run in which a broken connection may have to do with it."""

Item = TypeVar("Item")


class Evidence:
    """What is known of one queue."""

    def __init__(self, kind: Kind, history: History, tables: Tables) -> None:
        self.kind = kind
        self.history = history
        self.tables = tables
        self.runs = sorted((run for run in history.runs if run.queue == kind.queue), key=attrgetter("started"))
        self._incarnations = {
            pid: sorted(mine, key=attrgetter("started")) for pid, mine in _grouped(history.incarnations, "pid").items()
        }

    @cached_property
    def wanted(self) -> Mapping[str, Published]:
        """The committed events that belong into the queue, by token."""
        return {token: each for token, each in self.tables.published.items() if self.kind.wants(each.topic)}

    @cached_property
    def by_token(self) -> Mapping[str, list[Run]]:
        """The runs of each event in the order in which they started."""
        return _grouped(self.runs, "token")

    @cached_property
    def by_event_id(self) -> Mapping[str, list[Run]]:
        """The same by event id: an id that was published twice is one event to queues that track executions."""
        return _grouped(self.runs, "event_id")

    @cached_property
    def tokens_of(self) -> Mapping[str, list[str]]:
        """The wanted tokens of each event id."""
        found = defaultdict(list)
        for token, each in self.wanted.items():
            found[each.event_id].append(token)
        return found

    @cached_property
    def committed_calls(self) -> frozenset[str]:
        """The calls of a transactional handler whose effects are there."""
        return frozenset(call for queue, _, call in self.tables.effects if queue == self.kind.queue)

    def was_cut_off(self, run: Run) -> bool:
        """Whether connections were cut while the handler ran, or about then."""
        place = bisect.bisect_left(self.history.cuts, run.started - MOMENT)
        return place < len(self.history.cuts) and self.history.cuts[place] < run.ended + MOMENT

    def same_execution(self, token: str) -> Sequence[Run]:
        """The runs that count for one event: its own, or those of its event id where executions are tracked."""
        if self.kind.tracking == "none":
            return self.by_token.get(token, [])
        return self.by_event_id.get(self.wanted[token].event_id, [])

    def places(self, token: str) -> list[str]:
        """Where the event is in this queue if it is not done."""
        return [*self.tables.places.get(self.spot(token), ())]

    def spot(self, token: str) -> Spot:
        """The event in this queue."""
        return self.kind.queue, token

    def succeeded_at(self, token: str) -> int:
        """When a handler first came to a good end with the event."""
        return min((run.ended for run in self.same_execution(token) if run.told in SUCCESSES), default=FOREVER)

    def gave_up_at(self, token: str) -> int:
        """When a handler first gave the event up."""
        return min((run.ended for run in self.by_token.get(token, []) if gives_up(run)), default=FOREVER)

    def silent(self, run: Run) -> int:
        """From when on others may have taken over the worker of a run; ``FOREVER`` when nobody did."""
        mine: Sequence[Incarnation] = self._incarnations.get(run.pid, ())
        place = bisect.bisect_right(mine, run.started, key=attrgetter("started"))
        return mine[place - 1].silent if place else FOREVER

    def is_lost(self, run: Run) -> bool:
        """Whether the worker of a run was killed or taken over, so that nobody knows if the run counted."""
        return self.silent(run) != FOREVER

    def counts(self, run: Run) -> bool:
        """Whether what a run told was written down for sure; a transaction may fail after its handler's good end."""
        if self.kind.tracking == "transactional" and run.call not in self.committed_calls:
            return False
        return not self.is_lost(run)

    def started_alive(self, run: Run) -> bool:
        """Whether the worker held its lease for sure when the run started."""
        return run.started < self.silent(run)

    def is_fenced(self, run: Run) -> bool:
        """Whether a run cannot have counted: before it ended, another worker had started the same event."""
        return self.is_lost(run) and any(
            run.started < other.started < run.ended and other.pid != run.pid and self.started_alive(other)
            for other in self.by_token[run.token]
        )

    def overlaps(self, runs: Iterable[Run]) -> Iterator[tuple[Run, Run]]:
        """Runs that started while another one was under way whose worker held its lease for sure."""
        latest: Run | None = None
        until = 0
        for run in runs:
            if not self.started_alive(run):
                continue
            if latest is not None and run.started < until:
                yield latest, run
            if (end := min(run.ended, self.silent(run))) > until:
                latest, until = run, end

    def by_key(self) -> Mapping[str, list[Run]]:
        """Runs of events that have a key."""
        return _grouped((run for run in self.runs if run.key is not None), "key")


def gives_up(run: Run) -> bool:
    """Whether a run ends in a dead letter, if it counts."""
    return run.told == "dead" or (run.attempt >= MAX_ATTEMPTS and (run.told in FAILURES or run.told in UNCLEAR))


def _grouped(items: Iterable[Item], attribute: str) -> dict[Any, list[Item]]:
    found: dict[Any, list[Item]] = {}
    for item in items:
        found.setdefault(getattr(item, attribute), []).append(item)
    return found
