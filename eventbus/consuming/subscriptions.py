"""Which handler wants which topics: the registry that decorators fill and the consumer reads.

Before it: a user's module says ``@subscribe(…)``. After it: the engine gets a queue per subscription and the
consumer runs its handler. Handlers are held by strong references for as long as the registry lives.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from eventbus.consuming.handlers import Definition, Handler, adapt
from eventbus.errors import ConfigurationError, DuplicateQueue, InvalidHandler, InvalidTopic
from eventbus.retry import RetryPolicy
from eventbus.topics import validate_pattern

Function = TypeVar("Function", bound=Callable[..., Any])

_LONGEST_TIMEOUT: Final = 86_400.0
_MOST_CONCURRENCY: Final = 10_000
_DEFAULT_RETRY: Final = RetryPolicy()


@dataclass(frozen=True, slots=True)
class Subscription:
    """One queue: its name, the patterns that feed it, and how its handler is run.

    ``timeout`` is in seconds, None for none. ``concurrency`` is how many handlers may run at once in one process,
    None for the setting.
    """

    name: str
    patterns: tuple[str, ...]
    handler: Handler
    retry: RetryPolicy = _DEFAULT_RETRY
    timeout: float | None = None
    concurrency: int | None = None


class Subscriptions:
    """The subscriptions of one bus, in the order in which they were made."""

    def __init__(self) -> None:
        self._by_name: dict[str, Subscription] = {}

    def subscribe(
        self,
        *patterns: str,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | None = None,
        concurrency: int | None = None,
    ) -> Callable[[Function], Function]:
        """Decorate a function as the handler of a queue; the function itself is returned unchanged.

        Raises at decoration, and registers nothing, for an invalid pattern, name or option, for a function that
        cannot be a handler, and :class:`~eventbus.errors.DuplicateQueue` for a name that is taken. The same function
        object under the same name again adds its patterns to the queue, if the options are the same.
        """
        wanted = _checked_patterns(patterns)
        policy = _checked_retry(retry)
        _check_timeout(timeout)
        _check_concurrency(concurrency)

        def decorate(function: Function) -> Function:
            handler = adapt(function, name)
            if timeout is not None and not handler.is_async:
                raise InvalidHandler(
                    f"{handler.definition} cannot have timeout={timeout!r}: a plain function runs in a thread, which "
                    "nothing can stop; make it async def, or give its network calls their own timeouts"
                )
            self._add(Subscription(handler.name, wanted, handler, policy, timeout, concurrency))
            return function

        return decorate

    def only(self, names: Iterable[str]) -> tuple[Subscription, ...]:
        """The subscriptions with these queue names, each once; an unknown name is a ConfigurationError."""
        chosen = dict.fromkeys(names)
        for name in chosen:
            if name not in self._by_name:
                raise ConfigurationError(_unknown_queue(name, list(self._by_name)))
        return tuple(self._by_name[name] for name in chosen)

    def __iter__(self) -> Iterator[Subscription]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def _add(self, new: Subscription) -> None:
        self._refuse_second_import(new.handler.definition)
        old = self._by_name.get(new.name)
        if old is None:
            self._by_name[new.name] = new
            return
        if not old.handler.definition.is_same_function(new.handler.definition):
            raise DuplicateQueue(_clash(new.name, old.handler.definition, new.handler.definition))
        if (old.retry, old.timeout, old.concurrency) != (new.retry, new.timeout, new.concurrency):
            raise DuplicateQueue(
                f"queue '{new.name}' of {new.handler.definition} is subscribed twice with different options; "
                f"give the same options both times, or one of them its own name=…"
            )
        self._by_name[new.name] = replace(old, patterns=tuple(dict.fromkeys(old.patterns + new.patterns)))

    def _refuse_second_import(self, new: Definition) -> None:
        for subscription in self._by_name.values():
            old = subscription.handler.definition
            if old.module != new.module and old.is_same_code(new):
                raise DuplicateQueue(
                    f"{new.file} was imported under two names, '{old.module}' and '{new.module}', so that "
                    f"{new.qualname} (line {new.line}) would get two queues; import it under one name everywhere"
                )


def _clash(name: str, old: Definition, new: Definition) -> str:
    if old.is_same_code(new):
        return (
            f"queue '{name}' is claimed by two functions that {new} made, one after the other; give each its own "
            f"name=… (a module that is reloaded needs a new bus)"
        )
    return f"queue '{name}' is claimed by {old} and by {new}; give one of them another name=…"


def _checked_patterns(patterns: tuple[Any, ...]) -> tuple[str, ...]:
    if not patterns or callable(patterns[0]):
        raise ConfigurationError("subscribe needs the topics to handle, for example @subscribe('orders.created')")
    if isinstance(patterns[0], list | tuple | set | frozenset):
        raise InvalidTopic("give several patterns one after the other: subscribe('orders.*', 'refunds.#')")
    return tuple(dict.fromkeys(validate_pattern(pattern) for pattern in patterns))


def _checked_retry(retry: object) -> RetryPolicy:
    if retry is None:
        return _DEFAULT_RETRY
    if not isinstance(retry, RetryPolicy):
        raise ConfigurationError(f"retry={retry!r} must be a RetryPolicy, for example RetryPolicy(max_attempts=3)")
    return retry


def _check_timeout(timeout: object) -> None:
    if timeout is None:
        return
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout <= _LONGEST_TIMEOUT:  # type: ignore[operator]
        raise ConfigurationError(
            f"timeout={timeout!r} must be seconds above 0 and up to {_LONGEST_TIMEOUT:,.0f}, or None for no limit"
        )


def _check_concurrency(concurrency: object) -> None:
    if concurrency is None:
        return
    is_whole = isinstance(concurrency, int) and not isinstance(concurrency, bool)
    if not is_whole or not 1 <= concurrency <= _MOST_CONCURRENCY:  # type: ignore[operator]
        raise ConfigurationError(
            f"concurrency={concurrency!r} must be a whole number from 1 to {_MOST_CONCURRENCY:,}, "
            f"or None for the setting"
        )


def _unknown_queue(name: str, known: list[str]) -> str:
    if not known:
        return f"unknown queue '{name}'; no handler is subscribed at all"
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"unknown queue '{name}'; {hint}known: {', '.join(sorted(known))}"
