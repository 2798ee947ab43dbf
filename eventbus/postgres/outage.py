"""Whether one worker can work with the database: an outage is two log lines, not thousands.

Before it: a connection that fails, and later works again. After it: the log, and whoever observes outages.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("eventbus")


def _unobserved(_: object) -> None:
    """Nobody wants to know."""


class Outage:
    """Shared by all connections of one worker, so that it speaks once. For any thread.

    ``began`` is called with the reason of each outage, ``ended`` with its length in seconds; one after the other, in
    their order, from whichever thread noticed it. They should return soon; what they raise is logged and ignored.
    """

    def __init__(
        self, began: Callable[[str], None] = _unobserved, ended: Callable[[float], None] = _unobserved
    ) -> None:
        self._lock = threading.Lock()
        self._down: dict[str, str] = {}
        self._began_at = 0.0
        self._ended_at = 0.0
        self._observers = began, ended
        self._news: deque[Callable[[], None]] = deque()
        self._telling = threading.Lock()

    def began(self, link: str, problem: str, proven_at: float | None = None) -> None:
        """Report that ``link`` cannot work; logged when it is the first one.

        ``proven_at``: when the connection worked last that is lost now (monotonic seconds). If that was before the end
        of the last outage, then it was that outage that cut it, and only now somebody wanted to use it.
        """
        with self._lock:
            if not self._down:
                if proven_at is not None and proven_at < self._ended_at:
                    return
                self._began_at = time.monotonic()
                log.warning("database trouble: %s; retrying until it is back", problem, extra={"link": link})
                self._news.append(functools.partial(self._observers[0], problem))
            self._down[link] = problem
        self._tell()

    def ended(self, link: str) -> None:
        """Report that ``link`` works; logged when it was the last one."""
        with self._lock:
            if self._down.pop(link, None) is None or self._down:
                return
            self._ended_at = time.monotonic()
            seconds = self._ended_at - self._began_at
            log.info("the database is back after %.1f s", seconds, extra={"link": link, "outage_seconds": seconds})
            self._news.append(functools.partial(self._observers[1], seconds))
        self._tell()

    def _tell(self) -> None:
        """Whoever is telling already also tells what came up meanwhile; nobody waits for a slow observer."""
        while self._news and self._telling.acquire(blocking=False):
            try:
                while self._news:
                    _isolated(self._news.popleft())
            finally:
                self._telling.release()


def _isolated(tell: Callable[[], None]) -> None:
    try:
        tell()
    except Exception:
        log.exception("an observer of outages failed; the worker goes on without it")
