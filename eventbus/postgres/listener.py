"""Hears NOTIFY on a connection of its own and wakes the relay and the consumer of this process.

Nothing depends on it but latency: whoever is woken looks for itself, and polls when nothing is heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.pq.misc import PGnotify

from eventbus.postgres.breaker import Backoff, Breaker
from eventbus.postgres.connecting import connect, conninfo
from eventbus.postgres.link import describe, unreachable

_NAME = "listener"


@dataclass(frozen=True, slots=True)
class Ears:
    """Whom to tell. ``fed`` gets queue numbers, or ``None`` for any queue."""

    published: Callable[[], None]
    relayed: Callable[[], None]
    """The relay of another process has relayed something."""
    fed: Callable[[Sequence[int] | None], None]
    listening: Callable[[bool], None]
    """Whether notifications can be heard from now on."""
    own_relay: Callable[[], int | None]
    """The server's process behind the relay of this process, which wakes the consumer directly; None: not known."""


class Listener:
    """Listens until it is cancelled, and comes back by itself after every lost connection."""

    def __init__(self, dsn: str, schema: str, breaker: Breaker, ears: Ears) -> None:
        self._target = conninfo(dsn, _NAME)
        self._relay_channel = f"{schema}.relay"
        self._work_channel = f"{schema}.work"
        self._breaker = breaker
        self._backoff = Backoff()
        """Of connections that stood."""
        self._ears = ears

    async def run(self) -> None:
        """Listen; the back-off after what fails on a connection doubles from 0.1 s to 5 s."""
        while True:
            connection = None
            try:
                connection = await connect(await self._breaker.turn(), self._target)
                async with connection:
                    await self._listen(connection)
                    self._backoff.failures = 0
                    await self._hear(connection)
            except psycopg.Error as error:
                self._ears.listening(False)
                self._breaker.outage.began(_NAME, describe(error, "LISTEN"))
                if connection is not None:
                    await self._lost(error)

    async def _lost(self, error: psycopg.Error) -> None:
        if unreachable(error):
            self._breaker.broke()
        self._backoff.failures += 1
        await asyncio.sleep(self._backoff.pause())

    async def _listen(self, connection: psycopg.AsyncConnection) -> None:
        for channel in (self._relay_channel, self._work_channel):
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self._breaker.outage.ended(_NAME)
        self._ears.listening(True)
        self._ears.published()  # whatever was said before we could hear it
        self._ears.fed(None)

    async def _hear(self, connection: psycopg.AsyncConnection) -> None:
        """Wait on the socket itself: the driver's own generator looks ten times a second, which costs while idle."""
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        socket = connection.fileno()
        loop.add_reader(socket, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                connection.pgconn.consume_input()
                while (notification := connection.pgconn.notifies()) is not None:
                    self._hear_one(notification)
        finally:
            loop.remove_reader(socket)

    def _hear_one(self, notification: PGnotify) -> None:
        if notification.relname.decode() == self._relay_channel:
            self._ears.published()
        elif notification.be_pid != self._ears.own_relay():
            self._hear_work(_queue_numbers(notification.extra.decode(errors="replace")))

    def _hear_work(self, queue_ids: list[int] | None) -> None:
        if queue_ids is None:
            self._ears.published()  # a worker has left or died: it may have been the relay
        elif self._ears.own_relay() is not None:
            self._ears.relayed()
        self._ears.fed(queue_ids)


def _queue_numbers(payload: str) -> list[int] | None:
    """The queues that a tick has fed, if any; None for ``*`` and for what is not ours: every session may notify."""
    try:
        return [int(number) for number in payload.split(",")] if payload else []
    except ValueError:
        return None
