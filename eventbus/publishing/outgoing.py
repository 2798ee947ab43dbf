"""From what a program wants to publish to the row that will be inserted; nothing here talks to a database.

Everything that can be wrong with an event is found here, before any SQL, so that a refused publish leaves the
caller's transaction as it was. ``outbox`` sends the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, TypedDict
from uuid import UUID

import orjson

from eventbus.errors import PublishError
from eventbus.event import OutboxEvent, current_event, new_event_id
from eventbus.payload import encode
from eventbus.publishing.inheritance import with_context
from eventbus.topics import validate_headers, validate_key, validate_priority, validate_topic

MAX_DELAY: Final = timedelta(days=36_500)
"""Longest delay; far beyond any use, and safely inside PostgreSQL's calendar."""

_MICROSECOND: Final = timedelta(microseconds=1)


class EventOptions(TypedDict, total=False):
    """What may be said about an event beyond topic and payload: keywords of ``publish_event``, fields of `OutboxEvent`.

    :class:`OutboxEvent` says what each means.
    """

    key: str | None
    headers: Mapping[str, str | None] | None
    priority: int
    delay: float | timedelta | None
    at: datetime | None
    event_id: UUID | None


class Row(NamedTuple):
    """A checked event as the text that PostgreSQL gets, and when it is due if it has to wait."""

    event_id: UUID
    topic: str
    key: str | None
    payload: str
    headers: str | None
    priority: str
    due: Due | None


class Due(NamedTuple):
    """One of the two is set: how long after the INSERT, or the moment."""

    delay: str | None
    at: str | None


def prepare(event: OutboxEvent, *, max_bytes: int) -> Row:
    """Check and encode one event; raises :class:`~eventbus.errors.PublishError` with what to change."""
    return Row(
        new_event_id() if event.event_id is None else checked_event_id(event.event_id),
        validate_topic(event.topic),
        None if event.key is None else validate_key(event.key),
        encode(event.payload, max_bytes=max_bytes),
        _headers(event.headers),
        str(validate_priority(event.priority)),
        None if event.delay is None and event.at is None else _due(event.delay, event.at),
    )


def checked_event_id(given: object) -> UUID:
    """``given`` if it is a UUID object; raises :class:`~eventbus.errors.PublishError` otherwise."""
    if not isinstance(given, UUID):
        raise PublishError(f"event_id is a uuid.UUID, not {type(given).__name__}")
    return given


def _headers(given: Mapping[str, str | None] | None) -> str | None:
    """The headers as JSON. What a handler publishes inherits the context of the event that is being handled."""
    cause = current_event.get()
    if given is None and cause is None:
        return None
    headers = validate_headers(given) if cause is None else with_context(given, cause)
    return orjson.dumps(headers).decode() if headers else None


def _due(delay: float | timedelta | None, at: datetime | None) -> Due | None:
    if delay is None:
        return Due(None, _moment(at))
    if at is not None:
        raise PublishError("delay and at exclude each other; give one of them")
    microseconds = _microseconds(delay)
    if microseconds < 0:
        raise PublishError("delay is negative; leave it out to publish now")
    if microseconds > MAX_DELAY // _MICROSECOND:
        raise PublishError(f"delay is longer than {MAX_DELAY.days} days; plain numbers are seconds")
    if not microseconds:
        return None
    return Due(f"{microseconds // 1_000_000}.{microseconds % 1_000_000:06} seconds", None)


def _microseconds(delay: object) -> int:
    if isinstance(delay, timedelta):
        return delay // _MICROSECOND
    if isinstance(delay, bool) or not isinstance(delay, int | float):
        raise PublishError(f"delay is in seconds or a timedelta, not {type(delay).__name__}")
    if isinstance(delay, float) and not math.isfinite(delay):
        raise PublishError(f"delay {delay} is no length of time; give seconds or a timedelta")
    return round(delay * 1_000_000)


def _moment(moment: object) -> str:
    if not isinstance(moment, datetime):
        raise PublishError(f"at is a datetime, not {type(moment).__name__}; for a length of time use delay")
    if moment.utcoffset() is None:
        raise PublishError("at is a naive datetime; give it a time zone, as datetime.now(UTC) has")
    try:
        return moment.astimezone(UTC).isoformat()
    except OverflowError:
        raise PublishError(f"at {moment} does not fit into the calendar of UTC") from None
