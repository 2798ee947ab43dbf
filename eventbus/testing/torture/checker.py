"""Says which promises were broken, from a history and from tables. Imports nothing of the bus, so that it excuses none.

Before it: ``history`` and ``postgres`` have brought everything together. After it: ``run`` reports what is found here.

Times are nanoseconds of the machine's clock. How a worker is judged that was frozen beyond its lease (a zombie): what
it started before counts as running until half a lease after the freeze, what it starts until one lease after it was
woken is not used as evidence of order, and a repeat of what it did is explained.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from eventbus.testing.torture.facts import FOREVER, SUCCESSES, Call, Fault, History, Promise, Published, Tables

SETTLED_AFTER: Final = 5_000_000_000
"""A success that ended so long before a fault was told to the database: the fault explains no repeat of it."""
BROKEN_BEFORE: Final = 1_000_000_000
"""A connection that broke so long before a call started may still have to do with it."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken, by its short name, and by what."""

    promise: str
    queue: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise} in {self.queue}: {self.what}"


@dataclass(slots=True)
class Evidence:
    """What is known of one queue."""

    promise: Promise
    history: History
    tables: Tables
    calls: list[Call] = field(default_factory=list)
    dead: dict[str, int] = field(default_factory=dict)
    committed: frozenset[str] = frozenset()
    groups: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Calls of what is one event to this queue, in the order in which they started."""

    def __post_init__(self) -> None:
        queue = self.promise.queue
        self.calls = sorted((call for call in self.history.calls if call.queue == queue), key=lambda call: call.started)
        self.dead = {token: attempts for name, token, attempts in self.tables.letters if name == queue}
        self.committed = frozenset(call for name, _, call in self.tables.effects if name == queue)
        for call in self.calls:
            self.groups[self.group(call.token, call.event_id)].append(call)

    def group(self, token: str, event_id: str) -> str:
        """The name of what is one event to this queue."""
        return event_id if self.promise.by_event_id else token

    def succeeded(self, call: Call) -> bool:
        """Whether the call was good, as far as anybody outside can see."""
        return call.name in self.committed if self.promise.effects else call.told in SUCCESSES

    def successes(self, event: Published) -> list[Call]:
        """The good calls of one event."""
        return [call for call in self.groups.get(self.group(event.token, event.event_id), ()) if self.succeeded(call)]

    def explains(self, fault: Fault, call: Call) -> bool:
        """Whether a fault may have kept the success of a call from the database."""
        mine = fault.pid is None or fault.pid == call.pid
        return mine and fault.until >= call.started - BROKEN_BEFORE and fault.at <= call.ended + SETTLED_AFTER

    def held_until(self, call: Call) -> int:
        """Until when the call kept others away: its end, unless its worker was killed or frozen before."""
        after = {"kill": 0, "stop": self.history.lease // 2}
        mine = (fault for fault in self.history.faults if fault.pid == call.pid and fault.at >= call.started)
        return min([call.ended, *(fault.at + after[fault.kind] for fault in mine if fault.kind in after)])

    def is_zombie(self, call: Call) -> bool:
        """Whether the call started, or went on, after others may have taken its worker over."""
        half, lease = self.history.lease // 2, self.history.lease
        return any(
            fault.kind == "stop" and fault.pid == call.pid and call.ended >= fault.at + half
            and call.started <= fault.until + lease
            for fault in self.history.faults
        )  # fmt: skip


def lost(evidence: Evidence) -> Iterator[str]:
    """Every committed event was delivered once, and is done, dead, or waiting behind what is dead."""
    queue = evidence.promise.queue
    waiting = {token for name, token, _ in evidence.tables.undone if name == queue}
    given_up = {evidence.group(token, evidence.tables.published[token].event_id)
                for token in evidence.dead if token in evidence.tables.published}  # fmt: skip
    for token, event in evidence.tables.published.items():
        if (count := evidence.tables.delivered[queue, token]) != 1:
            yield f"{token} was delivered {count} times"
            continue
        group = evidence.group(token, event.event_id)
        if not evidence.successes(event) and token not in waiting and group not in given_up:
            seen = _told(evidence.groups.get(group, ()))
            yield f"{token} is called done, but no handler came to a good end with it: {seen}"


def phantom(evidence: Evidence) -> Iterator[str]:
    """Nobody saw an event that was not committed."""
    published = evidence.tables.published
    yield from (
        f"{call} of an event that was never committed" for call in evidence.calls if call.token not in published
    )
    yield from (f"dead letter {token} was never committed" for token in evidence.dead if token not in published)
    yield from (f"{token} was delivered, but never committed" for queue, token in evidence.tables.delivered
                if queue == evidence.promise.queue and token not in published)  # fmt: skip


def repeated(evidence: Evidence) -> Iterator[str]:
    """What was done is not done again, unless a fault explains it."""
    if evidence.promise.effects:
        return
    for first, again in repeats(evidence):
        if not any(evidence.explains(fault, first) and fault.at <= again.started for fault in evidence.history.faults):
            yield f"{again} after {first}"


def repeats(evidence: Evidence) -> Iterator[tuple[Call, Call]]:
    """Good calls, each with the next call for the same event."""
    for calls in evidence.groups.values():
        for first, again in pairwise(calls):
            if evidence.succeeded(first):
                yield first, again


def effect(evidence: Evidence) -> Iterator[str]:
    """A transactional effect is there exactly once, if the event is done."""
    if not evidence.promise.effects:
        return
    names = {call.name: call for call in evidence.calls}
    counted = Counter(event_id for queue, event_id, _ in evidence.tables.effects if queue == evidence.promise.queue)
    yield from (f"{event_id} has {count} effects: {_told(evidence.groups.get(event_id, []))}"
                for event_id, count in counted.items() if count > 1)  # fmt: skip
    yield from (f"an effect of {name}, which nobody called" for name in evidence.committed if name not in names)


def order(evidence: Evidence) -> Iterator[str]:
    """Of each key, an event starts only after the one before is done or given up."""
    if not evidence.promise.ordered:
        return
    for events in _keys(evidence):
        before: tuple[int, str] = (0, "")
        barrier: str | None = None
        for event in events:
            calls = [call for call in evidence.groups.get(event.token, ()) if not evidence.is_zombie(call)]
            if calls and barrier is not None:
                yield f"{calls[0]} passed the dead letter {barrier} of its key"
            if calls and calls[0].started < before[0]:
                yield f"{calls[0]} before {before[1]} of its key was finished at {before[0] / 1e9:.4f}"
            if evidence.promise.parks and event.token in evidence.dead:
                barrier = event.token
            before = max(before, (_finished(evidence, event), event.token))


def overlap(evidence: Evidence) -> Iterator[str]:
    """Two events of one key never run at once."""
    if not evidence.promise.ordered:
        return
    for events in _keys(evidence):
        calls = [call for event in events for call in evidence.groups.get(event.token, ())]
        until, latest = 0, None
        for call in sorted(calls, key=lambda call: call.started):
            if latest is not None and call.started < until and not evidence.is_zombie(call):
                yield f"{call} beside {latest}"
            if (end := evidence.held_until(call)) > until:
                until, latest = end, call


def early(evidence: Evidence) -> Iterator[str]:
    """A delayed event does not come before it is due."""
    for call in evidence.calls:
        event = evidence.tables.published.get(call.token)
        if event is not None and call.started < event.due:
            yield f"{call} is {(event.due - call.started) / 1e9:.3f} s early"


def attempts(evidence: Evidence) -> Iterator[str]:
    """No attempt beyond the policy, and a dead letter only after all of them or on purpose."""
    most = evidence.promise.max_attempts
    yield from (f"{call} is beyond attempt {most}" for call in evidence.calls if not 1 <= call.attempt <= most)
    on_purpose = {call.token for call in evidence.calls if call.told == "dead"}
    for token, count in evidence.dead.items():
        if count != most and token not in on_purpose:
            yield f"{token} is dead after {count} attempts of {most}"


def stuck(evidence: Evidence) -> Iterator[str]:
    """At the end nothing waits, but for what is parked behind a dead letter of its key."""
    published = evidence.tables.published
    blocked = {published[token].key for token in evidence.dead if token in published}
    for queue, token, place in evidence.tables.undone:
        if queue != evidence.promise.queue:
            continue
        key = published[token].key if token in published else None
        if not (evidence.promise.parks and place == "parked" and key is not None and key in blocked):
            yield f"{token} is {place}"


CHECKS: Final[Sequence[Callable[[Evidence], Iterator[str]]]] = (
    lost, phantom, repeated, effect, order, overlap, early, attempts, stuck,
)  # fmt: skip


def violations(promises: Iterable[Promise], history: History, tables: Tables) -> list[Violation]:
    """Everything that is wrong at the end of a run."""
    found = [
        Violation(check.__name__, promise.queue, what)
        for promise in promises
        for evidence in (Evidence(promise, history, tables),)
        for check in CHECKS
        for what in check(evidence)
    ]
    left = [f"process {pid} was asked to stop and ended with {code}" for pid, code in history.exits if code != 0]
    return found + [Violation("exit", "every queue", what) for what in left]


def _keys(evidence: Evidence) -> Iterable[list[Published]]:
    keys = defaultdict(list)
    for event in sorted(evidence.tables.published.values(), key=lambda event: event.sequence):
        if event.key is not None:
            keys[event.key].append(event)
    return keys.values()


def _finished(evidence: Evidence, event: Published) -> int:
    if good := evidence.successes(event):
        return min(call.ended for call in good)
    ends = [call.ended for call in evidence.groups.get(event.token, ()) if call.ended != FOREVER]
    return max(ends, default=0) if event.token in evidence.dead else 0


def _told(calls: Sequence[Call]) -> str:
    return " ".join(map(str, calls)) or "no call"
