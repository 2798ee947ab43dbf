"""What an event inherits from the event whose handler publishes it: the context in which something happens.

Before it: ``outgoing`` finds out which event is being handled. A trace, a tenant, a request go on from event to event
without any handler doing something for it. What describes one event only stays with that event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from eventbus.errors import InvalidHeaders
from eventbus.event import CAUSATION_ID, CORRELATION_ID, Event
from eventbus.topics import MAX_HEADERS_BYTES, bytes_of_headers, validate_headers

OF_ONE_EVENT: Final = frozenset(
    {CAUSATION_ID, "content-encoding", "content-type", "event-id", "idempotency-key", "message-id", "reply-to"}
)
"""Headers that say something about one event or its payload, and would be wrong on another."""
OF_ONE_EVENT_PREFIXES: Final = ("ce-", "eventbus-")
"""The same for whole families: the attributes of CloudEvents, and whatever the bus itself adds."""


def with_context(given: Mapping[str, str | None] | None, cause: Event) -> dict[str, str]:
    """The headers of an event that the handler of ``cause`` publishes with the headers ``given``.

    A header that is named there is not inherited, also if its value is ``None``. What SQL stored against the rules for
    headers is not inherited either. Raises :class:`~eventbus.errors.InvalidHeaders`.
    """
    own = validate_headers(given)
    context = {name: value for name, value in cause.headers.items() if _goes_on(name, value)}
    context[CORRELATION_ID] = context.get(CORRELATION_ID) or str(cause.event_id)
    context[CAUSATION_ID] = str(cause.event_id)
    named = given or {}
    headers = {name: value for name, value in context.items() if name not in named} | own
    total = bytes_of_headers(headers)
    if total > MAX_HEADERS_BYTES:
        raise InvalidHeaders(
            f"all headers together have {total} bytes, of which {total - bytes_of_headers(own)} are inherited from "
            f"the event that is handled; at most {MAX_HEADERS_BYTES} are allowed: leave inherited ones out with None "
            "as their value, or put the data into the payload"
        )
    return headers


def _goes_on(name: str, value: str) -> bool:
    if name in OF_ONE_EVENT or name.startswith(OF_ONE_EVENT_PREFIXES):
        return False
    try:
        validate_headers({name: value})
    except InvalidHeaders:
        return False
    return True
