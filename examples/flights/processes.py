"""The demo's consumer processes: what anybody would type, started and ended from here."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from eventbus.errors import EventBusError

COMMAND: Final = ("consume", "examples.flights.handlers")
PATIENCE: Final = 15.0
"""Seconds that a consumer has to end by itself after SIGTERM."""
_PROGRAM: Final = "import sys; from eventbus.cli import main; sys.exit(main())"
"""The command ``eventbus`` of this very installation, wherever the search path may lead."""


class ConsumerEnded(EventBusError):
    """A consumer process ended that nobody had asked to; the text has its last line."""


class Consumer:
    """One ``eventbus consume`` in a process of its own; what it prints goes to the file ``log``."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._folder = folder
        self._environment = environment
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it. Its process group is its own, so that Ctrl-C reaches only the demo, which then stops it."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *COMMAND],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def kill(self) -> None:
        """``kill -9``: it gets no chance to say or save anything. Nothing happens if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask_to_stop(self) -> None:
        """SIGTERM: finish what runs, release the rest."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Return when it has ended; raises :class:`subprocess.TimeoutExpired` if it does not."""
        if self._process is not None:
            self._process.wait(PATIENCE)
            self._process = None

    def check(self) -> None:
        """Raise :class:`ConsumerEnded` if it has ended by itself."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise ConsumerEnded(f"{self.name} ended by itself with exit code {code}: {said[-1] if said else 'no word'}")


class Consumers:
    """Some consumers that run while the block does. However it is left, none of them outlives it."""

    def __init__(self, consumers: Sequence[Consumer]) -> None:
        self._consumers = consumers

    def __enter__(self) -> Self:
        try:
            for consumer in self._consumers:
                consumer.start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for consumer in self._consumers:
                consumer.ask_to_stop()
            for consumer in self._consumers:
                consumer.wait()
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._kill()

    def __getitem__(self, number: int) -> Consumer:
        return self._consumers[number]

    def check(self) -> None:
        """Raise :class:`ConsumerEnded` if one has ended by itself."""
        for consumer in self._consumers:
            consumer.check()

    def _kill(self) -> None:
        for consumer in self._consumers:
            consumer.kill()
