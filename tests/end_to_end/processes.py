"""Processes that a test starts, signals, kills and waits for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


class Process:
    """One child of the nursery, with its own log file."""

    def __init__(self, nursery: Nursery, pid: int, log: Path) -> None:
        self.pid = pid
        self._nursery = nursery
        self._log = log
        self._exit: int | None = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        if self.exit_code() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, as the out-of-memory killer would; returns when it is gone."""
        self.send(signal.SIGKILL)
        self.wait()

    def freeze(self) -> None:
        """Stop it where it is; returns when none of its threads runs any more. SIGCONT lets it go on."""
        self.send(signal.SIGSTOP)
        wait_until(lambda: self._nursery.is_frozen(self.pid))

    def terminate(self, timeout: float = 40.0) -> int:
        """Ask it to stop and wait until it has; the exit code."""
        self.send(signal.SIGTERM)
        return self.wait(timeout)

    def exit_code(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        if self._exit is None:
            self._exit = self._nursery.exit_code(self.pid)
        return self._exit

    def wait(self, timeout: float = 40.0) -> int:
        """Wait until it has ended by itself."""
        try:
            wait_until(lambda: self.exit_code() is not None, timeout)
        except AssertionError as problem:
            raise AssertionError(f"process {self.pid} did not end; its log:\n{self.log[-4000:]}") from problem
        assert self._exit is not None
        return self._exit

    @property
    def log(self) -> str:
        """What it has logged and printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def wait_for_log(self, text: str, timeout: float = 40.0) -> None:
        """Wait until the log holds ``text``."""
        wait_until(lambda: text in self.log or self.exit_code() is not None, timeout)
        assert text in self.log, f"{text!r} is missing in the log:\n{self.log[-4000:]}"


class Nursery:
    """Starts children; see the module ``nursery``. As a context manager it takes all of them along in the end."""

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.nursery"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(10)
        self._server.stdout.close()

    def start(self, program: str, log: Path, **options: Any) -> Process:
        """Start one of the functions of the module ``programs``."""
        return Process(self, self._ask({"program": program, "log": str(log), "options": options})["pid"], log)

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a child that has ended."""
        code: int | None = self._ask({"wait": pid})["exit"]
        return code

    def is_frozen(self, pid: int) -> bool:
        """Whether every thread of a child has stopped since a signal told it to; says so once."""
        return bool(self._ask({"frozen": pid})["frozen"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer
