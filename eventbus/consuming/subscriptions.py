"""Which handler wants which topics: the registry that decorators fill and the consumer reads.

Before it: a user's module says ``@subscribe(…)``. After it: the engine gets a queue per subscription and the
consumer runs its handler. Handlers are held by strong references for as long as the registry lives.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from eventbus.consuming import options
from eventbus.consuming.handlers import Definition, Handler, adapt
from eventbus.errors import ConfigurationError, DuplicateQueue, InvalidTopic
from eventbus.retry import RetryPolicy
from eventbus.topics import validate_pattern

Function = TypeVar("Function", bound=Callable[..., Any])
Exceptions = type[BaseException] | tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class Subscription:
    """One queue: its name, the patterns that feed it, and how its handler is run.

    Times are in seconds. ``timeout`` None: no limit; ``concurrency`` None: the setting; ``batch`` None: the handler
    gets one event at a time. ``retry_on`` None: every exception is retried by ``retry``; otherwise those of its rules,
    and what matches none is a dead letter.
    """

    name: str
    patterns: tuple[str, ...]
    handler: Handler
    retry: RetryPolicy = options.DEFAULT_RETRY
    timeout: float | None = None
    concurrency: int | None = None
    retry_on: options.RetryRules | None = None
    discard_on: tuple[type[BaseException], ...] = ()
    idempotent: bool = False
    transactional: bool = False
    ordered: bool = False
    when_exhausted: options.WhenExhausted = "park"
    priorities: int | None = None
    batch: int | None = None
    batch_wait: float = options.DEFAULT_BATCH_WAIT
    start: options.Start = "latest"

    @property
    def tracking(self) -> Literal["none", "idempotent", "transactional"]:
        """How executions are recorded; a transactional handler needs nothing more to be idempotent."""
        if self.transactional:
            return "transactional"
        return "idempotent" if self.idempotent else "none"

    @property
    def kind(self) -> Literal["plain", "ordered", "prioritized"]:
        """What splits the queue into lanes."""
        if self.ordered:
            return "ordered"
        return "plain" if self.priorities is None else "prioritized"


class Subscriptions:
    """The subscriptions of one bus, in the order in which they were made."""

    def __init__(self) -> None:
        self._by_name: dict[str, Subscription] = {}

    def subscribe(  # noqa: PLR0913 - the options of the public interface
        self,
        *patterns: str,
        name: str | None = None,
        idempotent: bool = False,
        transactional: bool = False,
        ordered: bool = False,
        when_exhausted: options.WhenExhausted | None = None,
        priorities: int | None = None,
        batch: int | None = None,
        batch_wait: float | None = None,
        retry: RetryPolicy | None = None,
        retry_on: Exceptions | Mapping[type[BaseException], RetryPolicy] | None = None,
        discard_on: Exceptions | None = None,
        timeout: float | None = None,
        concurrency: int | None = None,
        start: options.Start = "latest",
    ) -> Callable[[Function], Function]:
        """Decorate a function as the handler of a queue; the function itself is returned unchanged.

        Raises at decoration, and registers nothing, for an invalid pattern, name or option, for a function that
        cannot be a handler, and :class:`~eventbus.errors.DuplicateQueue` for a name that is taken. The same function
        object under the same name again adds its patterns to the queue, if the options are the same.
        """
        wanted = _checked_patterns(patterns)
        policy = options.checked_retry(retry)
        options.check_flags(idempotent=idempotent, transactional=transactional, ordered=ordered)
        options.check_priorities(priorities, ordered=ordered)
        options.check_timeout(timeout)
        options.check_concurrency(concurrency)
        subscription = functools.partial(
            Subscription,
            patterns=wanted,
            retry=policy,
            timeout=timeout,
            concurrency=concurrency,
            retry_on=options.checked_retry_on(retry_on, policy),
            discard_on=options.checked_discard_on(discard_on),
            idempotent=idempotent,
            transactional=transactional,
            ordered=ordered,
            when_exhausted=options.checked_when_exhausted(when_exhausted, ordered=ordered),
            priorities=priorities,
            batch=batch,
            batch_wait=options.checked_batch_wait(batch_wait, batch),
            start=options.checked_start(start),
        )

        def decorate(function: Function) -> Function:
            handler = adapt(function, name, transactional=transactional, batch=batch is not None)
            self._add(subscription(name=handler.name, handler=handler))
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
        if replace(new, patterns=old.patterns, handler=old.handler) != old:
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


def _unknown_queue(name: str, known: list[str]) -> str:
    if not known:
        return f"unknown queue '{name}'; no handler is subscribed at all"
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"unknown queue '{name}'; {hint}known: {', '.join(sorted(known))}"
