"""From what a handler returned or raised to the verdict that the engine stores.

Before it: ``execution`` has called the handler. After it: the engine settles the verdict. Whether and when a failed
event runs again is decided here, by the rules and the policies of the subscription; so is what the log says of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, assert_never

from eventbus.consuming.results import Failure, failure
from eventbus.consuming.subscriptions import Subscription
from eventbus.errors import PayloadMismatch
from eventbus.event import Event
from eventbus.retry import RetryPolicy
from eventbus.transport import DONE, RELEASED, DeadLetter, Discard, Done, Outcome, Released, Retry, Verdict

log = logging.getLogger("eventbus")


class Verdicts:
    """The verdicts of one queue. ``random`` returns numbers from 0 to 1. Nothing here raises."""

    def __init__(self, subscription: Subscription, random: Callable[[], float]) -> None:
        self._subscription = subscription
        self._random = random
        self.later = False
        """Somebody else may decide otherwise about what failed, so that it is logged by whoever knows what stands."""

    def of(self, outcome: Outcome, event: Event) -> Verdict:
        """What the outcome of a handler means for this event."""
        match outcome:
            case Done():
                return DONE
            case Discard(reason):
                _say(logging.INFO, "discarded %s: %s", event, reason, about=event)
                return Verdict("done", reason=reason, kind="discarded")
            case DeadLetter(reason):
                return self._dead(event, reason or "the handler gave up", None)
            case Retry(after, reason):
                problem = None if reason is None else Failure("Retry", reason, "")
                return self._retry(self._subscription.retry, event, after, problem)
            case Released():
                return RELEASED
            case _:
                assert_never(outcome)

    def failed(self, error: BaseException, event: Event) -> Verdict:
        """What an exception means for this event."""
        problem = failure(error)
        if any(_matches(error, kind) for kind in self._subscription.discard_on):
            _say(logging.INFO, "discarded %s: %s", event, _brief(problem), about=event)
            return Verdict("done", reason=_brief(problem), kind="discarded")
        policy = self._policy(error)
        if policy is not None:
            return self._retry(policy, event, None, problem)
        if issubclass(type(error), PayloadMismatch):
            return self._dead(event, "payload mismatch", problem)
        return self._dead(event, f"not retried: no rule of retry_on names {problem.type}", problem)

    def _policy(self, error: BaseException) -> RetryPolicy | None:
        """The policy that decides when it is tried again; None: never."""
        rules = self._subscription.retry_on
        if rules is None:
            return None if issubclass(type(error), PayloadMismatch) else self._subscription.retry
        return next((policy for kind, policy in rules if _matches(error, kind)), None)

    def _retry(self, policy: RetryPolicy, event: Event, after: float | None, problem: Failure | None) -> Verdict:
        if policy.exhausted(event.attempt):
            attempts = "1 attempt" if event.attempt == 1 else f"{event.attempt} attempts"
            return self._dead(event, f"gave up after {attempts}", problem)
        delay = policy.delay(event.attempt, self._random) if after is None else after
        say = functools.partial(
            _say, logging.WARNING, "attempt %d of %d failed, again in %.1f s: %s: %s",
            event.attempt, policy.max_attempts, delay, event, _brief(problem), about=event,
        )  # fmt: skip
        return self._said(Verdict("retry", delay=delay, error=_stored(problem), say=say))

    def _dead(self, event: Event, reason: str, problem: Failure | None) -> Verdict:
        message = "dead letter (%s): %s: %s"
        say = functools.partial(_say, logging.ERROR, message, reason, event, _brief(problem), about=event)
        return self._said(Verdict("dead", reason=reason, error=_stored(problem), say=say))

    def _said(self, verdict: Verdict) -> Verdict:
        """Log it now, unless somebody else may decide otherwise."""
        if verdict.say is not None and not self.later:
            verdict.say()
            return replace(verdict, say=None)
        return verdict


def warn_of_batch(events: Sequence[Event], why: BaseException | str) -> None:
    """The call for several events failed, and each of them is run again by itself."""
    _say(
        logging.WARNING, "the handler failed with a batch of %d events, which now run one by one: %s: %s",
        len(events), events[0], why if isinstance(why, str) else _brief(failure(why)), about=events[0],
    )  # fmt: skip


def _matches(error: BaseException, kind: type[BaseException]) -> bool:
    """A payload that does not fit is matched by a rule that names it, not by one for ``Exception``.

    Read from its type, because ``isinstance`` asks the exception itself, which may raise.
    """
    if issubclass(type(error), PayloadMismatch) and not issubclass(kind, PayloadMismatch):
        return False
    return kind in type(error).__mro__


def _say(level: int, message: str, *values: object, about: Event) -> None:
    """Log, whatever the program's filters and handlers of logging raise: a verdict does not depend on them."""
    with contextlib.suppress(Exception):
        log.log(level, message, *values, extra=_about(about))


def _about(event: Event) -> dict[str, Any]:
    return {
        "queue": event.queue, "topic": event.topic, "event_id": str(event.event_id), "attempt": event.attempt,
    }  # fmt: skip


def _brief(problem: Failure | None) -> str:
    return "no error" if problem is None else f"{problem.type}: {problem.message}"[:500]


def _stored(problem: Failure | None) -> dict[str, str] | None:
    if problem is None:
        return None
    return {"type": problem.type, "message": problem.message, "traceback": problem.traceback}
