"""The operating-system account that runs an embedded server.

PostgreSQL refuses to run as root, and rightly so: a superuser of the database can start programs. Where the bus runs
as root, as in most containers, the server runs as an unprivileged account that the system already has. No account is
created, and no folder of anybody is opened up for it.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from eventbus.errors import ConfigurationError

UNPRIVILEGED: Final = ("postgres", "nobody", "daemon")


@dataclass(frozen=True, slots=True)
class Account:
    """An account for server processes; ``switched`` when it is not the one that runs this process."""

    uid: int
    gid: int
    switched: bool

    @classmethod
    def for_data(cls, data: Path) -> Account:
        """The account for the server of the folder ``data``, which need not exist yet.

        Our own; as root the owner of the data, or for new data the first of :data:`UNPRIVILEGED` that exists.
        Raises :class:`ConfigurationError` when the data belongs to somebody else.
        """
        owner = data.stat().st_uid if data.exists() else None
        if os.geteuid() != 0:
            if owner not in (None, os.geteuid()):
                raise ConfigurationError(
                    f"{data} belongs to another user; run as that user, delete the folder, or set EVENTBUS_DSN"
                )
            return cls(os.geteuid(), os.getegid(), switched=False)
        if owner:
            return cls(owner, data.stat().st_gid, switched=True)
        return cls._unprivileged()

    @classmethod
    def _unprivileged(cls) -> Account:
        for name in UNPRIVILEGED:
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            return cls(entry.pw_uid, entry.pw_gid, switched=True)
        raise ConfigurationError(
            f"PostgreSQL cannot run as root, and no account named {' or '.join(UNPRIVILEGED)} exists to run it; "
            "run as another user or set EVENTBUS_DSN"
        )

    def give(self, path: Path) -> None:
        """Make this account the owner of ``path``."""
        if self.switched:
            os.chown(path, self.uid, self.gid)

    def reaches(self, folder: Path) -> bool:
        """Whether this account may enter ``folder``."""
        if not self.switched:
            return os.access(folder, os.X_OK)
        return self._succeeds("/bin/sh", "-c", 'test -x "$0"', str(folder))

    def runs(self, program: Path) -> bool:
        """Whether this account can run ``program``, with all that the program needs beside it."""
        return self._succeeds(str(program), "--version")

    def _succeeds(self, *command: str) -> bool:
        try:
            done = subprocess.run(command, check=False, capture_output=True, **self.spawn_options())
        except PermissionError:
            return False
        return done.returncode == 0

    def spawn_options(self) -> Mapping[str, Any]:
        """Keyword arguments that make :mod:`subprocess` run a program as this account.

        The program gets a session of its own, so that Ctrl-C in a terminal reaches only us, and a folder it can enter.
        """
        options: dict[str, Any] = {"cwd": "/", "start_new_session": True}
        if self.switched:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        return options
