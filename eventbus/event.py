"""One event as a handler sees it.

Built from a claimed row by the storage engine, read by handlers. What a handler may never look at (the payload,
the headers, the UUID object) stays text until it is asked for, because decoding costs more than delivering.
:func:`new_event_id` makes the id when the event is published; :data:`current_event` tells publishing which event
is being handled.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from eventbus.payload import decode

CORRELATION_ID: Final = "correlation-id"
CAUSATION_ID: Final = "causation-id"


class Event:
    """One immutable event, delivered to one queue.

    Each delivery decodes its own copy of the payload, so a handler that changes it changes nobody else's.
    """

    __slots__ = (
        "_event_id",
        "_headers",
        "_headers_text",
        "_payload",
        "_payload_text",
        "attempt",
        "event_id_text",
        "key",
        "published_at",
        "queue",
        "redriven",
        "replay_id",
        "topic",
    )

    event_id_text: str
    """``event_id`` as text, for logs and keys: the UUID is made when it is first asked for."""
    topic: str
    """Dotted name under which the event was published."""
    key: str | None
    """Ordering key, if the publisher gave one."""
    published_at: datetime
    """When the publisher's INSERT ran, by the database's clock; aware."""
    queue: str
    """Name of the queue that this delivery belongs to."""
    attempt: int
    """1 for the first call of the handler, 2 for the first retry, and so on."""
    replay_id: int
    """Number of the replay that plays the event once more; 0 if it is none."""
    redriven: bool
    """True if the event was a dead letter of this queue that somebody gave back to it."""

    def __init__(
        self,
        *,
        event_id: str,
        topic: str,
        payload: str,
        headers: str | None,
        key: str | None,
        published_at: datetime,
        queue: str,
        attempt: int = 1,
        replay_id: int = 0,
        redriven: bool = False,
    ) -> None:
        self.event_id_text = event_id
        self._event_id: UUID | None = None
        self.topic = topic
        self.key = key
        self.published_at = published_at
        self.queue = queue
        self.attempt = attempt
        self.replay_id = replay_id
        self.redriven = redriven
        self._payload_text = payload
        self._headers_text = headers
        self._payload: Any = _UNREAD
        self._headers: Mapping[str, str] | None = None

    @property
    def event_id(self) -> UUID:
        """UUIDv7 given by the publisher; the same in every queue, retry and replay."""
        if self._event_id is None:
            self._event_id = UUID(self.event_id_text)
        return self._event_id

    @property
    def payload_text(self) -> str:
        """The payload as JSON text, character for character as it was published."""
        return self._payload_text

    @property
    def payload(self) -> Any:
        """The payload as JSON types; decoded at the first access."""
        if self._payload is _UNREAD:
            self._payload = decode(self._payload_text)
        return self._payload

    @property
    def headers(self) -> Mapping[str, str]:
        """Header names and values as they were published; read-only."""
        if self._headers is None:
            self._headers = MappingProxyType(_read_headers(self._headers_text) if self._headers_text else {})
        return self._headers

    @property
    def correlation_id(self) -> str:
        """The id that ties together everything one request caused: the header, or this event's own id."""
        return self.headers.get(CORRELATION_ID) or self.event_id_text

    @property
    def is_replay(self) -> bool:
        """True if the event is played once more by a replay: what it says happened before."""
        return self.replay_id != 0

    def __repr__(self) -> str:
        return f"<Event {self.topic} {self.event_id_text} queue={self.queue} attempt={self.attempt}>"


current_event: ContextVar[Event | None] = ContextVar("eventbus_current_event", default=None)
"""The event whose handler runs in this context; what it publishes carries its correlation id onward."""


@dataclass(frozen=True, slots=True)
class OutboxEvent:
    """One event to publish, for ``publish_events``."""

    topic: str
    payload: Any = None
    key: str | None = None
    """What the event is about; ordered queues keep the order of a key."""
    headers: Mapping[str, str | None] | None = None
    """Names and text; None as a value leaves a header out, also one that would be inherited."""
    delay: float | timedelta | None = None
    """Seconds or a timedelta from the moment of the INSERT, by the database's clock."""
    at: datetime | None = None
    """Aware datetime at which the event is published; a moment in the past means as soon as possible."""
    event_id: UUID | None = None
    """The id of the event, to publish the same event again on purpose; a new one if there is none."""
    priority: int = 0
    """0 to 9; queues with priorities hand out the highest first."""


def new_event_id(clock: Callable[[], int] = time.time_ns) -> UUID:
    """A UUIDv7 (RFC 9562): 48 bits of milliseconds, 12 bits of the fraction, 62 random bits.

    Ids that one process makes one after the other ascend, as long as its clock is not set back. The random bits come
    from the operating system each time, so that forked or equally seeded processes never make the same id. ``clock``
    gives nanoseconds since 1970.
    """
    milliseconds, nanoseconds = divmod(clock(), 1_000_000)
    fraction = (nanoseconds << 12) // 1_000_000
    random = int.from_bytes(os.urandom(8), "big") & _RANDOM_BITS
    return UUID(int=(milliseconds & _TIME_BITS) << 80 | _VERSION_7 | fraction << 64 | _VARIANT | random)


def _read_headers(text: str) -> dict[str, str]:
    """Headers are text on both sides; what SQL stored as something else is read as its JSON text."""
    stored = decode(text)
    if not isinstance(stored, dict):
        return {}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in stored.items()}


_UNREAD: Final = object()
_TIME_BITS: Final = (1 << 48) - 1
_VERSION_7: Final = 7 << 76
_VARIANT: Final = 0b10 << 62
_RANDOM_BITS: Final = (1 << 62) - 1
