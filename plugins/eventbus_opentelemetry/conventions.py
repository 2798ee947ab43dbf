"""Names of attributes: those of OpenTelemetry's conventions for messaging, and the bus's own below ``eventbus.``.

Spelled out here because the package that has them as constants would be one more dependency.
"""

from __future__ import annotations

from typing import Final

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
"""The topic; absent where several are handled or published together."""
SUBSCRIPTION: Final = "messaging.destination.subscription.name"
"""The queue."""
CONSUMER_GROUP: Final = "messaging.consumer.group.name"
"""The queue, too: backends group by one or by the other."""
MESSAGE_ID: Final = "messaging.message.id"
CONVERSATION_ID: Final = "messaging.message.conversation_id"
"""The correlation id."""
BATCH_COUNT: Final = "messaging.batch.message_count"
ERROR_TYPE: Final = "error.type"
FUNCTION: Final = "code.function.name"
"""The handler."""

ATTEMPT: Final = "eventbus.attempt"
OUTCOME: Final = "eventbus.outcome"
KEY: Final = "eventbus.key"
REPLAY: Final = "eventbus.replay"
REASON: Final = "eventbus.reason"

EVENTBUS: Final = "eventbus"
"""The value of ``messaging.system``."""
PUBLISH: Final = "publish"
PROCESS: Final = "process"
SEND: Final = "send"
"""The type of the operation ``publish``; that of ``process`` is called the same."""
OTHER: Final = "_OTHER"
"""The value of ``error.type`` where there are several."""


def class_name(error: BaseException) -> str:
    """The value of ``error.type`` for an exception: its class with its module, builtins without."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
