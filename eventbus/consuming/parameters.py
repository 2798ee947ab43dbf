"""What each parameter of a handler gets: the event, its payload, or the connection of its transaction.

Decided once, from the annotations, when the function is registered. Before it: ``subscriptions`` has a function.
After it: ``handlers`` builds the call, and ``payloads`` turns the stored JSON into what an annotation asks for.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from psycopg import AsyncConnection, Connection

from eventbus.consuming.payloads import Load, NoPayloadType, loader
from eventbus.event import Event

_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Unfit(Exception):
    """Why a function cannot be called with one event; ``handlers`` adds which function it is."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One parameter to fill: with the connection, with the event when ``load`` is None, else with its payload.

    ``load`` makes of the event what the parameter asks for. ``keyword`` is the parameter's name if it can only be
    passed by name.
    """

    keyword: str | None
    load: Load | None
    connection: bool = False


@dataclass(frozen=True, slots=True)
class Terms:
    """How the function will be called: inside a transaction of the bus, on the event loop, with several events."""

    transactional: bool = False
    is_async: bool = False
    batch: bool = False


@dataclass(frozen=True, slots=True)
class Scope:
    """Where annotations that are text are looked up: the globals of the function, then what surrounds its code."""

    names: dict[str, Any]
    code: types.CodeType | None


def arguments_of(function: Callable[..., Any], scope: Scope, terms: Terms) -> tuple[Argument, ...]:
    """The parameters of ``function`` that the bus fills, in order; raises :class:`Unfit`.

    Parameters with a default and ``*args`` / ``**kwargs`` are left alone. At most one parameter takes the event, at
    most one the payload and at most one the connection; a function that only has ``*args`` gets the event. With
    ``terms.batch`` each of them stands for a list, and ``load`` makes one item of it.
    """
    parameters = list(_signature(function).parameters.values())
    required = [each for each in parameters if each.default is each.empty and each.kind not in _VARIADIC]
    if not required:
        if any(each.kind is each.VAR_POSITIONAL for each in parameters):
            return (Argument(None, None),)
        raise Unfit("it has no parameter for the event; add one without a default, for example 'event: Event'")
    if required[0].name in ("self", "cls") and required[0].annotation is inspect.Parameter.empty:
        raise Unfit("it is a method without its object; subscribe the method of an object, subscribe(…)(thing.method)")
    arguments = tuple(_argument(each, scope, terms) for each in required)
    _refuse_doubles(required, arguments)
    return arguments


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """What can be passed: the function's own parameters, or those it wraps if it only says ``*args, **kwargs``."""
    try:
        try:
            own = inspect.signature(function, follow_wrapped=False)
        except ValueError:
            return inspect.signature(function)
        if all(each.kind in _VARIADIC for each in own.parameters.values()):
            return inspect.signature(function)
        return own
    except (ValueError, TypeError) as error:
        raise Unfit(f"its parameters cannot be read ({error}); wrap it in a function of one 'event'") from None


def _argument(parameter: inspect.Parameter, scope: Scope, terms: Terms) -> Argument:
    keyword = parameter.name if parameter.kind is parameter.KEYWORD_ONLY else None
    if parameter.annotation is parameter.empty:
        return Argument(keyword, None)
    annotation = _resolve(parameter, scope)
    members = _members(annotation)
    if any(_is_connection(each) for each in members):
        _check_connection(parameter.name, members, terms)
        return Argument(keyword, None, connection=True)
    if terms.batch:
        annotation = _item(parameter, members)
        members = _members(annotation)
    if Event not in members:
        return Argument(keyword, _payload(parameter, annotation))
    if len(members) > 1:
        raise Unfit(f"parameter '{parameter.name}' mixes Event with a payload type; use one parameter for each")
    return Argument(keyword, None)


