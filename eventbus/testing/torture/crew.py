"""The processes of a torture run, and what is done to them: each fault is written down, and put right again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import psycopg

from eventbus.testing.torture.history import Journal
from eventbus.testing.torture.postgres.tables import TERMINATE

FAULTS: Final = ("kill", "stop", "term", "terminate")
LEASE: Final = 5.0
"""Seconds; shorter ones run out on a busy machine, where nothing but that has gone wrong."""
PUBLISHERS: Final = 2
WORKERS: Final = 2
SETTINGS: Final = MappingProxyType(
    {
        "EVENTBUS_LEASE": str(LEASE),
        "EVENTBUS_MAX_CRASHES": "1000",  # no event is to blame for a kill
        "EVENTBUS_CONCURRENCY": "4",
        "EVENTBUS_PREFETCH": "300",
        "EVENTBUS_BATCH": "100",
        "EVENTBUS_PLUGINS": "stats",
    }
)


class EndedByItself(Exception):
    """A process ended that nobody had asked to; the text has the end of its log."""


class Crew:
    """Publishers and workers. However the block is left, none of them outlives it."""

    def __init__(self, environment: Mapping[str, str], folder: Path, journal: Journal, name: str) -> None:
        self._environment = {**environment, "TORTURE_NAME": name}
        self._folder = folder
        self._journal = journal
        self._name = name
        self._publishers: list[subprocess.Popen[bytes]] = []
        self._workers: list[subprocess.Popen[bytes]] = []
        self._leaving: list[subprocess.Popen[bytes]] = []
        self._frozen: dict[subprocess.Popen[bytes], float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._publishers, *self._workers, *self._leaving):
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def work(self, count: int) -> None:
        """Start workers."""
        command = ["-m", "eventbus", "consume", "eventbus.testing.torture.handlers:bus"]
        self._workers += [self._start(command) for _ in range(count)]

    def publish(self) -> None:
        """Start the publishers."""
        module = "eventbus.testing.torture.publisher"
        self._publishers = [self._start(["-m", module, str(number)]) for number in range(1, PUBLISHERS + 1)]

    @property
    def workers(self) -> frozenset[int]:
        """The processes of those who work."""
        return frozenset(process.pid for process in self._workers)

    def look(self) -> None:
        """Wake who was frozen long enough, take note of who has left, raise :class:`EndedByItself`."""
        for process, until in [*self._frozen.items()]:
            if time.monotonic() > until:
                process.send_signal(signal.SIGCONT)
                del self._frozen[process]
        for process in [*self._leaving]:
            if process.poll() is not None:
                self._journal.write("exit", pid=process.pid, code=process.returncode)
                self._leaving.remove(process)
        for process in (*self._workers, *self._publishers):
            if process.poll() is not None:
                log = (self._folder / "processes.log").read_text(errors="replace")[-2000:]
                raise EndedByItself(f"process {process.pid} ended with {process.returncode}:\n{log}")

    def hurt(self, kind: str, chance: random.Random, ready: frozenset[int], connection: psycopg.Connection) -> None:
        """Do one fault to a worker that is ready, or to connections of any process."""
        victims = [process for process in self._workers if process.pid in ready and process not in self._frozen]
        if kind == "terminate":
            began = time.time_ns()
            own = self._environment["TORTURE_OWNS_SERVER"] == "1"
            connection.execute(TERMINATE, (self._name, own))
            self._journal.write("fault", kind=kind, pid=None, at=began, until=time.time_ns())
        elif victims:
            self._hurt(kind, chance.choice(victims))

    def end_publishing(self) -> None:
        """Stop the publishers in good order."""
        self._ask(self._publishers)
        self._publishers = []
        self._wait()

    def spare(self) -> None:
        """Let nobody be frozen any longer."""
        self._frozen = dict.fromkeys(self._frozen, 0.0)
        self.look()

    def end_working(self) -> None:
        """Stop the workers in good order."""
        self._ask(self._workers)
        self._workers = []
        self._wait()

    def _hurt(self, kind: str, victim: subprocess.Popen[bytes]) -> None:
        if kind == "stop":
            self._fault(kind, victim.pid, 2 * LEASE + 1)
            victim.send_signal(signal.SIGSTOP)
            self._frozen[victim] = time.monotonic() + 2 * LEASE
            return
        self._workers.remove(victim)
        if kind == "kill":
            victim.kill()
            victim.wait()
            self._fault(kind, victim.pid)
        else:
            self._fault(kind, victim.pid)
            self._ask([victim])
        self.work(1)

    def _ask(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            process.terminate()
        self._leaving += processes

    def _wait(self) -> None:
        for process in self._leaving:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                process.kill()
                process.wait()
        self.look()

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        with (self._folder / "processes.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *arguments],
                env=self._environment | {"PYTHONUNBUFFERED": "1"},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _fault(self, kind: str, pid: int | None, seconds: float = 0) -> None:
        now = time.time_ns()
        self._journal.write("fault", kind=kind, pid=pid, at=now, until=now + int(seconds * 1e9))


def environment(dsn: str, schema: str, history: Path, seed: str, *, owns_server: bool) -> dict[str, str]:
    """What the processes of a run see."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("EVENTBUS_")}
    return others | dict(SETTINGS) | {
        "EVENTBUS_DSN": dsn, "EVENTBUS_SCHEMA": schema, "TORTURE_HISTORY": str(history), "TORTURE_SEED": seed,
        "TORTURE_OWNS_SERVER": "1" if owns_server else "0",
    }  # fmt: skip
