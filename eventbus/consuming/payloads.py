"""From the stored JSON text of an event to the type that a handler asks for.

The loader of a type is built once, when the handler is registered, and called for each event. pydantic validates
straight from the text, so that dates, decimals, UUIDs and nested models come back as what the annotation says and
integers of any size stay exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from eventbus.errors import PayloadMismatch
from eventbus.event import Event

Load = Callable[[Event], Any]

_MOST_PROBLEMS: Final = 10
_LONGEST_STEP: Final = 100
_LONG_NUMBER: Final = re.compile(r"[0-9][0-9.]{15}")


class NoPayloadType(Exception):
    """Why pydantic cannot validate a payload for an annotation; one line."""


def loader(annotation: Any) -> Load:
    """What turns an event's payload into ``annotation``; raises :class:`NoPayloadType`.

    ``Any`` gets the decoded JSON as it is, ``dict`` too if it is an object. The loader raises
    :class:`~eventbus.errors.PayloadMismatch`, which tells where the payload does not fit and never what it holds.
    """
    if annotation is Any:
        return _decoded
    if annotation is dict:
        return _decoded_object
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        adapter.rebuild(raise_errors=True)
    except (PydanticUserError, TypeError, NameError) as error:
        raise NoPayloadType(_first_sentence(error)) from None
    read = _read_exactly if "'decimal'" in repr(adapter.core_schema) else _read
    shown = annotation.__qualname__ if isinstance(annotation, type) else str(annotation)
    return _validated(adapter, read, shown)


def _first_sentence(error: Exception) -> str:
    """Without pydantic's advice to allow arbitrary types, which a payload could never become."""
    return str(error).split("\n", 1)[0].split(". Set ", 1)[0]


def _validated(adapter: TypeAdapter[Any], read: Callable[[TypeAdapter[Any], Event], Any], shown: str) -> Load:
    def load(event: Event) -> Any:
        try:
            return read(adapter, event)
        except ValidationError as error:
            places = _places(error.errors(include_url=False, include_context=False, include_input=False))
        raise PayloadMismatch(f"payload of {event.topic} does not fit {shown}: {places}")

    return load


def _read(adapter: TypeAdapter[Any], event: Event) -> Any:
    try:
        return adapter.validate_json(event.payload_text)
    except ValidationError as error:
        if not _is_unreadable(error):
            raise
    return adapter.validate_python(event.payload)


def _is_unreadable(error: ValidationError) -> bool:
    """True if pydantic's JSON reader gave up on the text itself: SQL can publish deeper nesting than it reads."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return first["type"] == "json_invalid" and not first["loc"]


def _read_exactly(adapter: TypeAdapter[Any], event: Event) -> Any:
    """Like :func:`_read`, but a number that no float can hold reaches a Decimal field with all its digits."""
    text = event.payload_text
    if not _LONG_NUMBER.search(text):
        return _read(adapter, event)
    kept: list[Decimal] = []

    def parse(number: str) -> float | Decimal:
        rounded, exact = float(number), Decimal(number)
        if Decimal(repr(rounded)) == exact:
            return rounded
        kept.append(exact)
        return exact

    try:
        decoded = json.loads(text, parse_float=parse)
    except (ValueError, RecursionError):
        return _read(adapter, event)
    return adapter.validate_python(decoded) if kept else _read(adapter, event)


def _decoded(event: Event) -> Any:
    return event.payload


def _decoded_object(event: Event) -> Any:
    payload = event.payload
    if isinstance(payload, dict):
        return payload
    raise PayloadMismatch(f"payload of {event.topic} does not fit dict: $: dict_type")


def _places(problems: Sequence[ErrorDetails]) -> str:
    """Where the payload does not fit, and pydantic's name for the problem there.

    Not pydantic's sentence: some of those quote the value, and a payload may be secret.
    """
    shown = [f"{_path(each['loc'])}: {each['type']}" for each in problems[:_MOST_PROBLEMS]]
    more = len(problems) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _path(location: Sequence[int | str]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step[:_LONGEST_STEP]}" for step in location)
    return "$" + "".join(steps)
