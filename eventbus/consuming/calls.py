"""The call of a handler: the cheapest one that fills its parameters.

Before it: ``parameters`` has decided what each parameter gets. After it: ``handlers`` keeps the call, and every
delivery goes through it. A handler that only takes the event is its own call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eventbus.consuming.parameters import Argument
from eventbus.consuming.payloads import Load
from eventbus.event import Event

Call = Callable[..., Any]
"""``call(event)``, or ``call(event, connection)`` if one of the parameters is the connection."""


def specialise(function: Callable[..., Any], arguments: Sequence[Argument]) -> Call:
    """The cheapest call for the parameters that have to be filled."""
    if any(argument.connection for argument in arguments):
        return _with_connection(function, arguments)
    if any(argument.keyword is not None for argument in arguments):
        return _by_keyword(function, arguments)
    match [argument.load for argument in arguments]:
        case [None]:
            return function
        case [load] if load is not None:
            return _payload_only(function, load)
        case [None, load] if load is not None:
            return _event_and_payload(function, load)
        case [load, None] if load is not None:
            return _payload_and_event(function, load)
        case _:
            raise AssertionError("arguments_of allows one event and one payload")


def specialise_batch(function: Callable[..., Any], arguments: Sequence[Argument]) -> Call:
    """The call of a handler of batches: ``call(events, payloads)``, or ``call(events, payloads, connection)``."""
    positional = [argument for argument in arguments if argument.keyword is None]
    named = [(argument.keyword, argument) for argument in arguments if argument.keyword is not None]

    def call(events: list[Event], payloads: list[Any], connection: Any = None) -> Any:
        def filled(argument: Argument) -> Any:
            if argument.connection:
                return connection
            return events if argument.load is None else payloads

        return function(*map(filled, positional), **{keyword: filled(argument) for keyword, argument in named})

    return call


def _payload_only(function: Callable[..., Any], load: Load) -> Call:
    def call(event: Event) -> Any:
        return function(load(event))

    return call


def _event_and_payload(function: Callable[..., Any], load: Load) -> Call:
    def call(event: Event) -> Any:
        return function(event, load(event))

    return call


def _payload_and_event(function: Callable[..., Any], load: Load) -> Call:
    def call(event: Event) -> Any:
        return function(load(event), event)

    return call


def _by_keyword(function: Callable[..., Any], arguments: Sequence[Argument]) -> Call:
    positional = [argument.load for argument in arguments if argument.keyword is None]
    named = [(argument.keyword, argument.load) for argument in arguments if argument.keyword is not None]

    def call(event: Event) -> Any:
        return function(
            *[event if load is None else load(event) for load in positional],
            **{keyword: event if load is None else load(event) for keyword, load in named},
        )

    return call


def _with_connection(function: Callable[..., Any], arguments: Sequence[Argument]) -> Call:
    positional = [argument for argument in arguments if argument.keyword is None]
    named = [(argument.keyword, argument) for argument in arguments if argument.keyword is not None]

    def call(event: Event, connection: Any) -> Any:
        return function(
            *[_filled(argument, event, connection) for argument in positional],
            **{keyword: _filled(argument, event, connection) for keyword, argument in named},
        )

    return call


def _filled(argument: Argument, event: Event, connection: Any) -> Any:
    if argument.connection:
        return connection
    return event if argument.load is None else argument.load(event)
