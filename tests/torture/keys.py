"""Guarantee 7: per key, what was published earlier is handled earlier."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from tests.torture.evidence import Evidence
from tests.torture.history import FOREVER
from tests.torture.tables import Published


def order(evidence: Evidence) -> Iterator[str]:
    """An event starts when every earlier one of its key is done (or dead, where the queue skips dead ones).

    Earlier is what was committed before the other was published, and what the same transaction published before. When
    a delayed event takes its place is not known here.
    """
    if not evidence.kind.ordered:
        return
    events = _by_key(evidence)
    for key, runs in evidence.by_key().items():
        yield from (f"{run} beside {other}, which has the same key" for other, run in evidence.overlaps(runs))
        line = _Line(evidence, events.get(key, []))
        for run in runs:
            if not evidence.started_alive(run) or run.token not in evidence.wanted:
                continue
            if (blocking := line.blocking(evidence.wanted[run.token], run.started)) is not None:
                yield f"{run} started before {blocking} of the same key was done"
    yield from _parked_for_nothing(evidence)


class _Line:
    """The events of one key, and when each was out of the way."""

    def __init__(self, evidence: Evidence, events: Sequence[Published]) -> None:
        committed = evidence.history.committed_at
        self._gone = {event.token: _gone(evidence, event) for event in events}
        self._siblings: dict[int, list[Published]] = {}
        for event in sorted(events, key=lambda event: event.place):
            self._siblings.setdefault(event.transaction, []).append(event)
        self._events = sorted(events, key=lambda event: committed.get(event.transaction, FOREVER))
        self._commits = [committed.get(event.transaction, FOREVER) for event in self._events]
        gone = ((self._gone[event.token], event.token) for event in self._events)
        self._latest = list(accumulate(gone, max))

    def blocking(self, event: Published, moment: int) -> str | None:
        """An earlier event that was still in the way at a moment."""
        if event.delayed:
            return None
        if place := bisect.bisect_left(self._commits, event.published_at):
            until, token = self._latest[place - 1]
            if until > moment:
                return token
        for sibling in self._siblings[event.transaction]:
            if sibling.place < event.place and self._gone[sibling.token] > moment:
                return sibling.token
        return None


def _gone(evidence: Evidence, event: Published) -> int:
    done = evidence.succeeded_at(event.token)
    return done if evidence.kind.parks else min(done, evidence.gave_up_at(event.token))


def _by_key(evidence: Evidence) -> Mapping[str, list[Published]]:
    found: dict[str, list[Published]] = {}
    for event in evidence.wanted.values():
        if event.key is not None and not event.delayed:
            found.setdefault(event.key, []).append(event)
    return found


def _parked_for_nothing(evidence: Evidence) -> Iterator[str]:
    blocked = {letter.key for letter in evidence.tables.letters if letter.queue == evidence.kind.queue}
    for token, event in evidence.wanted.items():
        if "parked" in evidence.places(token) and not (evidence.kind.parks and event.key in blocked):
            yield f"{token} is parked behind nothing"
