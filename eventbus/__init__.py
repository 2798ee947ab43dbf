"""The event bus for Python programs whose data lives in PostgreSQL.

Publish in your own transaction, handle in any process::

    from eventbus import Event, outbox, subscribe

    @subscribe("orders.created")
    async def send_receipt(order: OrderCreated, event: Event) -> None: ...

    with psycopg.connect(dsn) as conn, conn.transaction():
        conn.execute("INSERT INTO orders ...")
        outbox.publish_event("orders.created", order, conn=conn)

Importing this package does no work; the default bus reads its settings when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eventbus.errors import ConfigurationError, EventBusError, PublishError
from eventbus.event import Event, OutboxEvent
from eventbus.retry import RetryPolicy
from eventbus.transport import DeadLetter, Discard, Retry

if TYPE_CHECKING:
    from eventbus.bus import EventBus
    from eventbus.consuming.subscriptions import Subscriptions
    from eventbus.publishing.outbox import Outbox

    outbox: Outbox
    subscribe = Subscriptions().subscribe

__all__ = [
    "ConfigurationError",
    "DeadLetter",
    "Discard",
    "Event",
    "EventBus",
    "EventBusError",
    "OutboxEvent",
    "PublishError",
    "Retry",
    "RetryPolicy",
    "outbox",
    "subscribe",
]


class _DefaultOutbox:
    """The default bus's outbox, whose settings are read when it is first used rather than when it is imported."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("eventbus.bus").default_bus().outbox, name)


if not TYPE_CHECKING:
    outbox = _DefaultOutbox()


def __getattr__(name: str) -> Any:
    if name == "EventBus":
        return import_module("eventbus.bus").EventBus
    if name == "subscribe":
        return import_module("eventbus.bus").default_bus().subscribe
    raise AttributeError(f"module 'eventbus' has no attribute {name!r}")
