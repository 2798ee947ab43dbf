"""What one queue has of an event, in words: pure functions from the rows that ``explanation`` has read.

What left the happy path has a row of its own (dead letter, exception), so that is looked at first; then the claim
that covers the delivery; then the position of its lane.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from eventbus.postgres.admin import State, Worker

Facts = dict[str, Any]
Stage = Literal["not matched", "not relayed", "no copy", "waiting", "running", "retrying", "parked", "dead", "done"]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a copy stands.

    ``what``: the stage in words. ``why``: why it is not moving, or why there is no copy. ``facts``: the same for
    programs, as far as they apply: position, ahead, host, pid, attempts, due_at, error and so on.
    """

    stage: Stage
    what: str
    why: tuple[str, ...] = ()
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Around:
    """What holds for every copy: the bus, its workers, and the lease in seconds after which they count as silent."""

    bus: State
    workers: list[Worker]
    consumers: dict[str, Facts]
    """By queue: the worker that claimed from it last."""
    lease: float

    @property
    def alive(self) -> int:
        """How many workers are not silent."""
        return sum(not self.silent(worker.heartbeat_age) for worker in self.workers)

    def silent(self, heartbeat_age: float | None) -> bool:
        """Whether a worker with this heartbeat has lost its lease, or signed off."""
        return heartbeat_age is None or heartbeat_age > self.lease


def standing(facts: Facts, around: Around) -> Standing:
    """Where one delivery stands."""
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


def no_standing(*, matched: bool, relayed: bool) -> Standing:
    """Where a queue stands that has no copy."""
    if not matched:
        return Standing("not matched", "no pattern of this queue matches the topic")
    if not relayed:
        return Standing("not relayed", "gets a copy once the event is relayed")
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
    return Standing("dead", what, (f"it gave up; to try again: eventbus dead-letters redrive {facts['letter']}",), more)


def _exception(facts: Facts, around: Around) -> Standing:
    if facts["state"] == "claimed":
        return _running(facts, around)
    attempts, crashes, due_in = facts["attempts"], facts["crashes"], facts["due_in"]
    more = {"attempts": attempts, "crashes": crashes, "due_at": facts["due_at"], "error": facts["last_error"]}
    blocked = _blocked(facts, around) if due_in <= 0 else ()
    if facts["state"] == "parked":
        return Standing("parked", "parked behind an earlier event of its key", blocked, more)
    due = f"due in {duration(due_in)}" if due_in > 0 else f"due since {duration(-due_in)}"
    if attempts == 0 and crashes == 0:
        return Standing("waiting", f"back in the queue, {due}", blocked, more)
    error = message_of(facts["last_error"])
    what = f"retrying after {_tries(attempts, crashes)}, {due}{': ' if error else ''}{error}"
    return Standing("retrying", what, blocked, more)


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
    reasons = stopped(around)
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
