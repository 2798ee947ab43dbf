"""A wire between the bus and its server that fails at a statement, before or after the server has carried it out.

Before it: a test arms a fault and gives ``Wire.dsn`` to a bus. After it: the server, which knows nothing of the wire.
Statements are found in the messages of PostgreSQL's protocol, also those that were prepared earlier.
"""

from __future__ import annotations

import re
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

When = Literal["before", "after"]
Deed = Literal["cut", "silence", "delay"]
_WAITS_FOR_SYNC = b"PBDEC"
"""Types of the messages of an extended query, which is sent and answered as a whole."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at the next statement in which the regular expression ``pattern`` is found, once.

    ``cut``: both sides see the connection end. ``silence``: neither side hears of it again, until the wire ends.
    ``delay``: the statement, or its answer, is held for ``seconds``. ``before``: the server has not got the statement;
    ``after``: it has answered, and the client has not got the answer.
    """

    pattern: str
    when: When
    deed: Deed = "cut"
    seconds: float = 0.0


class Wire:
    """Forwards every connection to the server of ``dsn``; ``self.dsn`` leads through it. A context manager.

    ``cuts``: how many faults have happened. While ``refusing``, new connections are closed at once, and counted in
    ``refusals``. At the end of the block its connections are cut and its threads have ended.
    """

    def __init__(self, dsn: str) -> None:
        with psycopg.connect(dsn) as connection:
            host, port = connection.info.host, connection.info.port
        self._server = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        parts = conninfo_to_dict(dsn) | {"host": "127.0.0.1", "port": self._listener.getsockname()[1]}
        self.dsn = make_conninfo("", **(parts | {"sslmode": "disable", "gssencmode": "disable"}))
        self.cuts = 0
        self.refusing = False
        self.refusals = 0
        self._fault: Fault | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._clients: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over.set()
            clients = list(self._clients)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for client in clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def cut_next(self, when: When) -> None:
        """Cut the connection that sends the next COMMIT."""
        self.arm(Fault("^COMMIT", when))

    def arm(self, fault: Fault) -> None:
        """Let this fault happen next, instead of one that has not happened yet."""
        re.compile(fault.pattern)
        with self._lock:
            self._fault = fault

    def take(self, statement: str) -> Fault | None:
        """The armed fault if it is for this statement; it is armed no longer."""
        with self._lock:
            fault = self._fault
            if fault is None or not re.search(fault.pattern, statement):
                return None
            self._fault = None
            self.cuts += 1
            return fault

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refusing:
                    client.close()
                    self.refusals += 1
                    continue
                with self._lock:
                    if self._over.is_set():
                        client.close()
                        return
                    self._clients.add(client)
                    thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                    self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        try:
            self._forward(client)
        finally:
            with self._lock:
                self._clients.discard(client)
            client.close()

    def _forward(self, client: socket.socket) -> None:
        family = socket.AF_UNIX if isinstance(self._server, str) else socket.AF_INET
        with client, socket.socket(family) as server, suppress(OSError):
            server.connect(self._server)
            requests = _Requests()
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    if ready is server:
                        client.sendall(data)
                    elif not self._pass_on(requests, data, client, server):
                        return

    def _pass_on(self, requests: _Requests, data: bytes, client: socket.socket, server: socket.socket) -> bool:
        """Give the server what came from the client; false when the connection is to end."""
        for request, statements in requests.read(data):
            fault = next((one for text in statements if (one := self.take(text))), None)
            if fault is None or fault.when == "after":
                server.sendall(request)
            if fault is None:
                continue
            answer = _answer(server) if fault.when == "after" else b""
            if fault.deed == "cut":
                return False
            self._over.wait(None if fault.deed == "silence" else fault.seconds)
            if self._over.is_set():
                return False
            if fault.when == "after":
                client.sendall(answer)
            else:
                server.sendall(request)
        return True


class _Requests:
    """Cuts what one client sends into requests, each with the texts of the statements that it executes."""

    def __init__(self) -> None:
        self._unread = b""
        self._started = False
        self._prepared: dict[bytes, str] = {}
        self._request = b""
        self._statements: list[str] = []

    def read(self, data: bytes) -> Iterator[tuple[bytes, list[str]]]:
        """The requests that are complete now. What begins a connection is a request without statements."""
        self._unread += data
        while message := self._message():
            if not self._started:
                self._started = True
                yield message, []
                continue
            self._request += message
            self._note(message[:1], message[5:])
            if message[:1] not in _WAITS_FOR_SYNC:
                yield self._request, self._statements
                self._request, self._statements = b"", []

    def _message(self) -> bytes:
        head = 1 if self._started else 0
        if len(self._unread) < head + 4:
            return b""
        end = head + int(struct.unpack_from("!I", self._unread, head)[0])
        if len(self._unread) < end:
            return b""
        message, self._unread = self._unread[:end], self._unread[end:]
        return message

    def _note(self, kind: bytes, body: bytes) -> None:
        match kind:
            case b"Q":
                self._statements.append(body[:-1].decode(errors="replace"))
            case b"P":
                name, text, _ = body.split(b"\0", 2)
                self._prepared[name] = text.decode(errors="replace")
            case b"B":
                name = body.split(b"\0", 2)[1]
                self._statements.append(self._prepared.get(name, ""))
            case _:
                pass


def _answer(server: socket.socket) -> bytes:
    """Everything that the server says up to and with ReadyForQuery; raises OSError when the connection ends."""
    answer, at = b"", 0
    while True:
        while len(answer) >= at + 5:
            end = at + 1 + int(struct.unpack_from("!I", answer, at + 1)[0])
            if len(answer) < end:
                break
            if answer[at : at + 1] == b"Z":
                return answer
            at = end
        data = server.recv(65536)
        if not data:
            raise ConnectionResetError("the server has ended the connection")
        answer += data
