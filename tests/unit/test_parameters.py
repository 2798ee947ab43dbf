"""What each parameter gets: what a user would lose if a handler were called with the wrong thing."""

# The annotations of this module are text: handlers in such modules must work too.
from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Optional

import psycopg
import pytest
from pydantic import BaseModel

from eventbus.consuming.parameters import Argument, Scope, Terms, Unfit, arguments_of
from eventbus.event import Event

if TYPE_CHECKING:
    from fractions import Fraction


class Order(BaseModel):
    id: int


NO_EVENT: Any = None


def filled(function: Callable[..., Any], terms: Terms | None = None) -> list[str]:
    """``event``, ``payload`` or ``connection`` for each parameter, with the name of those that are passed by name."""
    plain = function.func if isinstance(function, functools.partial) else function
    arguments = arguments_of(function, Scope(globals(), getattr(plain, "__code__", None)), terms or Terms())
    return [_described(argument) for argument in arguments]


def _described(argument: Argument) -> str:
    kind = "connection" if argument.connection else "event" if argument.load is None else "payload"
    return kind if argument.keyword is None else f"{argument.keyword}={kind}"


def refusal(function: Callable[..., Any], terms: Terms | None = None) -> str:
    with pytest.raises(Unfit) as refused:
        filled(function, terms)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def unannotated(anything): ...  # type: ignore[no-untyped-def]
def takes_event(event: Event): ...  # type: ignore[no-untyped-def]
def takes_order(order: Order) -> None: ...
def takes_both(event: Event, order: Order) -> None: ...
def takes_both_turned(order: Order, event: Event) -> None: ...
def takes_dict_and_unannotated(data: dict, event): ...  # type: ignore[no-untyped-def,type-arg]
def by_name(*, order: Order, event: Event) -> None: ...
def mixed(order: Order, *, event: Event) -> None: ...
def positional_only(order: Order, event: Event, /) -> None: ...
def defaults(order: Order, event: Event, retries: int = 3, *, db: Nowhere = 1) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def variadic(*args): ...  # type: ignore[no-untyped-def]
def event_and_rest(event: Event, *args: Any, **kwargs: Any) -> None: ...
def maybe_event(event: Event | None) -> None: ...
def optional_event(event: Optional[Event]) -> None: ...  # noqa: UP045
def annotated_event(event: Annotated[Event, "meta"]) -> None: ...
def annotated_maybe_event(event: Annotated[Event | None, "meta"]) -> None: ...
def maybe_order(order: Order | None) -> None: ...
def annotated_order(order: Annotated[Order, "meta"]) -> None: ...
def orders(order: list[Order]) -> None: ...
def anything(payload: Any) -> None: ...
def unknown_result(order: Order) -> Fraction: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (unannotated, ["event"]),
        (takes_event, ["event"]),
        (takes_order, ["payload"]),
        (takes_both, ["event", "payload"]),
        (takes_both_turned, ["payload", "event"]),
        (takes_dict_and_unannotated, ["payload", "event"]),
        (by_name, ["order=payload", "event=event"]),
        (mixed, ["payload", "event=event"]),
        (positional_only, ["payload", "event"]),
        (defaults, ["payload", "event"]),
        (variadic, ["event"]),
        (event_and_rest, ["event"]),
        (maybe_event, ["event"]),
        (optional_event, ["event"]),
        (annotated_event, ["event"]),
        (annotated_maybe_event, ["event"]),
        (maybe_order, ["payload"]),
        (annotated_order, ["payload"]),
        (orders, ["payload"]),
        (anything, ["payload"]),
        (unknown_result, ["payload"]),
        (lambda event, i=3: None, ["event"]),
        (functools.partial(takes_both, order=Order(id=1)), ["event"]),
        (functools.partial(takes_both, NO_EVENT), ["payload"]),
        ([].append, ["event"]),
        (print, ["event"]),
    ],
)
def test_each_parameter_gets_what_its_annotation_says(function: Callable[..., Any], expected: list[str]) -> None:
    assert filled(function) == expected


def test_a_decorated_handler_is_filled_like_the_function_inside() -> None:
    @functools.wraps(takes_both_turned)
    def passes_through(*args: Any, **kwargs: Any) -> None: ...

    @functools.wraps(takes_both)
    def supplies_the_order(event: Event) -> None: ...

    assert filled(passes_through) == ["payload", "event"]
    assert filled(supplies_the_order) == ["event"]


def test_types_of_the_surrounding_function_are_found() -> None:
    class Local(BaseModel):
        id: int

    def handle(order: Local) -> None: ...

    assert filled(handle) == ["payload"]


