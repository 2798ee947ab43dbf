"""The worker processes of a torture run: real ``eventbus consume`` commands, and what is done to them."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psycopg

from tests.torture.history import Journal
from tests.torture.kinds import Kind
from tests.torture.watch import Watch

ROOT: Final = Path(__file__).parents[2]
LEASE: Final = 2.0
TROUBLES: Final = ("kill", "kill", "freeze", "freeze", "cut", "cut", "redrive", "redrive", "stop")
"""All of them in a random order, then all of them again."""
SETTINGS: Final = {
    "EVENTBUS_LEASE": str(LEASE),
    "EVENTBUS_MAX_CRASHES": "1000",  # no event is to blame for a kill
    "EVENTBUS_CONCURRENCY": "4",
    "EVENTBUS_BATCH": "100",
    "EVENTBUS_PREFETCH": "300",
    "EVENTBUS_ON_RESTORE": "resume",  # the database is a copy of a template
}
LETTERS: Final = """
SELECT l.id, q.name, l.payload ->> 'token'
FROM eventbus.dead_letters l JOIN eventbus.queues q ON q.id = l.queue_id ORDER BY random() LIMIT %s
"""
CUT: Final = """
SELECT pg_terminate_backend(pid) FROM (
    SELECT pid FROM pg_stat_activity
    WHERE datname = current_database() AND (application_name LIKE 'eventbus%%' OR application_name LIKE 'torture pub%%')
    ORDER BY random() LIMIT %s) victims
"""


class Workers:
    """Several workers of which some die, freeze or are cut off; each is replaced at once."""

    def __init__(self, dsn: str, folder: Path, kinds: Sequence[Kind], seed: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENTBUS_")}
        self._environment = environment | SETTINGS | {
            "EVENTBUS_DSN": dsn, "TORTURE_FOLDER": str(folder), "TORTURE_KINDS": ",".join(k.queue for k in kinds),
        }  # fmt: skip
        self._folder = folder
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._journal = Journal(folder, "workers")
        self._watch = Watch(self._connection, self._journal, LEASE)
        self._chance = random.Random(seed)
        self._troubles: list[str] = []
        self._numbers = itertools.count(1)
        self._running: dict[subprocess.Popen[bytes], Path] = {}
        self._stopping: dict[subprocess.Popen[bytes], Path] = {}
        self._frozen: dict[subprocess.Popen[bytes], float] = {}

    def start(self, count: int = 1) -> None:
        """Start workers."""
        for _ in range(count):
            log = self._folder / f"worker-{next(self._numbers)}.log"
            command = [sys.executable, "-m", "eventbus", "consume", "tests.torture.handlers"]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            self._running[process] = log

    def look(self) -> None:
        """Write down which workers are registered; wake those that were frozen long enough; see who has ended."""
        self._watch.look()
        for process, until in [*self._frozen.items()]:
            if time.monotonic() > until:
                process.send_signal(signal.SIGCONT)
                del self._frozen[process]
        for process, log in self._running.items():
            assert process.poll() is None, f"a worker ended by itself:\n{log.read_text()[-4000:]}"
        for process, log in [*self._stopping.items()]:
            if process.poll() is not None:
                problem = f"a worker did not stop well: {process.returncode}\n{log.read_text()[-4000:]}"
                assert process.returncode in (0, -signal.SIGTERM), problem  # the signal, if it came at the very start
                del self._stopping[process]

    def hurt(self) -> None:
        """Do something to one of the workers, or to all."""
        awake = [process for process in self._running if process not in self._frozen]
        if not awake:
            return
        victim = self._chance.choice(awake)
        if not self._troubles:
            self._troubles = self._chance.sample(TROUBLES, len(TROUBLES))
        match self._troubles.pop():
            case "kill":
                self._fault("kill", victim.pid)
                victim.kill()
                victim.wait()
                del self._running[victim]
                self.start()
            case "stop":
                self._fault("stop", victim.pid)
                victim.terminate()
                self._stopping[victim] = self._running.pop(victim)
                self.start()
            case "freeze":
                self._fault("freeze", victim.pid)
                victim.send_signal(signal.SIGSTOP)
                self._frozen[victim] = time.monotonic() + 2 * LEASE
            case "cut":
                self._fault("cut")
                self._connection.execute(CUT, (self._chance.randrange(1, 4),))
            case _:
                self.redrive(20)

    def redrive(self, most: int) -> int:
        """Redrive some dead letters by the command line; how many were moved."""
        letters = {number: (queue, token) for number, queue, token in self._connection.execute(LETTERS, (most,))}
        if not letters:
            return 0
        self._fault("redrive")
        command = [sys.executable, "-m", "eventbus", "dead-letters", "redrive", "--json", *map(str, letters)]
        for queue, token in letters.values():
            self._journal.write("redrive", queue=queue, token=token)
        done = subprocess.run(command, check=False, cwd=ROOT, env=self._environment, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        assert sorted(json.loads(done.stdout)["redriven"]) == sorted(letters), done.stdout
        return len(letters)

    def spare(self) -> None:
        """Let nobody be frozen any longer."""
        self._frozen = dict.fromkeys(self._frozen, 0.0)
        self.look()

    def stop(self) -> None:
        """Stop all of them gracefully."""
        self.spare()
        for process in self._running:
            process.terminate()
        self._stopping |= self._running
        self._running.clear()
        for process in self._stopping:
            process.wait(30)
        self.look()

    def logs(self) -> str:
        """The ends of the logs of those that run."""
        return "\n".join(f"{log.name}:\n{log.read_text()[-1500:]}" for log in self._running.values())

    def close(self) -> None:
        """Kill what still runs."""
        for process in (*self._running, *self._stopping):
            process.kill()
            process.wait()
        self._connection.close()

    def _fault(self, kind: str, pid: int | None = None) -> None:
        self._journal.write("fault", kind=kind, pid=pid)
