"""What plugins see and do while events are published: refuse them, amend their headers, surround the SQL.

Before it: ``outgoing`` has checked and encoded the events. After it: ``outbox`` sends the rows. Nothing is done here
where no plugin wants anything.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import orjson

from eventbus import signals
from eventbus.errors import ConfigurationError, InvalidHeaders, PublishVetoed
from eventbus.event import OutboxEvent
from eventbus.plugins.registry import Plugins
from eventbus.publishing.connections import Connections
from eventbus.publishing.outgoing import Row
from eventbus.topics import MAX_HEADERS_BYTES, bytes_of_headers, validate_headers

_AROUND = "eventbus_around_publish"
_AMEND = "eventbus_amend_headers"
_VETO = "eventbus_veto_publish"


class Interception:
    """The plugins of one outbox. ``sender``: the bus, for signals."""

    def __init__(self, plugins: Plugins, sender: Any) -> None:
        self._plugins = plugins
        self._sender = sender
        self._around = plugins.of(_AROUND)
        self._veto = plugins.of(_VETO)
        self._amend = plugins.of(_AMEND)
        self._hooks = bool(self._around or self._veto or self._amend)

    @property
    def wanted(self) -> bool:
        """Whether a plugin or a receiver of ``published`` wants anything."""
        return self._hooks or bool(signals.published.receivers)

    @contextmanager
    def publish(self, given: Sequence[OutboxEvent], rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """The rows to send, inside what plugins put around them. Raises :class:`~eventbus.errors.PublishVetoed`."""
        events = tuple(replace(event, event_id=row.event_id) for event, row in zip(given, rows, strict=True))
        entered: list[tuple[str, Any]] = []
        try:
            for implementation in self._around:
                for manager in self._plugins.tell([implementation], events=events):
                    self._enter(implementation.plugin.name, manager, entered)
            for event in events:
                self._ask(event)
            yield [self._amended(event, row) for event, row in zip(events, rows, strict=True)]
        except BaseException as error:
            self._plugins.complaints.left(_AROUND, entered, error)
            raise
        self._plugins.complaints.left(_AROUND, entered, None)
        if signals.published.receivers:
            signals.send(signals.published, self._sender, events=events)

    def _ask(self, event: OutboxEvent) -> None:
        for implementation in self._veto:
            for reason in self._plugins.tell([implementation], event=event):
                if isinstance(reason, str) and reason.strip():
                    raise PublishVetoed(implementation.plugin.name, event.topic, reason)
                problem = TypeError(f"returns a reason, or None to let it pass; not {reprlib.repr(reason)}")
                self._plugins.complaints.failed(implementation.plugin.name, _VETO, problem)

    def _amended(self, event: OutboxEvent, row: Row) -> Row:
        if not self._amend:
            return row
        headers: dict[str, str] = orjson.loads(row.headers) if row.headers else {}
        for implementation in self._amend:
            wanted = dict(headers)
            self._plugins.tell([implementation], event=event, headers=wanted)
            try:
                headers = _checked(wanted)
            except InvalidHeaders as error:
                self._plugins.complaints.failed(implementation.plugin.name, _AMEND, error)
        return row._replace(headers=orjson.dumps(headers).decode() if headers else None)

    def _enter(self, plugin: str, manager: Any, entered: list[tuple[str, Any]]) -> None:
        try:
            manager.__enter__()
            entered.append((plugin, manager))
        except BaseException as error:
            if self._plugins.complaints.goes_on(plugin, _AROUND, error):
                raise


def register_adapter(connections: Connections, plugin: str, adapter: Any) -> None:
    """Use a plugin's adapter: awaited connections if its ``execute`` is async."""
    missing = [name for name in ("handles", "in_transaction", "execute", "fetch") if not hasattr(adapter, name)]
    if missing:
        raise ConfigurationError(f"the connection adapter {adapter!r} of plugin {plugin} has no {', '.join(missing)}")
    if inspect.iscoroutinefunction(adapter.execute):
        connections.register_async(adapter)
    else:
        connections.register(adapter)


def _checked(headers: dict[str, str]) -> dict[str, str]:
    checked = validate_headers(headers)
    if bytes_of_headers(checked) > MAX_HEADERS_BYTES:
        raise InvalidHeaders(f"all headers together have more than {MAX_HEADERS_BYTES} bytes")
    return dict(checked)
