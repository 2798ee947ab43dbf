"""What each Python value becomes in JSON, and what has no JSON form; the table of ``docs/payloads.md`` in code.

:func:`to_plain` turns a payload into exact ``dict``, ``list``, ``str``, ``int``, ``float``, ``bool`` and ``None``,
or says where it cannot. Every text form is one that pydantic turns back into an equal value.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final
from uuid import UUID

from pydantic import BaseModel

MAX_DEPTH: Final = 200
"""Most levels of nested objects and arrays; pydantic's JSON reader goes no deeper."""
MAX_INTEGER_DIGITS: Final = 4_300
"""Most digits of an integer: the limit that Python itself sets to reading one."""

_MAX_INTEGER_BITS: Final = 14_285
_LONGEST_STEP: Final = 64
_LONGEST_PATH: Final = 400


class NoPlainForm(Exception):
    """A value inside the payload has no JSON form; ``steps`` leads to it from the inside outwards."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.steps: list[str] = []

    @property
    def path(self) -> str:
        """Where it is, as in ``$.lines[3].price``; a very long path is cut in the middle."""
        path = "$" + "".join(reversed(self.steps))
        half = _LONGEST_PATH // 2
        return path if len(path) <= _LONGEST_PATH else f"{path[:half]}…{path[-half:]}"


def to_plain(value: Any) -> Any:
    """``value`` in plain JSON types, containers copied; raises :class:`NoPlainForm`."""
    try:
        return _plain(value, MAX_DEPTH)
    except RecursionError:
        raise NoPlainForm("nested too deep for what is left of Python's stack") from None


def _plain(value: Any, room: int) -> Any:
    kind = type(value)
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is bool or value is None:
        return value
    if kind is int:
        return _integer(value)
    if kind is float:
        return _number(value)
    if kind is dict:
        return _object(value.items(), room)
    if kind is list or kind is tuple:
        return _array(value, room)
    return _converted(value, room)


def _object(items: Iterable[tuple[Any, Any]], room: int) -> dict[str, Any]:
    if not room:
        raise NoPlainForm(_TOO_DEEP)
    plain: dict[str, Any] = {}
    for key, value in items:
        name = key if type(key) is str and key.isascii() else _key(key)
        if name in plain:
            raise NoPlainForm(f"two keys become the same text {name!a}; one of them would be lost")
        try:
            plain[name] = _plain(value, room - 1)
        except NoPlainForm as refused:
            refused.steps.append(_step(name))
            raise
    return plain


def _array(values: Iterable[Any], room: int) -> list[Any]:
    if not room:
        raise NoPlainForm(_TOO_DEEP)
    plain: list[Any] = []
    try:
        for value in values:
            plain.append(_plain(value, room - 1))  # noqa: PERF401 - its length is the path of a refused value
    except NoPlainForm as refused:
        refused.steps.append(f"[{len(plain)}]")
        raise
    return plain


def _converted(value: Any, room: int) -> Any:
    """The rest of the documented types; subclasses of the plain ones become the plain ones."""
    match value:
        case Enum():
            return _plain(value.value, room)
        case dict():
            return _object(value.items(), room)
        case list() | tuple():
            return _array(value, room)
        case BaseModel():
            return _plain(_dumped(value), room)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _plain(_fields(value), room)
        case _:
            return _scalar(value)


def _scalar(value: Any) -> Any:
    match value:
        case str():
            return _text(str.__str__(value))
        case int():
            return _integer(int.__int__(value))
        case float():
            return _number(float.__float__(value))
        case _:
            return _as_text(value)


def _as_text(value: Any) -> str:
    match value:
        case datetime():
            return _instant(value)
        case date():
            return date.isoformat(value)
        case time():
            return _time_of_day(value)
        case timedelta():
            return _duration(value)
        case UUID():
            return str(value)
        case Decimal() if value.is_finite():
            return str(value)
        case Decimal():
            raise NoPlainForm(f"{value} is no number in JSON; publish None or text instead")
        case _:
            raise NoPlainForm(_advice(value))


def _key(key: Any) -> str:
    if isinstance(key, Enum):
        return _key(key.value)
    try:
        if isinstance(key, str):
            return _text(str.__str__(key))
        if isinstance(key, int) and not isinstance(key, bool):
            return str(_integer(int.__int__(key)))
        return _as_text(key)
    except NoPlainForm as refused:
        if isinstance(key, str | int | date | time | Decimal) and not isinstance(key, bool):
            raise NoPlainForm(f"a key cannot be published: {refused.problem}") from refused.__cause__
    raise NoPlainForm(
        f"a key of type {type(key).__name__} has no text form; use text, integers, UUIDs, dates, decimals or enums"
    )


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise NoPlainForm(f"{half} at index {error.start} is half of a surrogate pair, no character") from None
    return text


def _integer(number: int) -> int:
    if number.bit_length() > 64 and (number.bit_length() > _MAX_INTEGER_BITS or not _is_readable(number)):
        raise NoPlainForm(
            f"an integer of more than {MAX_INTEGER_DIGITS} digits cannot be read back; publish it as hexadecimal text"
        )
    return number


def _is_readable(number: int) -> bool:
    try:
        return len(str(abs(number))) <= MAX_INTEGER_DIGITS
    except ValueError:  # this process has a lower limit of its own
        return False


def _number(number: float) -> float:
    if not math.isfinite(number):
        raise NoPlainForm(f"{number} is no number in JSON; publish None or text instead")
    return number


def _instant(moment: datetime) -> str:
    try:
        offset = moment.utcoffset()
    except ValueError:  # pandas.NaT is a datetime without a moment
        offset = None
    if offset is None:
        raise NoPlainForm("a naive datetime names no moment; give it a time zone, as datetime.now(UTC) has")
    if getattr(moment, "nanosecond", 0):  # pandas
        raise NoPlainForm(_NANOSECONDS)
    if offset.microseconds or offset.seconds % 60:
        try:  # local mean times of old dates: readers know offsets of whole minutes only
            moment = moment.astimezone(UTC)
        except OverflowError:
            raise NoPlainForm("the offset has seconds and the moment does not fit into UTC") from None
    return datetime.isoformat(moment)


def _time_of_day(moment: time) -> str:
    offset = moment.utcoffset()
    if moment.tzinfo is not None and offset is None:
        raise NoPlainForm("a time of day in this zone has no offset without a date; publish an aware datetime")
    if offset is not None and (offset.microseconds or offset.seconds % 60):
        raise NoPlainForm("readers know offsets of whole minutes only")
    return time.isoformat(moment)


def _duration(length: timedelta) -> str:
    """ISO 8601, days as the largest unit: ``P1DT2H3M4.5S``, ``-PT0.000001S``, ``PT0S``."""
    if getattr(length, "nanoseconds", 0):  # pandas
        raise NoPlainForm(_NANOSECONDS)
    sign = "-" if length < timedelta() else ""
    length = abs(length)
    minutes, seconds = divmod(length.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{length.microseconds:06}".rstrip("0") if length.microseconds else ""
    days = f"{length.days}D" if length.days else ""
    clock = (f"{hours}H" if hours else "") + (f"{minutes}M" if minutes else "")
    if seconds or fraction or not (days or clock):
        clock += f"{seconds}{fraction}S"
    return f"{sign}P{days}" + (f"T{clock}" if clock else "")


def _dumped(model: BaseModel) -> Any:
    """What the same model's validation accepts: aliases, no computed fields."""
    try:
        return model.model_dump(by_alias=True, round_trip=True)
    except Exception as error:  # serializers are the user's code and raise what they like
        raise NoPlainForm(f"{type(model).__name__}.model_dump failed: {error}") from error


