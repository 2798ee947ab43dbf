"""Does what the circuits of one worker decide: here at once, and in the database for everybody.

Before it: the plugin hears of failures and of probes. What the database refuses is tried again while it makes sense and
logged in one line per outage. A crash leaves the pause as it is: the database takes the next probe, or begins the pause
again if the probe was lost.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, assert_never
from uuid import UUID

from eventbus.plugins import Failure, Postpone, Result, WorkerHandle
from eventbus.signals import Signal, send
from eventbus_circuit_breaker.announcing import closed, opened
from eventbus_circuit_breaker.circuit import Circuit, Load, Step
from eventbus_circuit_breaker.options import Options
from eventbus_circuit_breaker.records import SOURCE, Closing, Opening, Records

log = logging.getLogger("eventbus")

_AGAIN: Final = 1.0
"""Seconds after which the database is asked again that refused."""
_LOOK: Final = 1.0
"""Seconds between two looks at how many calls have ended."""
_LOOKS: Final = (0.01, 0.5)
"""Shortest and longest time in seconds between two looks at the calls that still run."""
_UNTOLD: Final = 2.0
"""Seconds after a probe that told nothing until there may be another one."""
_CUT: Final = 300
"""Letters of an error's message that are kept."""

Answer = TypeVar("Answer")


