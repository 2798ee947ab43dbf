"""A process that has imported the bus and forks children which run it, so that a test starts a consumer in no time.

``python -m tests.end_to_end.nursery`` reads requests from its standard input, one JSON object a line, and answers each
with one line. A child ends like any Python process: by returning from its program through the whole interpreter.
When the input ends, every child is killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Any

from tests.end_to_end import programs


def main() -> int:
    """Serve until the input ends; in a child: run its program."""
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "program" in request:
            pid = os.fork()
            if pid == 0:
                return _live(request)
            children.add(pid)
            answer: dict[str, Any] = {"pid": pid}
        elif "frozen" in request:
            answer = {"frozen": os.waitid(os.P_PID, request["frozen"], os.WSTOPPED | os.WNOHANG) is not None}
        else:
            answer = {"exit": _exit_code(request["wait"], children)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return 0


def _exit_code(pid: int, children: set[int]) -> int | None:
    """The exit code of a child that has ended, minus the signal if one ended it; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    children.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _live(request: dict[str, Any]) -> int:
    """Be the child: on its own, with a log of its own."""
    os.setpgid(0, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, log, log)):
        os.dup2(file, number)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
    program = getattr(programs, request["program"])
    return int(program(**request["options"]) or 0)


if __name__ == "__main__":
    sys.exit(main())