def _fields(instance: Any) -> Any:
    serializer = getattr(type(instance), "__pydantic_serializer__", None)
    try:
        if serializer is not None:
            return serializer.to_python(instance, by_alias=True, round_trip=True)
        return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    except Exception as error:  # as above; a slot without a value is an AttributeError
        raise NoPlainForm(f"{type(instance).__name__} cannot be read: {error}") from error


def _step(name: str) -> str:
    if name.isascii() and name.isidentifier() and len(name) <= _LONGEST_STEP:
        return f".{name}"
    return f"[{json.dumps(name if len(name) <= _LONGEST_STEP else name[:_LONGEST_STEP] + '…')}]"


def _advice(value: Any) -> str:
    name = type(value).__name__
    match value:
        case bytes() | bytearray() | memoryview():
            return f"{name} has no JSON form; encode it as text, for example base64"
        case set() | frozenset():
            return f"a {name} has no order; publish sorted(…)"
        case Mapping():
            return f"{name} has no JSON form; publish dict(…)"
        case type():
            return f"the class {value.__name__} itself was given; publish an instance of it"
        case _:
            return f"{name} has no JSON form; publish JSON types, a dataclass or a pydantic model"


_NANOSECONDS: Final = "nanoseconds would be lost; round to microseconds"
_TOO_DEEP: Final = f"nested deeper than {MAX_DEPTH} levels, or it contains itself"
