"""The options of a subscription: which values are allowed, and which of them go together.

Before it: somebody wrote ``@subscribe(…)``. After it: :class:`~eventbus.consuming.subscriptions.Subscription` holds
them. Everything that is wrong is refused here, when the module of the handler is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeGuard

from eventbus.errors import ConfigurationError
from eventbus.retry import RetryPolicy

WhenExhausted = Literal["park", "skip"]
Start = Literal["latest", "earliest"]
RetryRules = tuple[tuple[type[BaseException], RetryPolicy], ...]
"""Exception classes with the policy of each, in the order in which they are asked."""

DEFAULT_RETRY: Final = RetryPolicy()
DEFAULT_BATCH_WAIT: Final = 0.1

_LONGEST_TIMEOUT: Final = 86_400.0
_LONGEST_BATCH_WAIT: Final = 3_600.0
_MOST_CONCURRENCY: Final = 10_000
_MOST_PRIORITIES: Final = 10
_LARGEST_BATCH: Final = 10_000


def checked_retry(retry: object) -> RetryPolicy:
    """The policy, or the default one for None."""
    if retry is None:
        return DEFAULT_RETRY
    if not isinstance(retry, RetryPolicy):
        raise ConfigurationError(f"retry={retry!r} must be a RetryPolicy, for example RetryPolicy(max_attempts=3)")
    return retry


def checked_retry_on(retry_on: object, policy: RetryPolicy) -> RetryRules | None:
    """The rules; classes without a policy of their own get ``policy``. None when none were given."""
    if retry_on is None:
        return None
    if not isinstance(retry_on, Mapping):
        return tuple((kind, policy) for kind in _exceptions("retry_on", retry_on))
    for kind, own in retry_on.items():
        if not isinstance(own, RetryPolicy):
            raise ConfigurationError(
                f"retry_on={{{_shown(kind)}: {own!r}}}: the value must be a RetryPolicy, for example "
                f"RetryPolicy(max_attempts=3)"
            )
    return tuple((kind, retry_on[kind]) for kind in _exceptions("retry_on", tuple(retry_on)))


def checked_discard_on(discard_on: object) -> tuple[type[BaseException], ...]:
    """The exception classes; none for None."""
    return () if discard_on is None else _exceptions("discard_on", discard_on)


def _exceptions(option: str, given: object) -> tuple[type[BaseException], ...]:
    kinds: tuple[Any, ...] = tuple(given) if isinstance(given, tuple | list) else (given,)
    if not kinds:
        raise ConfigurationError(f"{option} names no exception; leave it out, or name one: {option}=ConnectionError")
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ConfigurationError(
                f"{option}: {_shown(kind)} is no exception class; give a class or a tuple of classes, for example "
                f"{option}=(ConnectionError, TimeoutError)"
            )
    return kinds


def _shown(kind: object) -> str:
    return kind.__qualname__ if isinstance(kind, type) else repr(kind)


def check_flags(**flags: object) -> None:
    """Options that are on or off."""
    for option, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{option}={value!r} must be True or False")


def check_timeout(timeout: object) -> None:
    """Seconds, or None."""
    if timeout is not None and not (_is_number(timeout) and 0 < timeout <= _LONGEST_TIMEOUT):
        raise ConfigurationError(
            f"timeout={timeout!r} must be seconds above 0 and up to {_LONGEST_TIMEOUT:,.0f}, or None for no limit"
        )


def check_concurrency(concurrency: object) -> None:
    """A number of handlers, or None."""
    if concurrency is not None and not (_is_whole(concurrency) and 1 <= concurrency <= _MOST_CONCURRENCY):
        raise ConfigurationError(
            f"concurrency={concurrency!r} must be a whole number from 1 to {_MOST_CONCURRENCY:,}, "
            f"or None for the setting"
        )


def checked_when_exhausted(when_exhausted: object, *, ordered: bool) -> WhenExhausted:
    """``park`` for None."""
    if when_exhausted is None:
        return "park"
    if when_exhausted not in ("park", "skip"):
        raise ConfigurationError(
            f"when_exhausted={when_exhausted!r} must be 'park' (later events of the key wait for the dead letter) "
            f"or 'skip' (they go on)"
        )
    if not ordered:
        raise ConfigurationError(
            f"when_exhausted={when_exhausted!r} needs ordered=True: without an order no event waits for another"
        )
    return when_exhausted


def check_priorities(priorities: object, *, ordered: bool) -> None:
    """A number of levels, or None."""
    if priorities is None:
        return
    if not (_is_whole(priorities) and 2 <= priorities <= _MOST_PRIORITIES):
        raise ConfigurationError(
            f"priorities={priorities!r} must be a whole number of levels from 2 to {_MOST_PRIORITIES}, or None"
        )
    if ordered:
        raise ConfigurationError(
            "priorities and ordered=True contradict each other: an event of a higher priority would overtake its key; "
            "choose one"
        )


def checked_batch_wait(batch_wait: object, batch: object) -> float:
    """Seconds; the default for None. Checks ``batch`` too."""
    if batch is not None and not (_is_whole(batch) and 1 <= batch <= _LARGEST_BATCH):
        raise ConfigurationError(
            f"batch={batch!r} must be a whole number of events from 1 to {_LARGEST_BATCH:,}, or None for one at a time"
        )
    if batch_wait is None:
        return DEFAULT_BATCH_WAIT
    if batch is None:
        raise ConfigurationError(f"batch_wait={batch_wait!r} needs batch=…: without it no event waits for others")
    if not (_is_number(batch_wait) and 0 <= batch_wait <= _LONGEST_BATCH_WAIT):
        raise ConfigurationError(f"batch_wait={batch_wait!r} must be seconds from 0 to {_LONGEST_BATCH_WAIT:,.0f}")
    return float(batch_wait)


def checked_start(start: object) -> Start:
    """Where a new queue begins."""
    if start not in ("latest", "earliest"):
        raise ConfigurationError(
            f"start={start!r} must be 'latest' (events published from now on) or 'earliest' (all that are still kept)"
        )
    return start


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
