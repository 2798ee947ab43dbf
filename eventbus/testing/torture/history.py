"""What happened, written down outside of the bus at once: one line of JSON per happening, appended in one write.

A line outlives the process that wrote it, also after kill -9. All processes append to the same file.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from eventbus.testing.torture.facts import FOREVER, Call, Fault, History


class Journal:
    """Appends to one file, from any thread of any process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, **facts: Any) -> None:
        """Record that something happened just now, unless the facts say when."""
        os.write(self._file, json.dumps({"what": what, "at": time.time_ns(), **facts}).encode() + b"\n")

    def close(self) -> None:
        """Give the file back."""
        os.close(self._file)


def read(path: Path, lease: int) -> History:
    """The history of a file; ``lease`` in nanoseconds."""
    starts: dict[str, dict[str, Any]] = {}
    ends: dict[str, dict[str, Any]] = {}
    faults: list[Fault] = []
    exits: list[tuple[int, int]] = []
    for line in map(json.loads, path.read_text().splitlines()):
        match line["what"]:
            case "start":
                starts[line["name"]] = line
            case "end":
                ends[line["name"]] = line
            case "fault":
                faults.append(Fault(line["kind"], line["at"], line["until"], line["pid"]))
            case "exit":
                exits.append((line["pid"], line["code"]))
            case _:
                pass  # a worker that is there, a transaction of a publisher: for people who read the file
    calls = [_call(line, ends.get(name, {})) for name, line in starts.items()]
    return History(calls, faults, exits, lease)


def _call(start: dict[str, Any], end: dict[str, Any]) -> Call:
    facts = {name: start[name] for name in ("queue", "token", "event_id", "attempt", "pid", "name")}
    return Call(**facts, started=start["at"], ended=end.get("at", FOREVER), told=end.get("told"))
