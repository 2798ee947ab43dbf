"""One event as a handler sees it.

Built from a claimed row by the storage engine, read by handlers. What a handler may never look at (the payload,
the headers, the UUID object) stays text until it is asked for, because decoding costs more than delivering.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import orjson

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
        "key",
        "published_at",
        "queue",
        "topic",
    )

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
    ) -> None:
        self._event_id: str | UUID = event_id
        self.topic = topic
        self.key = key
        self.published_at = published_at
        self.queue = queue
        self.attempt = attempt
        self._payload_text = payload
        self._headers_text = headers
        self._payload: Any = _UNREAD
        self._headers: Mapping[str, str] | None = None

    @property
    def event_id(self) -> UUID:
        """UUIDv7 given by the publisher; the same in every queue, retry and replay."""
        if isinstance(self._event_id, str):
            self._event_id = UUID(self._event_id)
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
        """Header names and values as they were published."""
        if self._headers is None:
            self._headers = orjson.loads(self._headers_text) if self._headers_text else {}
        return self._headers

    @property
    def correlation_id(self) -> str:
        """The id that ties together everything one request caused: the header, or this event's own id."""
        return self.headers.get(CORRELATION_ID) or str(self.event_id)

    def __repr__(self) -> str:
        return f"<Event {self.topic} {self._event_id} queue={self.queue} attempt={self.attempt}>"


_UNREAD: Final = object()


def decode(text: str) -> Any:
    """JSON text to Python values. Integers of any size stay exact integers."""
    raise NotImplementedError
