"""What one queue has of an event, in words: pure functions from the rows that ``explanation`` has read.

What left the happy path has a row of its own (dead letter, exception), so that is looked at first; then the claim
that covers the delivery; then the position of its lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from eventbus.postgres.admin import State, Worker

Facts = dict[str, Any]
Stage = Literal["not relayed", "no copy", "filling", "waiting", "running", "retrying", "parked", "dead", "done"]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a copy stands.

    ``what``: the stage in words. ``why``: why it is not moving, or why there is no copy. ``notes``: where the copy came
    from, and what is recorded of its execution. ``facts``: the same for programs, as far as they apply: position,
    ahead, host, pid, attempts, due_at, error, behind, execution and so on.
    """

    stage: Stage
    what: str
    why: tuple[str, ...] = ()
    facts: Facts = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Around:
    """What holds for every copy: the bus, its workers, and the lease in seconds after which they count as silent."""

    bus: State
    workers: list[Worker]
    consumers: dict[str, Facts]
    """By queue: the worker that claimed from it last, and how far it is while it is filling."""
    lease: float
    pauses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By queue: why it is paused, in words."""

    @property
    def alive(self) -> int:
        """How many workers are not silent."""
        return sum(not self.silent(worker.heartbeat_age) for worker in self.workers)

    def silent(self, heartbeat_age: float | None) -> bool:
        """Whether a worker with this heartbeat has lost its lease, or signed off."""
        return heartbeat_age is None or heartbeat_age > self.lease


def standing(facts: Facts, around: Around) -> Standing:
    """Where one delivery stands."""
    found = _standing(facts, around)
    notes, more = _origin(facts)
    executed, execution = _execution(facts, done=found.stage == "done")
    return replace(found, notes=(*notes, *executed), facts={**found.facts, **more, **execution})


def _origin(facts: Facts) -> tuple[tuple[str, ...], Facts]:
    """What a copy says that is not simply the event as it was relayed."""
    replay, letter = facts["replay_id"], facts["redriven_from"]
    notes = () if not replay else (f"played once more by replay {replay}",)
    if letter is not None:
        notes = (*notes, f"redriven: it was dead letter {letter}")
    more = {"replay": replay or None, "redriven_from": letter}
    return notes, {name: value for name, value in more.items() if value is not None}


def _execution(facts: Facts, *, done: bool) -> tuple[tuple[str, ...], Facts]:
    """What is recorded of the execution, in a queue that records it."""
    if not facts["executed"]:
        return (), {}
    if facts["completed_at"] is not None:
        again = "" if done else "; the handler does not run for it again"
        note = f"its execution was completed at {facts['completed_at']:%Y-%m-%d %H:%M:%S%z}{again}"
        return (note,), {"execution": "completed", "completed_at": facts["completed_at"]}
    elsewhere = facts["owner"] is not None and facts["owner"] != facts["outbox_id"]
    whose = ", by another delivery of the same event id" if elsewhere else ""
    note = f"its execution is pending since {facts['begun_at']:%Y-%m-%d %H:%M:%S%z}{whose}"
    return (note,), {"execution": "pending", "pending_since": facts["begun_at"]}


def _standing(facts: Facts, around: Around) -> Standing:
    if facts["letter"] is not None:
        return _dead(facts)
    if facts["exception"] is not None:
        return _exception(facts, around)
    if facts["claimed_at"] is None:
        return _waiting(facts, around) if facts["seq"] > facts["position"] else Standing("done", "done")
    if facts["settled"] is None and facts["recorded"] is None:
        return _running(facts, around)
    settled_at = facts["settled_at"] if facts["settled"] == "settled" else None
    at = f" at {settled_at:%Y-%m-%d %H:%M:%S%z}" if settled_at else ""
    return Standing("done", f"done{at}", facts={"settled_at": settled_at})


def no_standing(filled: float | None, *, relayed: bool) -> Standing:
    """Where a queue stands that matches and has no copy; ``filled``: how far it is, from 0 to 1, if it is filling."""
    if not relayed:
        return Standing("not relayed", "gets a copy once the event is relayed")
    if filled is not None:
        what = f"the queue still gets what was relayed before it began: {filled:.0%}; this event in its turn"
        return Standing("filling", what, facts={"filled": filled})
    why = "the queue got this pattern after the event was relayed, or the copy was done and retention removed it"
    return Standing("no copy", "matches now, but has no copy", (why,))


def stopped(around: Around) -> tuple[str, ...]:
    """Why nothing at all moves, as far as that is so."""
    if around.bus.state == "paused":
        return (f"the bus is paused ({around.bus.reason}); to go on: eventbus resume",)
    if around.bus.foreign:
        return ("this database was restored from another one, and no worker has attached it yet",)
    if not around.alive:
        return ("no worker is alive, and workers run the relay too; start one: eventbus consume",)
    return ()


def _dead(facts: Facts) -> Standing:
    attempts, crashes = facts["letter_attempts"], facts["letter_crashes"]
    what = f"dead letter {facts['letter']} after {_tries(attempts, crashes)}: {facts['reason']}"
    more = {
        "dead_letter": facts["letter"],
        "reason": facts["reason"],
        "died_at": facts["died_at"],
        "attempts": attempts,
        "crashes": crashes,
        "error": facts["letter_error"],
    }
    why: tuple[str, ...] = (f"it gave up; to try again: eventbus dead-letters redrive {facts['letter']}",)
    if facts["letter_blocks"]:
        why = (*why, "later events of its key wait until it is redriven or discarded")
    return Standing("dead", what, why, more)


def _exception(facts: Facts, around: Around) -> Standing:
    if facts["state"] == "claimed":
        return _running(facts, around)
    attempts, crashes, due_in = facts["attempts"], facts["crashes"], facts["due_in"]
    more = {"attempts": attempts, "crashes": crashes, "due_at": facts["due_at"], "error": facts["last_error"]}
    blocked = _blocked(facts, around) if due_in <= 0 else ()
    if facts["state"] == "parked":
        return _parked(facts, more, blocked)
    due = f"due in {duration(due_in)}" if due_in > 0 else f"due since {duration(-due_in)}"
    if attempts == 0 and crashes == 0:
        return Standing("waiting", f"back in the queue, {due}", blocked, more)
    error = message_of(facts["last_error"])
    what = f"retrying after {_tries(attempts, crashes)}, {due}{': ' if error else ''}{error}"
    return Standing("retrying", what, blocked, more)


def _parked(facts: Facts, more: Facts, blocked: tuple[str, ...]) -> Standing:
    if facts["front_state"] is not None:
        due_in = facts["front_due_in"]
        doing = "is running" if facts["front_state"] == "claimed" else "waits"
        if facts["front_state"] != "claimed" and (facts["front_attempts"] or facts["front_crashes"]):
            due = f"due in {duration(due_in)}" if due_in > 0 else f"due since {duration(-due_in)}"
            doing = f"is retried after {_tries(facts['front_attempts'], facts['front_crashes'])}, {due}"
        what = f"parked behind event {facts['front_event']} of its key, which {doing}"
        return Standing("parked", what, blocked, {**more, "behind": facts["front_event"]})
    if facts["blocker"] is not None:
        letter = facts["blocker"]
        what = f"parked behind dead letter {letter} of its key: {facts['blocker_reason']}"
        why = (f"to go on: eventbus dead-letters redrive {letter}, or discard {letter}",)
        return Standing("parked", what, why, {**more, "behind": facts["blocker_event"], "behind_dead_letter": letter})
    return Standing("parked", "parked behind an earlier event of its key", blocked, more)


def _waiting(facts: Facts, around: Around) -> Standing:
    position = facts["seq"] - facts["position"]
    others = "" if position == 1 else f", behind {position - 1:,} other{'s' if position > 2 else ''}"
    what = f"waiting at position {position:,}{others}"
    return Standing("waiting", what, _blocked(facts, around), {"position": position, "ahead": position - 1})


def _running(facts: Facts, around: Around) -> Standing:
    worker = f"worker {facts['host']}/{facts['pid']}" if facts["host"] else "a worker that is gone"
    retried = facts["exception"] is not None
    started = retried or facts["started"]
    since = None if retried else facts["claimed_at"]
    what = f"{'running in' if started else 'claimed, not started yet, by'} {worker}"
    what += f" since {since:%Y-%m-%d %H:%M:%S%z}" if since else ""
    heartbeat_age = facts["heartbeat_age"]
    why: tuple[str, ...] = ()
    if facts["worker_state"] != "live" or around.silent(heartbeat_age):
        silence = "" if heartbeat_age is None else f" for {duration(heartbeat_age)}"
        why = (f"its worker has been silent{silence}; the next worker that runs takes it over",)
    more = {
        "host": facts["host"],
        "pid": facts["pid"],
        "claimed_at": since,
        "started": started,
        "heartbeat_age": heartbeat_age,
        "attempts": facts["attempts"] or 0,
        "crashes": facts["crashes"] or 0,
    }
    return Standing("running", what, why, more)


def _blocked(facts: Facts, around: Around) -> tuple[str, ...]:
    """Why a copy that waits is not claimed."""
    last = around.consumers.get(facts["queue"])
    if last is None:
        return ("the queue was dropped",)
    paused = around.pauses.get(facts["queue"], ())
    reasons = (*stopped(around), *(f"the queue is {words}" for words in paused))
    if reasons or (last["worker_state"] == "live" and not around.silent(last["heartbeat_age"])):
        return reasons
    workers = f"{around.alive} worker{'s are' if around.alive > 1 else ' is'} alive"
    who = (
        "nobody has ever claimed from this queue"
        if last["claimed_at"] is None
        else "the last worker that claimed from this queue is gone"
    )
    return (f"{who}; {workers}, perhaps for other queues",)


def _tries(attempts: int, crashes: int) -> str:
    tried = f"{attempts} attempt{'' if attempts == 1 else 's'}"
    return f"{tried} and {crashes} crash{'' if crashes == 1 else 'es'}" if crashes else tried


def message_of(error: Any) -> str:
    """A stored failure on one line."""
    if not isinstance(error, dict):
        return "" if error is None else " ".join(str(error).split())
    parts = [str(error[name]) for name in ("type", "message") if error.get(name)]
    return " ".join(": ".join(parts).split())


_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))


def duration(length: float) -> str:
    """A length of time in seconds for people: ``3.2 s``, ``4 min``, ``2.5 h``."""
    for size, unit in _UNITS:
        if length >= size:
            return f"{length / size:.3g} {unit}"
    return f"{length:.1f} s"
