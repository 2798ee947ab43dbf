"""What really happened, written down outside the bus at once, and read again when all is over.

Every process appends to a file of its own, one line per happening in one write, so that a line outlives the process.
Times are nanoseconds of the machine's clock, which is also the clock of its PostgreSQL.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

FOREVER: Final = 2**63
"""A moment that never comes."""


class Journal:
    """Appends to one file of a folder, from any thread."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = os.open(folder / f"{name}.journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, **facts: Any) -> None:
        """Record that something happened just now, unless the facts say when."""
        os.write(self._file, orjson.dumps({"what": what, "at": time.time_ns(), **facts}) + b"\n")


@dataclass(slots=True)
class Run:
    """One call of a handler for one event. ``told`` is none when it never came to its end."""

    queue: str
    token: str
    event_id: str
    key: str | None
    attempt: int
    redriven: bool
    pid: int
    call: str
    """Unique; the effect of a transactional handler names it."""
    started: int
    ended: int = FOREVER
    told: str | None = None

    def __str__(self) -> str:
        end = "…" if self.ended == FOREVER else f"{self.ended / 1e9:.4f}"
        return (
            f"[{self.queue} {self.token} attempt {self.attempt}{' redriven' * self.redriven}"
            f" pid {self.pid} {self.started / 1e9:.4f}-{end} {self.told}]"
        )


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One registration of a process as a worker. Nobody takes it over before ``silent``, ``FOREVER`` if nobody did."""

    pid: int
    started: int
    silent: int


@dataclass(slots=True)
class History:
    """Everything that was written down."""

    runs: list[Run] = field(default_factory=list)
    committed_at: dict[int, int] = field(default_factory=dict)
    """When a publisher saw its transaction committed, by the number of the transaction."""
    incarnations: list[Incarnation] = field(default_factory=list)
    redriven: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    """How often a dead letter was redriven, by queue and token."""
    faults: list[str] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """When connections of the bus were cut, in order."""


def read(folder: Path) -> History:
    """The history that the journals of a folder tell."""
    history = History()
    runs: dict[tuple[int, int], Run] = {}
    workers: dict[str, dict[str, Any]] = {}
    killed: dict[int, int] = {}
    for line in sorted(_lines(folder), key=lambda line: line["at"]):
        match line:
            case {"what": "start", "run": number, "pid": pid, "at": at, **facts}:
                facts.pop("what", None)
                runs[pid, number] = Run(pid=pid, call=f"{pid}-{number}", started=at, **facts)
            case {"what": "end", "run": number, "pid": pid, "at": at, "told": told}:
                runs[pid, number].ended, runs[pid, number].told = at, told
            case {"what": "commit", "transaction": number, "at": at}:
                history.committed_at[number] = at
            case {"what": "worker", "id": worker}:
                workers[worker] = line
            case {"what": "redrive", "queue": queue, "token": token}:
                history.redriven[queue, token] += 1
            case {"what": "fault", "kind": kind}:
                history.faults.append(kind)
                if kind == "kill":
                    killed[line["pid"]] = line["at"]
                if kind == "cut":
                    history.cuts.append(line["at"])
            case _:
                raise AssertionError(line)
    history.runs = list(runs.values())
    history.incarnations = [_incarnation(worker, killed) for worker in workers.values()]
    return history


def _incarnation(worker: dict[str, Any], killed: dict[int, int]) -> Incarnation:
    lost = worker["state"] == "dead" or worker["pid"] in killed
    silent = worker["heartbeat"] + worker["lease"] if lost else FOREVER
    return Incarnation(worker["pid"], worker["started"], silent)


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    texts = (path.read_bytes().splitlines() for path in folder.glob("*.journal"))
    return (orjson.loads(line) for line in itertools.chain.from_iterable(texts) if line.endswith(b"}"))
