"""How the call of a handler went, in the words of a span. Pure; ``consuming`` writes it down.

A call fails if it raises, and if it returns ``Retry`` or ``DeadLetter``: both are failed attempts. ``Discard`` is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from eventbus import DeadLetter, Discard, Retry
from eventbus.plugins import Call
from eventbus_opentelemetry.conventions import OTHER, class_name


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came of one event, or of one call."""

    outcome: str | None
    """``done``, ``discarded``, ``retry``, ``dead``, ``failed`` if it raised (what follows is decided later),
    ``cancelled``, ``mixed`` for a batch; None if what the handler returned is still awaited."""
    error_type: str | None = None
    """Set if it failed: the class of what it raised, ``retry`` or ``dead_letter``."""
    description: str | None = None
    """Of the failure."""
    reason: str | None = None
    """That the handler gave."""
    error: BaseException | None = None


def judge(call: Call, raised: BaseException | None) -> Judgement:
    """The judgement of a call that has ended; of a batch, that of all of its events."""
    if raised is not None:
        return judge_one(raised)
    each = [judge_one(outcome) for outcome in call.outcomes]
    if not each:
        return Judgement(None)
    return each[0] if len(each) == 1 else _together(each)


def judge_one(outcome: object) -> Judgement:
    """The judgement of one event."""
    match outcome:
        case asyncio.CancelledError():
            return Judgement("cancelled", class_name(outcome), "the handler was cancelled")
        case BaseException():
            return Judgement("failed", class_name(outcome), str(outcome), error=outcome)
        case Retry(reason=reason):
            return Judgement("retry", "retry", reason or "the handler asked for a retry", reason)
        case DeadLetter(reason=reason):
            return Judgement("dead", "dead_letter", reason or "the handler gave the event up", reason)
        case Discard(reason=reason):
            return Judgement("discarded", reason=reason)
        case _:
            return Judgement("done")


def _together(each: Sequence[Judgement]) -> Judgement:
    outcomes = {judgement.outcome for judgement in each}
    outcome = outcomes.pop() if len(outcomes) == 1 else "mixed"
    failures = [judgement for judgement in each if judgement.error_type is not None]
    if not failures:
        return Judgement(outcome)
    types = {judgement.error_type for judgement in failures}
    error_type = types.pop() if len(types) == 1 else OTHER
    return Judgement(outcome, error_type, f"{len(failures)} of {len(each)} events failed")
