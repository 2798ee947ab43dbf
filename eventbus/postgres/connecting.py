"""Makes the bus's own connections: each attempt is a turn of the breaker, and ends with a statement that was answered.

Before it: ``breaker`` has given a turn. After it: a connection for one of the links, the heartbeat, the listener, the
clean-up or a transactional handler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from eventbus.postgres.breaker import Turn

_DEFAULTS: Final[Mapping[str, int]] = {
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
SESSION: Final = b"SET default_transaction_isolation = 'read committed'"
"""What every connection of the bus says first, whatever the role's default is."""


def conninfo(dsn: str, name: str) -> str:
    """``dsn`` with our name, and with time-outs that notice a dead peer unless it sets its own."""
    return make_conninfo(dsn, **{**_DEFAULTS, **conninfo_to_dict(dsn), "application_name": f"eventbus {name}"})


async def connect(turn: Turn, target: str) -> psycopg.AsyncConnection[Any]:
    """One attempt, on the event loop; in autocommit mode. Raises :class:`psycopg.Error`."""
    with turn:
        connection = await psycopg.AsyncConnection.connect(target, autocommit=True)
        try:
            await connection.execute(SESSION)
        except BaseException:
            await connection.close()
            raise
    return connection


def connect_blocking(turn: Turn, target: str) -> psycopg.Connection[Any]:
    """The same in a thread."""
    with turn:
        connection = psycopg.connect(target, autocommit=True)
        try:
            connection.execute(SESSION)
        except BaseException:
            connection.close()
            raise
    return connection
