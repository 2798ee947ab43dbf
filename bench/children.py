"""The processes under measurement: started here, they end by printing one line of JSON."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

READY: Final = "ready"
_FOLDER: Final = Path(__file__).parent.parent
_PATIENCE: Final = 60.0


@dataclass(frozen=True, slots=True)
class Drained:
    """What one consumer process did. ``slices``: events per second of each twentieth, in order."""

    events: int
    seconds: float
    cpu_seconds: float
    slices: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Events per second."""
        return self.events / self.seconds

    @property
    def final_rate(self) -> float:
        """Events per second of the last tenth; of everything, if it was cut short before the first twentieth."""
        return statistics.mean(self.slices[-2:]) if self.slices else self.rate

    @property
    def cpu_microseconds(self) -> float:
        """Processor time of the consumer process per event; that of the server is not in it."""
        return self.cpu_seconds / self.events * 1e6


def drained(module: str, *arguments: object) -> Drained:
    """Run ``module`` to its end and read what it did."""
    child = _start(module, *arguments)
    try:
        return read_drained(child)
    finally:
        child.kill()


def read_drained(child: subprocess.Popen[str]) -> Drained:
    """Wait for the end of a draining process."""
    result = _result(child, timeout=None)
    return Drained(result["events"], result["seconds"], result["cpu_seconds"], tuple(result["slices"]))


@contextmanager
def ready(module: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start ``module`` and wait until it says that it is ready; killed at the end if it still runs."""
    child = _start(module, *arguments)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        if line.strip() != READY:
            raise RuntimeError(f"{module} did not start: {line or 'see above'}")
        yield child
    finally:
        child.kill()
        child.wait()


def stop(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Ask a serving process to stop; what it printed."""
    child.send_signal(signal.SIGTERM)
    return _result(child, timeout=_PATIENCE)


def _start(module: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, cwd=_FOLDER, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def _result(child: subprocess.Popen[str], timeout: float | None) -> dict[str, Any]:
    output, _ = child.communicate(timeout=timeout)
    if child.returncode != 0:
        raise RuntimeError(f"a process under measurement failed with exit code {child.returncode}; see above")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result
