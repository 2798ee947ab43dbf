"""Every error that the bus raises on purpose, in one tree.

::

    EventBusError
    ├── ConfigurationError        a setting, a handler or a schema that cannot work
    │   ├── InvalidHandler        refused at decoration
    │   ├── DuplicateQueue        two handlers want one queue name
    │   ├── SchemaMissing         the bus's schema is not in this database
    │   └── SchemaMismatch        the schema is older or newer than this code
    ├── PublishError              refused before any SQL; the caller's transaction is untouched
    │   ├── InvalidTopic
    │   ├── InvalidKey
    │   ├── InvalidHeaders
    │   ├── InvalidPayload        carries the path to the offending value
    │   ├── PayloadTooLarge
    │   ├── PublishVetoed         a plugin refused the event; carries the plugin's name and the reason
    │   └── NotInTransaction
    ├── PayloadMismatch           a stored payload does not fit the handler's type
    ├── BusPaused                 the bus waits for `eventbus resume` (restored into another cluster)
    └── Unavailable               the database cannot be reached now

What the caller's own connection raises while a publish runs (psycopg errors) passes through untouched.
"""

from __future__ import annotations

import asyncio
import signal


class EventBusError(Exception):
    """Root of every error that the bus raises on purpose."""


class ConfigurationError(EventBusError):
    """A setting, a subscription or a schema cannot work; nothing was started."""


class InvalidHandler(ConfigurationError, TypeError):
    """A function cannot serve as a handler; raised at decoration, with the function's name."""


class DuplicateQueue(ConfigurationError):
    """Two different handlers claim the same queue name; the message names both places."""


class SchemaMissing(ConfigurationError):
    """The bus's schema is not installed in this database: run ``eventbus migrate``."""


class SchemaMismatch(ConfigurationError):
    """The installed schema and this code do not fit; the message says which to upgrade."""


class PublishError(EventBusError, ValueError):
    """A publish was refused before any SQL was sent."""


class InvalidTopic(PublishError):
    """A topic or pattern breaks the naming rule."""


class InvalidKey(PublishError):
    """An ordering key is empty, too long or holds text that PostgreSQL cannot store."""


class InvalidHeaders(PublishError):
    """A header name or value breaks the rules."""


class InvalidPayload(PublishError):
    """A value inside the payload has no JSON form.

    ``path`` points at it, as in ``$.lines[3].price``.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"payload at {path}: {problem}")
        self.path = path
        self.problem = problem


class PayloadTooLarge(PublishError):
    """The encoded payload exceeds ``max_payload_bytes``."""


class PublishVetoed(PublishError):
    """A plugin refused the event."""

    def __init__(self, plugin: str, topic: str, reason: str) -> None:
        super().__init__(f"plugin {plugin} refuses to publish on {topic}: {reason}")
        self.plugin = plugin
        self.reason = reason


class NotInTransaction(PublishError):
    """The connection is in autocommit mode with no transaction open, and ``autocommit=True`` was not said."""


class PayloadMismatch(EventBusError):
    """A payload does not fit the type that the handler asks for; retrying cannot help."""


class BusPaused(EventBusError):
    """The bus is paused for the whole database and waits for ``eventbus resume``."""


class Unavailable(EventBusError):
    """The database cannot be reached now; trying again later can help."""


def passes(error: BaseException) -> bool:
    """Whether ``error``, raised by a plugin or a receiver of a signal, is about something else and must go on.

    A cancellation of the task that runs it, if the task was really cancelled; Ctrl-C, if nobody has taken that over, as
    a worker does. Everything else is a failure of the plugin, whatever its class.
    """
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return False
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
