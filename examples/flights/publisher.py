"""The publisher of the demo: a thread that stays a little ahead of the consumers and can be stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Self

from eventbus.publishing.outbox import Outbox
from examples.flights import database
from examples.flights.flight import Flight
from examples.flights.publish import publish


class Publisher:
    """Publishes ``flights`` while the block runs, never more than it was allowed to; leaving the block stops it."""

    def __init__(self, environment: Mapping[str, str], outbox: Outbox, flights: Iterable[Flight]) -> None:
        self.published = 0
        self._environment = environment
        self._outbox = outbox
        self._flights = flights
        self._allowed = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def allow(self, count: int) -> None:
        """Let it publish until ``count`` flights are out."""
        with self._changed:
            self._allowed = count
            self._changed.notify()

    @property
    def ended(self) -> bool:
        """Whether everything is published, or nothing more will be."""
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise what ended the publishing, if something did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with database.connect(self._environment) as connection:
                publish(connection, self._outbox, self._flights, self._count)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the demo's thread
            self._error = error

    def _count(self, flights: int) -> None:
        with self._changed:
            self.published += flights
            self._changed.wait_for(lambda: self._stopped or self.published < self._allowed)
            if self._stopped:
                raise _Stopped


class _Stopped(Exception):
    """The demo ends before everything is published."""
