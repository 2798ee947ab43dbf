"""The HTTP port of a worker: the pages of its plugins, from a thread of its own, so that a blocked event loop shows.

Before it: the settings ``http_port`` and ``http_host``, and what the plugins answered to ``eventbus_pages``. After it:
one connection per request. Pages are looked at, never acted on: GET and HEAD only.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, cast
from urllib.parse import parse_qsl, unquote

from eventbus.errors import ConfigurationError
from eventbus.plugins.registry import Complaints
from eventbus.plugins.values import Answer, Page

log = logging.getLogger("eventbus")

_SILENCE: Final = 5.0
"""Seconds that a client may send or take nothing."""
_LIFETIME: Final = 30.0
"""Seconds that one connection may last."""
_CONNECTIONS: Final = 16
"""Connections at once; more are turned away with 503."""
_PER_PAGE: Final = 4
"""Of these, how many may wait for one page, so that one that hangs leaves the others alone."""
_BREATH: Final = 0.05
"""Seconds before the next try when no connection can be accepted, as without free file descriptors."""
_ENDING: Final = 1.0
"""Seconds that ``stop`` waits for the thread."""


class PageServer:
    """Serves pages while the program does something else. ``pages``: those of each plugin, by the plugin's name.

    ``port`` 0 takes any free one. ``complaints`` hears of pages that fail. Raises :class:`ConfigurationError` for a
    path that cannot be, or that two pages want.
    """

    def __init__(
        self, host: str, port: int, pages: Mapping[str, Sequence[Page]], complaints: Complaints | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._stands = _stands(pages, complaints or Complaints())
        self._running = ExitStack()

    def start(self) -> int:
        """Listen; returns the port. Raises :class:`ConfigurationError` when that is not possible here."""
        server = _listening(self._host, self._port, self._stands)
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=server.serve, args=(theirs,), name="eventbus pages", daemon=True)
        self._running.callback(theirs.close)
        self._running.callback(server.end)
        self._running.callback(thread.join, _ENDING)
        self._running.callback(ours.close)  # which the other end hears
        thread.start()
        port = int(server.server_address[1])
        host = f"[{self._host}]" if ":" in self._host else self._host
        log.info("serving %s on http://%s:%d/", ", ".join(self._stands) or "no pages", host, port)
        return port

    def stop(self) -> None:
        """Close the port and cut the connections; what pages do meanwhile is abandoned. Again: nothing happens."""
        self._running.close()


class _Stand:
    """One page, whose it is, and how many more may wait for it."""

    def __init__(self, plugin: str, page: Page, complaints: Complaints) -> None:
        self.plugin = plugin
        self.page = page
        self._complaints = complaints
        self._places = threading.BoundedSemaphore(_PER_PAGE)

    def answer(self, query: str) -> Answer:
        """What the page answers; a generic one when it fails, which is logged."""
        if not self._places.acquire(blocking=False):
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE, f"{self.page.path} is busy; ask again later\n")
        try:
            return _checked(self.page.answer(dict(parse_qsl(query, keep_blank_values=True))))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a page raises, the others go on
            self._complaints.failed(self.plugin, f"page {self.page.path}", error)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, "this page failed; the worker's log says why\n")
        finally:
            self._places.release()


def _checked(given: object) -> Answer:
    if isinstance(given, Answer) and isinstance(cast("object", given.body), bytes):
        return given
    raise TypeError(f"a page answers with an Answer whose body is bytes, not with {given!r:.100}")


def _stands(pages: Mapping[str, Sequence[Page]], complaints: Complaints) -> dict[str, _Stand]:
    """Every page by its path."""
    stands: dict[str, _Stand] = {}
    for plugin, page in ((plugin, page) for plugin, own in pages.items() for page in own):
        if not page.path.startswith("/") or page.path.endswith("/") or set(page.path) & set("?#% \t\r\n"):
            raise ConfigurationError(
                f"plugin {plugin} has a page {page.path!r}; a path begins with / and has no / at its end, like /metrics"
            )
        if page.path in stands:
            other = stands[page.path].plugin
            raise ConfigurationError(f"the plugins {other} and {plugin} both have a page {page.path}; disable one")
        stands[page.path] = _Stand(plugin, page, complaints)
    return stands


def _listening(host: str, port: int, stands: Mapping[str, _Stand]) -> _Server:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return _Server(family, address, stands)
    except OSError as error:
        raise ConfigurationError(f"cannot serve pages on {host}:{port}: {_advice(error)}") from error


def _advice(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use; give each worker of this host its own EVENTBUS_HTTP_PORT, or 0 for any free one"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "not allowed; choose an EVENTBUS_HTTP_PORT above 1023"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return "EVENTBUS_HTTP_HOST is no address of this host"
    return str(error)


class _Server(ThreadingHTTPServer):
    """One daemon thread per connection, each for a limited time."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    timeout = 0.0

    def __init__(self, family: int, address: Any, stands: Mapping[str, _Stand]) -> None:
        self.address_family = family
        self.stands = stands
        self._deadlines: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(address, _Request)

    def server_bind(self) -> None:
        """Bind without asking a name server what this host is called."""
        socketserver.TCPServer.server_bind(self)
        self.socket.setblocking(False)  # a client may be gone again before it is accepted
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def serve(self, until: socket.socket) -> None:
        """Accept connections until the other end of ``until`` is closed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(until, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(self._cut_overdue())]
                if until in ready:
                    return
                if ready:
                    self.handle_request()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_BREATH)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, or turn it away."""
        request.settimeout(_SILENCE)
        with self._lock:
            full = len(self._deadlines) >= _CONNECTIONS
            if not full:
                self._deadlines[request] = time.monotonic() + _LIFETIME
        if not full:
            super().process_request(request, client_address)
            return
        request.setblocking(False)
        with suppress(OSError):
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n")
        self.shutdown_request(request)

    def close_request(self, request: Any) -> None:
        """Close the connection and make room for another."""
        with self._lock:
            self._deadlines.pop(request, None)
            super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the signature is socketserver's
        """What went wrong outside a page: mostly a client that went away."""
        log.debug("a connection to the pages ended early: %s", sys.exc_info()[1])

    def end(self) -> None:
        """Close the port and every connection."""
        self.server_close()
        self._cut(before=float("inf"))

    def _cut_overdue(self) -> float | None:
        """Cut connections that last too long; returns the seconds until the next one is due."""
        now = time.monotonic()
        self._cut(before=now)
        with self._lock:
            return max(min(self._deadlines.values()) - now, 0.0) if self._deadlines else None

    def _cut(self, before: float) -> None:
        """Wake up the threads of connections whose time is over; they close them."""
        with self._lock:
            for connection in [each for each, deadline in self._deadlines.items() if deadline <= before]:
                self._deadlines[connection] = time.monotonic() + _LIFETIME
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class _Request(BaseHTTPRequestHandler):
    """One connection with one request."""

    server: _Server

    def do_GET(self) -> None:
        """Answer with a page, or with the list of them."""
        target, _, query = self.path.partition("?")
        path = unquote(target).rstrip("/")
        stands = self.server.stands
        if path in stands:
            self._send(stands[path].answer(query))
        elif not path:
            self._send(_plain(HTTPStatus.OK, _contents(stands)))
        else:
            self._send(_plain(HTTPStatus.NOT_FOUND, f"there is no such page; there are:\n{_contents(stands)}"))

    do_HEAD = do_GET  # noqa: N815 - http.server looks for these names

    def do_POST(self) -> None:
        """Refuse what could change something."""
        self._send(_plain(HTTPStatus.METHOD_NOT_ALLOWED, "pages can only be looked at: GET or HEAD\n"))

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST  # noqa: N815 - the same

    def version_string(self) -> str:
        """The header Server, without the versions of what runs here."""
        return "eventbus"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the signature is http.server's
        """Requests are nothing to log."""

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'")
        if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)


def _plain(status: HTTPStatus, text: str) -> Answer:
    return Answer(text.encode(), status=status)


def _contents(stands: Mapping[str, _Stand]) -> str:
    lines = [f"{path}  {stand.page.title or stand.plugin}\n" for path, stand in stands.items()]
    return "".join(lines) or "(no plugin has a page)\n"
