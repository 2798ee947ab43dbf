"""The server process of an embedded PostgreSQL: making its data, launching it, finding it, ending it.

Who may do so, and when, is decided in :mod:`eventbus.runtime.embedded`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

from eventbus.errors import ConfigurationError
from eventbus.runtime.account import Account
from eventbus.runtime.programs import SHARED_STATE, Programs

PORT: Final = 5432
SOCKET: Final = f".s.PGSQL.{PORT}"
LONGEST_SOCKET_PATH: Final = 100
LAUNCH: Final = '"$@" >>"$0" 2>&1 </dev/null &'
"""The server in the background, orphaned at once, so that it is nobody's child to wait for. No path is pasted in."""


@dataclass(frozen=True, slots=True)
class Postmaster:
    """What a server has written about itself into its ``postmaster.pid``."""

    data: Path
    pid: int
    socket_folder: Path
    ready: bool

    @classmethod
    def of(cls, data: Path) -> Postmaster | None:
        """The server of ``data`` if one listens now. A file that a dead server left does not count."""
        try:
            lines = (data / "postmaster.pid").read_text().splitlines()
            found = cls(data.resolve(), int(lines[0]), Path(lines[4]), lines[7].strip() == "ready")
        except (FileNotFoundError, IndexError, ValueError):
            return None
        return found if found._listens() else None

    @property
    def dsn(self) -> str:
        """Where to connect, as the superuser of the server."""
        return f"postgresql://postgres@/postgres?host={quote(str(self.socket_folder), safe='')}&port={PORT}"

    def signal(self, name: Literal["INT", "QUIT"]) -> None:
        """Ask for a stop: ``INT`` in order, ``QUIT`` at once. Sent as the server's account, so it reaches no other."""
        options = Account.for_data(self.data).spawn_options()
        subprocess.run(["/bin/sh", "-c", 'kill -s "$0" "$1"', name, str(self.pid)], check=False, **options)

    def clean(self) -> None:
        """Remove the private folder of the socket after the server's end."""
        _remove_sockets(self.socket_folder)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(self.socket_folder / SOCKET))
            except OSError:
                return False
        return True


def launch(data: Path, postgres: Programs, account: Account, lock: int) -> None:
    """Start the server of ``data`` and return at once; the server inherits the locked file descriptor ``lock``.

    The caller knows that no server of ``data`` lives: a ``postmaster.pid`` that is still there names a dead process,
    or by now somebody else's, which PostgreSQL would take for a server.
    """
    sockets = _socket_folder(data.with_name("socket"), account)
    data = data.resolve()
    (data / "postmaster.pid").unlink(missing_ok=True)
    log = data / "server.log"
    with suppress(FileNotFoundError):
        log.replace(data / "server.log.old")
    settings = {
        "listen_addresses": "",
        "port": PORT,
        "unix_socket_directories": sockets,
        "unix_socket_permissions": "0700",
    }
    command = [postgres.path("postgres"), "-D", str(data), *(f"--{name}={value}" for name, value in settings.items())]
    subprocess.run(
        ["/bin/sh", "-c", LAUNCH, str(log), *command], check=True, pass_fds=(lock,), **account.spawn_options()
    )


def create(data: Path, postgres: Programs, account: Account) -> None:
    """Make the data of a new server: complete, or not at all if this process is killed meanwhile."""
    if data.is_symlink():
        raise ConfigurationError(
            f"the data of {data} is gone from {data.readlink()}; remove the link to start with an empty database"
        )
    unfinished = _unfinished(data, account)
    account.give(unfinished)
    arguments = ["-D", str(unfinished), "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C"]
    if postgres.major >= 17:
        arguments += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    made = subprocess.run(
        [postgres.path("initdb"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        **account.spawn_options(),
    )
    if made.returncode != 0:
        shutil.rmtree(unfinished)
        raise ConfigurationError(f"the embedded PostgreSQL cannot create its data: {made.stderr.strip()}")
    if unfinished.parent == data.parent:
        unfinished.rename(data)
    else:
        data.symlink_to(unfinished)


def last_words(data: Path) -> str:
    """The end of the server's log, on one line."""
    log = data / "server.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " / ".join(lines[-3:]) or "it wrote no log"


def _unfinished(data: Path, account: Account) -> Path:
    """A new, empty folder: beside ``data``, or, where the server's account cannot enter that, among root's."""
    if account.reaches(data.parent):
        folder = data.with_name(f"{data.name}.unfinished")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder
    SHARED_STATE.mkdir(mode=0o755, parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="data-", dir=SHARED_STATE))


def _socket_folder(link: Path, account: Account) -> Path:
    """A new private folder for the socket; not beside the data, because a socket's path may not be long.

    ``link`` points at it, so that the folder of a server that was killed can be removed.
    """
    if link.is_symlink():
        _remove_sockets(link.readlink())
        link.unlink()
    folder = Path(tempfile.mkdtemp(prefix="eventbus-"))
    if len(os.fsencode(folder / SOCKET)) > LONGEST_SOCKET_PATH or not account.reaches(folder.parent):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="eventbus-", dir="/tmp"))
    account.give(folder)
    link.symlink_to(folder)
    return folder


def _remove_sockets(folder: Path) -> None:
    with suppress(OSError):
        for name in (SOCKET, f"{SOCKET}.lock"):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
