"""The metrics of the database for programs without a worker: as text, and as a WSGI application to mount."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from eventbus.errors import ConfigurationError
from eventbus.settings import Settings as BusSettings
from eventbus.settings import load
from eventbus_prometheus.database import Database
from eventbus_prometheus.options import Settings
from eventbus_prometheus.scrape import CONTENT_TYPE, Scraping, of_build, of_database, text

_CHOICE: Final = ("queues", "except_queues")
"""Settings of every plugin, which say nothing here."""

StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Application = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


def render(settings: BusSettings | None = None) -> bytes:
    """The metrics of the database, in Prometheus's text format. ``settings``: those of the environment if not given.

    Raises :class:`ConfigurationError` without a DSN, and nothing else: what cannot be read has
    ``eventbus_section_up`` 0.
    """
    bus, own = _settings(settings)
    database = Database(bus, own.timeout, own.statement_timeout)
    return text([*of_build(), *of_database(database)])


def make_wsgi_app(settings: BusSettings | None = None) -> Application:
    """An application that answers every GET with :func:`render`; scrapes within a second get the same answer.

    Raises :class:`ConfigurationError` without a DSN.
    """
    bus, own = _settings(settings)
    database = Database(bus, own.timeout, own.statement_timeout)
    scraping = Scraping((of_build, partial(of_database, database)), own.cache)

    def application(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in {"GET", "HEAD"}:
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Type", "text/plain")])
            return [b"metrics can only be looked at: GET or HEAD"]
        body = scraping.text()
        start_response("200 OK", [("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(body)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    return application


def _settings(given: BusSettings | None) -> tuple[BusSettings, Settings]:
    bus = load() if given is None else given
    if bus.dsn is None:
        raise ConfigurationError("no database: set EVENTBUS_DSN, or give settings with a dsn")
    own = {key: value for key, value in bus.plugin_settings.get("prometheus", {}).items() if key not in _CHOICE}
    return bus, Settings(**own)
