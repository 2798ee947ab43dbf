"""NDJSON to events: one JSON value per line, read exactly or refused with what is wrong with it.

A line is ``{"topic": …, "payload": …, "key": …, "headers": …, "event_id": …, "priority": …, "delay": …,
"at": …}``, of which only the topic has to be there; or, where a topic was given for all of them, a line is a payload
and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from eventbus.errors import PublishError
from eventbus.event import OutboxEvent
from eventbus.publishing.outgoing import prepare

LARGEST_BATCH: Final = 32 * 1024 * 1024
"""Bytes of lines in one transaction, whatever the number of lines."""

_FIELDS: Final = ("topic", "payload", "key", "headers", "event_id", "priority", "delay", "at")
_NAME_THE_TOPIC: Final = "; if the lines are payloads, name their TOPIC before --file"
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)?")
_UNITS: Final[Mapping[str, int]] = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, counted from 1, with its bytes and what it says: an event, or what is wrong with it."""

    number: int
    size: int
    event: OutboxEvent | None
    problem: str = ""


def read_lines(source: Iterable[bytes], topic: str | None) -> Iterator[Line]:
    """The events of a file; empty lines are left out. The rules of publishing are not checked yet."""
    for number, raw in enumerate(source, 1):
        if not raw.strip():
            continue
        try:
            yield Line(number, len(raw), _event(raw, topic))
        except ValueError as error:
            yield Line(number, len(raw), None, str(error))


def checked(line: Line, max_bytes: int) -> Line:
    """The same line, or what the rules of publishing have against it; ``max_bytes`` is the limit of one payload."""
    if line.event is None:
        return line
    try:
        prepare(line.event, max_bytes=max_bytes)
    except PublishError as error:
        return Line(line.number, line.size, None, str(error))
    return line


def batches(lines: Iterable[Line], most: int) -> Iterator[list[Line]]:
    """Runs of at most ``most`` lines and :data:`LARGEST_BATCH` bytes, at least one line each."""
    batch: list[Line] = []
    size = 0
    for line in lines:
        if batch and (len(batch) == most or size + line.size > LARGEST_BATCH):
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += line.size
    if batch:
        yield batch


def parse_json(text: str | bytes) -> Any:
    """JSON text as Python values; :class:`ValueError` if it is none, or if something of it would be changed.

    That is a number that no double holds, or a name that an object has twice.
    """
    try:
        return json.loads(text, parse_float=_exact, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def parse_duration(text: str) -> float:
    """``90``, ``90s``, ``15m``, ``2h`` or ``1d`` in seconds; :class:`ValueError` otherwise."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is no length of time: write 90, 90s, 15m, 2h or 1d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def parse_moment(text: str) -> datetime:
    """A moment in ISO 8601 with its offset from UTC; :class:`ValueError` otherwise."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None:
        raise ValueError(f"'{text}' is no moment: write it as 2030-01-31T09:00:00+01:00, with the offset from UTC")
    return moment


def _event(text: bytes, topic: str | None) -> OutboxEvent:
    value = parse_json(text)
    if topic is not None:
        return OutboxEvent(topic, value)
    if not isinstance(value, dict):
        raise ValueError(f"not an object{_NAME_THE_TOPIC}")  # noqa: TRY004 - about a text, as all the others
    unknown = sorted(set(value) - set(_FIELDS))
    if unknown:
        raise ValueError(f'unknown field "{unknown[0]}"; known: {", ".join(_FIELDS)}')
    if "topic" not in value:
        raise ValueError(f'no "topic"{_NAME_THE_TOPIC}')
    given = {name: field for name, field in value.items() if field is not None or name in ("topic", "payload")}
    if "event_id" in given:
        given["event_id"] = _uuid(given["event_id"])
    if "at" in given:
        given["at"] = parse_moment(str(given["at"]))
    if isinstance(given.get("delay"), str):
        given["delay"] = parse_duration(given["delay"])
    return OutboxEvent(**given)


def _uuid(value: object) -> UUID:
    try:
        return UUID(value if isinstance(value, str) else "")
    except ValueError:
        raise ValueError(f'"event_id" is no UUID: {value}') from None


def _exact(text: str) -> float:
    """A number with a fraction or an exponent. What it means must not depend on who reads it."""
    from decimal import Decimal

    number = float(text)
    try:
        fits = number not in (float("inf"), float("-inf")) and Decimal(repr(number)) == Decimal(text)
    except ArithmeticError:  # an exponent beyond what decimals can hold
        fits = False
    if not fits:
        raise ValueError(f"number {text} does not fit into a double; publish it as text")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'an object has the name "{twice}" twice')
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
