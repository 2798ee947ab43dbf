"""A wire between the bus and its server that can be cut at a COMMIT, before or after the server has carried it out."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from typing import Literal, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

_COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
_READY = b"Z\x00\x00\x00\x05I"


class Wire:
    """Forwards every connection to the server of ``dsn``; ``self.dsn`` leads through it. A context manager."""

    def __init__(self, dsn: str) -> None:
        with psycopg.connect(dsn) as connection:
            host, port = connection.info.host, connection.info.port
        self._server = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        parts = conninfo_to_dict(dsn) | {"host": "127.0.0.1", "port": self._listener.getsockname()[1]}
        self.dsn = make_conninfo("", **(parts | {"sslmode": "disable", "gssencmode": "disable"}))
        self.armed: Literal["before", "after"] | None = None
        self.cuts = 0
        self.refusing = False
        """New connections are closed at once."""
        self.refusals = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def cut_next(self, when: Literal["before", "after"]) -> None:
        """Cut the connection that sends the next COMMIT."""
        with self._lock:
            self.armed = when

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refusing:
                    client.close()
                    self.refusals += 1
                    continue
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        family = socket.AF_UNIX if isinstance(self._server, str) else socket.AF_INET
        with client, socket.socket(family) as server, suppress(OSError):
            server.connect(self._server)
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(65536)
                    if not data or (ready is client and self._cuts(data, server)):
                        return
                    (server if ready is client else client).sendall(data)

    def _cuts(self, data: bytes, server: socket.socket) -> bool:
        if _COMMIT not in data:
            return False
        with self._lock:
            when, self.armed = self.armed, None
        if when is None:
            return False
        self.cuts += 1
        if when == "after":
            server.sendall(data)
            answer = b""
            while _READY not in answer:
                answer += server.recv(65536)
        return True