def no_parameter() -> None: ...
def only_defaults(event: Event = None) -> None: ...  # type: ignore[assignment]
def only_keywords(**kwargs: Any) -> None: ...
def method(self, order: Order) -> None: ...  # type: ignore[no-untyped-def]
def class_method(cls) -> None: ...  # type: ignore[no-untyped-def]
def two_unannotated(first, second): ...  # type: ignore[no-untyped-def]
def two_events(first: Event, second: Event) -> None: ...
def two_payloads(topic: str, payload: dict[str, Any]) -> None: ...
def event_or_order(either: Event | Order) -> None: ...
def connection(event: Event, conn: psycopg.Connection) -> None: ...
def async_connection(event: Event, conn: psycopg.AsyncConnection[Any]) -> None: ...
def maybe_connection(event: Event, conn: psycopg.Connection[Any] | None) -> None: ...
def only_for_the_type_checker(amount: Fraction) -> None: ...
def never_defined(amount: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def wrong_attribute(amount: typing.Nothing) -> None: ...  # type: ignore[name-defined]
def not_a_type(amount: 5) -> None: ...  # type: ignore[valid-type]
def opaque(client: Scope | Client) -> None: ...


class Client:
    pass


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (no_parameter, "no parameter for the event"),
        (only_defaults, "no parameter for the event"),
        (only_keywords, "no parameter for the event"),
        (method, "method without its object"),
        (class_method, "method without its object"),
        (two_unannotated, "parameters 'first' and 'second' would all get the event"),
        (two_events, "parameters 'first' and 'second' would all get the event"),
        (two_payloads, "parameters 'topic' and 'payload' would all get the payload"),
        (event_or_order, "'either' mixes Event with a payload type"),
        (connection, "'conn' asks for a database connection, which needs transactional=True"),
        (async_connection, "'conn' asks for a database connection"),
        (maybe_connection, "'conn' asks for a database connection"),
        (only_for_the_type_checker, "'Fraction' is not defined where the handler is registered"),
        (never_defined, "'Nowhere' is not defined where the handler is registered"),
        (wrong_attribute, "annotation 'typing.Nothing' of parameter 'amount': it cannot be evaluated"),
        (not_a_type, "no payload can become what parameter 'amount' asks for"),
        (opaque, "no payload can become what parameter 'client' asks for"),
        ({}.update, "its parameters cannot be read"),
    ],
)
def test_a_function_that_cannot_be_called_with_one_event_is_refused_with_what_to_do(
    function: Callable[..., Any], said: str
) -> None:
    assert said in refusal(function)


def two_connections(event: Event, first: psycopg.Connection, second: psycopg.Connection) -> None: ...
def no_event(conn: psycopg.Connection) -> None: ...
def mixed_connection(event: Event, conn: psycopg.Connection | Order) -> None: ...
def by_name_only(order: Order, *, conn: psycopg.Connection[Any]) -> None: ...


def test_a_transactional_handler_gets_the_connection_of_its_kind() -> None:
    plain, on_the_loop = Terms(transactional=True), Terms(transactional=True, is_async=True)
    assert filled(connection, plain) == ["event", "connection"]
    assert filled(maybe_connection, plain) == ["event", "connection"]
    assert filled(by_name_only, plain) == ["payload", "conn=connection"]
    assert filled(async_connection, on_the_loop) == ["event", "connection"]
    assert filled(takes_both, plain) == ["event", "payload"]
    assert "a plain handler gets a psycopg.Connection" in refusal(async_connection, plain)
    assert "an async handler gets a psycopg.AsyncConnection" in refusal(connection, on_the_loop)
    assert "'conn' has the wrong type of connection" in refusal(mixed_connection, plain)
    assert "'first' and 'second' would all get the connection" in refusal(two_connections, plain)
    assert "no parameter for the event" in refusal(no_event, plain)


def several(events: list[Event]) -> None: ...
def several_orders(events: typing.Sequence[Event], *, orders: list[Order]) -> None: ...
def several_maybe(orders: list[Order | None] | None) -> None: ...
def several_with_connection(payloads: list[dict[str, Any]], conn: psycopg.Connection) -> None: ...
def bare_list(orders: list) -> None: ...  # type: ignore[type-arg]
def tuples(orders: tuple[Order, ...]) -> None: ...
def list_of_either(orders: list[Order | Event]) -> None: ...
def two_lists(orders: list[Order], payloads: list[dict[str, Any]]) -> None: ...


def test_a_handler_of_batches_gets_lists() -> None:
    batch = Terms(batch=True, transactional=True)
    assert filled(several, batch) == ["event"]
    assert filled(several_orders, batch) == ["event", "orders=payload"]
    assert filled(several_maybe, batch) == ["payload"]
    assert filled(several_with_connection, batch) == ["payload", "connection"]
    assert filled(unannotated, batch) == ["event"]
    assert filled(variadic, batch) == ["event"]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (takes_event, "'event' must take several events because of batch=…: annotate it as list[Event]"),
        (takes_order, "'order' must take several events because of batch="),
        (bare_list, "'orders' must take several events because of batch="),
        (tuples, "'orders' must take several events because of batch="),
        (list_of_either, "'orders' mixes Event with a payload type"),
        (two_lists, "'orders' and 'payloads' would all get the payload"),
    ],
)
def test_a_handler_that_cannot_take_a_batch_is_refused_at_decoration(function: Callable[..., Any], said: str) -> None:
    assert said in refusal(function, Terms(batch=True))


def test_a_list_of_events_without_batch_is_refused_with_what_to_add() -> None:
    assert "'events' asks for several events, which needs batch=" in refusal(several)