class Switch:
    """The breakers of one worker. ``sender`` is that of the signals; ``random`` returns numbers from 0 to 1."""

    def __init__(self, worker: WorkerHandle, options: Options, random: Callable[[], float], sender: Any) -> None:
        self._worker = worker
        self._options = options
        self._sender = sender
        self._records = Records(worker, options)
        now = time.monotonic()
        self._circuits = {name: Circuit(options, random, worker.finished(name), now) for name in worker.queues}
        self._failed_probes: dict[str, UUID] = {}
        """By queue, the event of the newest probe that failed."""
        self._draining = False
        self._in_trouble = False
        worker.every(min(_LOOK, options.window / 10), self._look_around, "circuit breakers: look")

    def failed(self, queue: str, failure: Failure, *, counts: bool) -> Postpone | None:
        """A call has failed."""
        reaction = self._circuits[queue].failed(failure, self._load(queue), time.monotonic(), counts=counts)
        if failure.probe and counts:
            self._failed_probes[queue] = failure.event.event_id
        if reaction.step is not None:
            self._take(reaction.step, queue, failure)
        return None if reaction.postpone is None else Postpone(reaction.postpone)

    def probed(self, queue: str, probe: Result) -> None:
        """The outcome of a probe is stored: it decides, unless it told nothing or has been judged when it failed."""
        if probe.outcome in ("done", "discarded"):
            began = probe.started_at
            self._soon("close", queue, lambda: self._close(queue, began))
        elif probe.event is None or self._failed_probes.pop(queue, None) != probe.event.event_id:
            self._soon("free the probe", queue, lambda: self._free(queue))

    def paused(self, queue: str) -> None:
        """The queue is paused, by a breaker or by somebody else."""
        circuit = self._circuits.get(queue)
        if circuit is not None and not (circuit.state == "open" and circuit.until > time.monotonic()):
            self._soon("look", queue, lambda: self._look(queue))

    def drain(self) -> None:
        """Keep nobody waiting from now on."""
        self._draining = True

    def _load(self, queue: str) -> Load:
        running, _ = self._worker.pools.get(queue, (0, 0))
        return Load(self._worker.finished(queue), running)

    def _take(self, step: Step, queue: str, failure: Failure) -> None:
        """Nothing of the queue starts here from now on; the database is asked in the background."""
        error = _named(failure)
        probe_began = failure.started_at if failure.probe else None
        circuit = self._circuits[queue]
        self._worker.hold(queue, circuit.until - time.monotonic() + self._options.first_pause)
        match step:
            case "doubt":
                self._soon("doubt", queue, lambda: self._doubt(queue, error))
            case "open" | "reopen":
                self._soon("open", queue, lambda: self._open(queue, error, probe_began))
            case _:
                assert_never(step)

    async def _doubt(self, queue: str, error: str) -> None:
        """Open it unless one of the calls that still run proves that the handler works."""
        circuit, pause = self._circuits[queue], _LOOKS[0]
        while (verdict := circuit.doubt(self._load(queue), time.monotonic())) == "wait":
            if self._draining:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LOOKS[1])
        if verdict == "open":
            await self._open(queue, error, None)
        else:
            self._go_on(queue)

    async def _open(self, queue: str, error: str, probe_began: float | None) -> None:
        """For all processes; if the database is away for as long as the pause would take, only here."""
        circuit = self._circuits[queue]
        opening = await self._insist(
            lambda: self._records.open(
                queue, circuit.reason, error, None if probe_began is None else _age(probe_began)
            ),
            circuit.until,
        )
        now = time.monotonic()
        if opening is None or opening.state in ("closed", "unknown"):
            circuit.close(self._worker.finished(queue), now)
        else:
            circuit.open(opening.seconds, opening.trips, now)
            if opening.state == "opened":
                self._say_opened(queue, circuit.reason, error, opening)
        self._go_on(queue)

    async def _close(self, queue: str, probe_began: float) -> None:
        deadline = time.monotonic() + self._options.probe_timeout
        closing = await self._insist(lambda: self._records.close(queue, _age(probe_began)), deadline)
        if closing is not None:
            self._circuits[queue].close(self._worker.finished(queue), time.monotonic())
            self._say_closed(queue, closing)

    async def _free(self, queue: str) -> None:
        """Not at once: the next one may tell nothing either, and so on."""
        if not self._draining:
            await asyncio.sleep(min(_UNTOLD, self._options.first_pause))
        deadline = time.monotonic() + self._options.probe_timeout
        await self._insist(lambda: self._worker.free_probe(queue, SOURCE), deadline)

    async def _look(self, queue: str) -> None:
        found = await self._insist(lambda: self._records.look(queue), time.monotonic())
        if found is not None:
            self._circuits[queue].open(*found, time.monotonic())

    def _go_on(self, queue: str) -> None:
        """From here on the database says whether the queue is paused."""
        self._worker.hold(queue, 0)
        self._worker.wake(queue)

    async def _insist(self, ask: Callable[[], Awaitable[Answer]], deadline: float) -> Answer | None:
        """What the database answers; None if it does not until then."""
        while True:
            try:
                answer = await ask()
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not touch delivery
                self._complain(error)
            else:
                self._in_trouble = False
                return answer
            left = deadline - time.monotonic()
            if left <= 0 or self._draining:
                return None
            await asyncio.sleep(min(_AGAIN, left))

    def _complain(self, error: Exception) -> None:
        if not self._in_trouble:
            self._in_trouble = True
            log.warning("circuit breakers work in this process only, for the database does not answer: %s", error)

    async def _look_around(self) -> None:
        now = time.monotonic()
        for queue, circuit in self._circuits.items():
            circuit.look(self._worker.finished(queue), now)

    def _soon(self, what: str, queue: str, action: Callable[[], Awaitable[None]]) -> None:
        self._worker.soon(action, f"circuit breaker of {queue}: {what}")

    def _say_opened(self, queue: str, reason: str, error: str, opening: Opening) -> None:
        log.warning(
            "circuit breaker: queue %s is paused for %.3g s (%s; %s); then one event is tried",
            queue, opening.seconds, reason, error, extra={"queue": queue, "trips": opening.trips},
        )  # fmt: skip
        self._send(opened, queue=queue, seconds=opening.seconds, trips=opening.trips, reason=reason, error=error)

    def _say_closed(self, queue: str, closing: Closing) -> None:
        log.warning(
            "circuit breaker: queue %s goes on after %.3g s, a probe succeeded", queue, closing.seconds,
            extra={"queue": queue, "trips": closing.trips},
        )  # fmt: skip
        self._send(closed, queue=queue, seconds=closing.seconds, trips=closing.trips)

    def _send(self, signal: Signal, **what: Any) -> None:
        def later(receiver: Callable[..., Any], sender: Any, what: Any) -> None:
            self._worker.soon(functools.partial(receiver, sender, **what), f"signal of {SOURCE}")

        send(signal, self._sender, later, **what)


def _age(began: float) -> float:
    """Seconds since a call began."""
    return time.monotonic() - began


def _named(failure: Failure) -> str:
    """The error of a failure in one line, without control characters."""
    error = failure.error
    if error is None:
        return "the handler asked for a retry" if failure.outcome == "retry" else "the handler gave the event up"
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - what a handler raises may raise when it is shown
        text = type(error).__name__
    return " ".join(text.replace("\0", " ").split())[:_CUT]
