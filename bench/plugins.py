"""What plugins cost: draining a backlog without any, with those that are on by default, and with every hook."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from bench import children, line
from bench.report import Figure, Target, median, ratio
from bench.rounds import take_turns
from bench.servers import Server
from eventbus.event import OutboxEvent
from eventbus.plugins import Call, Counted, Failure, QueueFacts, Result, Settled, WorkerHandle, hookimpl

CHOICES: Final = ("none", "default", "every hook", "around each call")
"""Which plugins a consumer has."""
_TARGETS: Final = {"default": Target(">=", 0.9), "every hook": Target(">=", 0.8), "around each call": None}


class EveryHook:
    """Implements every hook that is called while events are published, claimed, handled and settled, as a no-op."""

    @hookimpl
    def eventbus_around_publish(self, events: Sequence[OutboxEvent]) -> None:
        """Nothing around it."""

    @hookimpl
    def eventbus_veto_publish(self, event: OutboxEvent) -> str | None:
        """No veto."""

    @hookimpl
    def eventbus_amend_headers(self, event: OutboxEvent, headers: dict[str, str]) -> None:
        """No change."""

    @hookimpl
    def eventbus_limit_claim(self, queue: str, room: int, held: int) -> int | None:
        """No limit."""

    @hookimpl
    def eventbus_around_handler(self, queue: QueueFacts) -> Any:
        """Nothing around it."""

    @hookimpl
    def eventbus_around_async_handler(self, queue: QueueFacts) -> Any:
        """Nothing around it."""

    @hookimpl
    def eventbus_handler_failed(self, queue: str, failure: Failure) -> None:
        """Nothing."""

    @hookimpl
    def eventbus_counted(self, queue: str, counted: Counted) -> None:
        """Nothing."""

    @hookimpl
    def eventbus_settled(self, queue: str, settled: Settled) -> None:
        """Nothing."""

    @hookimpl
    def eventbus_probed(self, queue: str, result: Result) -> None:
        """Nothing."""

    @hookimpl
    def eventbus_relayed(self, deliveries: dict[str, int]) -> None:
        """Nothing."""

    @hookimpl
    def eventbus_claimed(self, queue: str, count: int) -> None:
        """Nothing."""

    @hookimpl
    def eventbus_worker_ready(self, worker: WorkerHandle) -> None:
        """Nothing."""


class AroundEachCall(EveryHook):
    """The same with a context manager around each call, which costs whatever it does."""

    @hookimpl
    def eventbus_around_handler(self, queue: QueueFacts) -> Any:
        """One that does nothing."""
        return nothing


@contextmanager
def nothing(_call: Call) -> Iterator[None]:
    """A context manager as a plugin writes it, without content."""
    yield


def drained(server: Server, events: int, plugins: str) -> tuple[float, float]:
    """A handler that does nothing, whose queue was filled before: events per second, and per second of its processor.

    The second one is that of the consumer's process alone, and what other programs do disturbs it less.
    """
    with server.database() as dsn, line.connect(dsn) as connection:
        line.declare(connection)
        line.fill(connection, events)
        line.relay(connection)
        line.checkpoint(connection)
        result = children.drained("bench.consumer", "--dsn", dsn, "--events", events, "--plugins", plugins)
        line.require_settled(connection, events)
    return result.rate, result.events / result.cpu_seconds


def plugins(server: Server, events: int, rounds: int) -> list[Figure]:
    """Rates, and their ratios to draining without plugins."""
    contenders = {choice: functools.partial(drained, server, events, choice) for choice in CHOICES}
    found = take_turns(contenders, rounds)
    rates = {choice: [rate for rate, _ in each] for choice, each in found.items()}
    loads = {choice: [load for _, load in each] for choice, each in found.items()}
    figures = [median("plugins", f"plugins: {choice}", each, "events/s") for choice, each in rates.items()]
    for choice, wanted in _TARGETS.items():
        figures.append(ratio("plugins", f"{choice} / none", rates[choice], rates["none"], target=wanted))
        figures.append(ratio("plugins", f"{choice} / none, by processor time", loads[choice], loads["none"]))
    return figures
