"""Counts on the wire what a process asks of the server: the only count that nothing else on the server can disturb.

A relay between client and server, in a thread of its own, that looks at the type of each message from the client. See
"Message Formats" in PostgreSQL's documentation: a start-up message has no type; of the others, ``Q`` and ``E`` each run
one statement.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import conninfo

_RUNS: Final = (b"Q", b"E")


@dataclass(slots=True)
class Counter:
    """Statements that went through until now."""

    statements: int = 0


@contextmanager
def counted(dsn: str) -> Iterator[tuple[str, Counter]]:
    """A DSN that leads to the same database, and the counter of what is run over it; unencrypted."""
    counter = Counter()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="wire", daemon=True)
    thread.start()
    wire = _Wire(*_address(dsn), counter)
    try:
        port = asyncio.run_coroutine_threadsafe(wire.open(), loop).result(10)
        through: dict[str, str | int] = {
            "host": "127.0.0.1",
            "hostaddr": "127.0.0.1",
            "port": port,
            "sslmode": "disable",
        }
        yield conninfo.make_conninfo(dsn, **through, gssencmode="disable"), counter
    finally:
        asyncio.run_coroutine_threadsafe(wire.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def _address(dsn: str) -> tuple[str, int]:
    """Where the server really is: host name or folder of the socket, and port."""
    with psycopg.connect(dsn) as connection:
        return connection.info.hostaddr or connection.info.host, connection.info.port


class _Wire:
    """Listens on a port of this machine and passes everything on to the server."""

    def __init__(self, host: str, port: int, counter: Counter) -> None:
        self._host = host
        self._port = port
        self._counter = counter
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    async def open(self) -> int:
        """Start listening; the port."""
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Cut every connection."""
        assert self._listener is not None
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._host.startswith("/"):
            socket = os.path.join(self._host, f".s.PGSQL.{self._port}")  # noqa: PTH118 - an address, not a file
            server = await asyncio.open_unix_connection(socket)
        else:
            server = await asyncio.open_connection(self._host, self._port)
        for passing in (self._ask(reader, server[1]), _answer(server[0], writer)):
            task = asyncio.create_task(passing)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        """From the client to the server, message by message."""
        kind = b""  # of the start-up message
        try:
            while True:
                length = await client.readexactly(4)
                server.write(kind + length + await client.readexactly(int.from_bytes(length) - 4))
                await server.drain()
                self._counter.statements += kind in _RUNS
                kind = await client.readexactly(1)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            server.close()


async def _answer(server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
    """From the server to the client, as it comes."""
    try:
        while data := await server.read(65536):
            client.write(data)
            await client.drain()
    except ConnectionError:
        pass
    finally:
        client.close()