def _item(parameter: inspect.Parameter, members: Sequence[Any]) -> Any:
    """What a parameter of a handler of batches asks for, for each event."""
    if len(members) == 1 and get_origin(members[0]) in (list, Sequence):
        return get_args(members[0])[0]
    raise Unfit(
        f"parameter '{parameter.name}' must take several events because of batch=…: annotate it as list[Event], or as "
        f"a list of the payload's type, such as list[dict]"
    )


def _check_connection(name: str, members: Sequence[Any], terms: Terms) -> None:
    if not terms.transactional:
        raise Unfit(
            f"parameter '{name}' asks for a database connection, which needs transactional=True: add it to the "
            f"decorator, or open a connection inside the handler"
        )
    wanted, kind = (AsyncConnection, "an async") if terms.is_async else (Connection, "a plain")
    if any((get_origin(each) or each) is not wanted for each in members):
        raise Unfit(
            f"parameter '{name}' has the wrong type of connection: {kind} handler gets a psycopg.{wanted.__name__}"
        )


def _payload(parameter: inspect.Parameter, annotation: Any) -> Load:
    if any(get_origin(each) in (list, Sequence) and Event in get_args(each) for each in _members(annotation)):
        raise Unfit(
            f"parameter '{parameter.name}' asks for several events, which needs batch=…: add it to the decorator"
        )
    try:
        return loader(annotation)
    except NoPayloadType as error:
        raise Unfit(
            f"no payload can become what parameter '{parameter.name}' asks for ({error}); use Event, dict, a pydantic "
            f"model, a dataclass or another type that pydantic can validate, or give the parameter a default"
        ) from None


def _refuse_doubles(required: Sequence[inspect.Parameter], arguments: Sequence[Argument]) -> None:
    for kind in ("event", "payload", "connection"):
        names = [p.name for p, a in zip(required, arguments, strict=True) if _kind(a) == kind]
        if len(names) > 1:
            raise Unfit(
                f"parameters {' and '.join(map(repr, names))} would all get the {kind}; 'Event' or no annotation "
                f"means the event, a connection that of the transaction, any other annotation the payload: keep one "
                f"for each, give the others a default"
            )
    if all(argument.connection for argument in arguments):
        raise Unfit("it has no parameter for the event; add one without a default, for example 'event: Event'")


def _kind(argument: Argument) -> str:
    if argument.connection:
        return "connection"
    return "event" if argument.load is None else "payload"


def _resolve(parameter: inspect.Parameter, scope: Scope) -> Any:
    try:
        try:
            return _evaluate(parameter.annotation, scope.names, None)
        except NameError:
            return _evaluate(parameter.annotation, scope.names, _locals_around(scope.code))
    except NameError as error:
        problem = (
            f"'{error.name}' is not defined where the handler is registered; define or import it above the handler, "
            f"and not only under 'if TYPE_CHECKING:'"
        )
    except Exception as error:  # noqa: BLE001 - evaluating an annotation runs the user's code
        problem = f"it cannot be evaluated ({type(error).__name__}: {error}); name a type that exists at run time"
    raise Unfit(f"annotation {parameter.annotation!r} of parameter '{parameter.name}': {problem}")


def _evaluate(annotation: Any, names: dict[str, Any], local: dict[str, Any] | None) -> Any:
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    return get_type_hints(holder, names, local, include_extras=True)["it"]


def _locals_around(code: types.CodeType | None) -> dict[str, Any]:
    """Local variables of the function in whose body ``code`` stands, if that function is running now."""
    frame = inspect.currentframe()
    while frame is not None and code is not None:
        if any(constant is code for constant in frame.f_code.co_consts):
            return dict(frame.f_locals)
        frame = frame.f_back
    return {}


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types a union is made of, without None; of anything else the type itself, without Annotated."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        parts = (_members(part) for part in get_args(annotation) if part is not type(None))
        return tuple(member for part in parts for member in part)
    return (annotation,)


def _is_connection(annotation: Any) -> bool:
    plain = get_origin(annotation) or annotation
    return isinstance(plain, type) and issubclass(plain, Connection | AsyncConnection)
