"""Distributions with plugins, made up for a test, and the command line in a process that finds them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

PROGRAM: Final = str(Path(sys.executable).with_name("eventbus"))
NONE: Final = ","
"""The setting ``plugins`` in the environment for no plugins; an empty variable stands for the default."""


class Folder:
    """A folder on the import path of the commands that it runs, and their working folder."""

    def __init__(self, path: Path, dsn: str | None = None) -> None:
        self.path = path
        self._dsn = dsn

    def write(self, file: str, text: str) -> None:
        """Make a file."""
        (self.path / file).parent.mkdir(parents=True, exist_ok=True)
        (self.path / file).write_text(text, encoding="utf-8")

    def install(self, distribution: str, version: str = "1.2", **points: str) -> None:
        """What an installer leaves of a distribution with plugins. ``points``: ``name="module:attribute"``."""
        info = f"{distribution.replace('-', '_')}-{version}.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = "\n".join(f"{name} = {value}" for name, value in points.items())
        self.write(f"{info}/entry_points.txt", f"[eventbus]\n{lines}\n")

    def run(self, *arguments: str, stdin: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
        """Run the program ``eventbus``. ``settings`` become ``EVENTBUS_…``."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENTBUS_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.path), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment |= {"EVENTBUS_DSN": self._dsn} if self._dsn else {}
        environment |= {f"EVENTBUS_{name.upper()}": value for name, value in settings.items()}
        return subprocess.run(
            [PROGRAM, *arguments],
            check=False,
            cwd=self.path,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
