"""Stands in for a worker, so that what a plugin does with it can be seen without a database."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from eventbus.plugins.values import QueueFacts
from eventbus.settings import Settings

Action = Callable[[], Awaitable[None]]


class BenchWorker:
    """A :class:`~eventbus.plugins.WorkerHandle` that does nothing and remembers what it was asked to do.

    ``statements``: the SQL and parameters of ``rows``. ``answers``: what the next calls of it return, or raise; after
    them no rows. ``repeated``, ``begun``: the actions of ``every`` and ``soon`` by their names; a test awaits them
    itself. ``requests``: the calls of everything else, as tuples that begin with the method's name.
    """

    def __init__(self, queues: Iterable[QueueFacts] = (), settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.queues: Mapping[str, QueueFacts] = {queue.name: queue for queue in queues}
        self.worker_id = uuid.uuid4()
        self.pools: dict[str, tuple[int, int]] = {}
        self.handled: dict[str, int] = {}
        self.statements: list[tuple[str, Sequence[Any]]] = []
        self.answers: list[list[tuple[Any, ...]] | Exception] = []
        self.repeated: dict[str, Action] = {}
        self.begun: dict[str, Action] = {}
        self.requests: list[tuple[Any, ...]] = []

    async def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Remember the statement; the next of ``answers``."""
        self.statements.append((sql, parameters))
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, Exception):
            raise answer
        return answer

    def every(self, seconds: float, action: Action, name: str) -> None:  # noqa: ARG002 - a test has no patience
        """Remember the action."""
        self.repeated[name] = action

    def soon(self, action: Action, name: str) -> None:
        """Remember the action."""
        self.begun[name] = action

    def wake(self, queue: str) -> None:
        """Remember it."""
        self.requests.append(("wake", queue))

    def hold(self, queue: str, seconds: float) -> None:
        """Remember it."""
        self.requests.append(("hold", queue, seconds))

    async def pause(
        self, queue: str, source: str, reason: str, seconds: float | None, probe_seconds: float | None = None
    ) -> None:
        """Remember it."""
        self.requests.append(("pause", queue, source, reason, seconds, probe_seconds))

    async def resume(self, queue: str, source: str) -> bool:
        """Remember it; whether a pause of this source was remembered before."""
        paused = any(request[:3] == ("pause", queue, source) for request in self.requests)
        self.requests.append(("resume", queue, source))
        return paused

    async def free_probe(self, queue: str, source: str) -> None:
        """Remember it."""
        self.requests.append(("free_probe", queue, source))

    def finished(self, queue: str) -> int:
        """What ``handled`` says."""
        return self.handled.get(queue, 0)
