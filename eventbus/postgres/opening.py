"""The search for a connection for a transactional handler.

Before it: ``transactions`` has a call to make. After it: ``transactions`` has a session that works, or the call is put
off. Nothing here talks to the database.
"""

from __future__ import annotations

import time
from typing import Final

import psycopg

from eventbus.consuming.boundary import Postponed
from eventbus.errors import Unavailable
from eventbus.postgres.breaker import Backoff, Breaker
from eventbus.postgres.link import describe
from eventbus.postgres.tries import Patience, Session, link_of

_OPENING_SECONDS: Final = 5.0


class Opening:
    """One search, which lasts a few seconds at most."""

    def __init__(self, patience: Patience, breaker: Breaker) -> None:
        self._patience = patience
        self._breaker = breaker
        self._until = time.monotonic() + _OPENING_SECONDS
        self._backoff = Backoff(patience.random)

    def left(self) -> float:
        """Seconds for which to wait for a turn to connect."""
        return max(0.0, self._until - time.monotonic())

    def failed(self, error: BaseException, session: Session | None, *, fresh: bool) -> float | None:
        """Seconds until to look again; None for what is no failure of the database.

        ``session``: the one that failed, which is ``fresh`` if it was just made; None: there was none to be had, and
        the breaker says when to try again. Raises :class:`Postponed` when it has lasted long enough.
        """
        if isinstance(error, Unavailable):
            raise Postponed("the database is away", delay=1.0) from error
        if not isinstance(error, psycopg.Error):
            return None
        if not fresh:
            return 0.0  # it broke while nobody used it
        self._breaker.outage.began(link_of(self._patience), describe(error, "connect"))
        if time.monotonic() > self._until:
            raise Postponed("the database is away", delay=1.0) from error
        if session is None:
            return 0.0
        self._backoff.failures += 1
        return self._backoff.pause()

    def worked(self) -> None:
        """There is one."""
        self._breaker.outage.ended(link_of(self._patience))
