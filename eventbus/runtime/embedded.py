"""An embedded PostgreSQL in ``.eventbus/`` of a working folder, shared by every command that runs there.

Used when no ``EVENTBUS_DSN`` is set. The first command starts the server, the last one stops it. Who is first and last
is decided by locks that the kernel drops when a process ends, however it ends, so no process id that was left
behind can be mistaken for a living process::

    .eventbus/
      turn      locked while a command starts, joins or stops the server: one at a time
      users     locked, shared, by every command that uses the server
      server    locked by the server itself, which inherits it: free exactly when no process of the server lives
      socket    a link to the private folder of the socket, whose path must be short
      postgres  the data; a link to it where the server's account cannot enter this folder

A command that is killed with others around changes nothing: the last of them stops the server. If it was the only one,
the server goes on until the next command joins it and stops it in the end. A server that is killed is started
again by the next command and recovers what was committed.

The server listens on a socket in a private folder and on no network port. POSIX only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, Self

from eventbus.errors import ConfigurationError
from eventbus.runtime import postmaster, programs
from eventbus.runtime.account import Account
from eventbus.runtime.postmaster import Postmaster

FOLDER: Final = ".eventbus"
START_TIMEOUT: Final = 300.0
"""Seconds for a start, which includes the recovery after a crash."""
STOP_TIMEOUT: Final = 60.0
"""Seconds for an orderly stop; after that the server is told to stop at once, which loses nothing committed."""
POLL: Final = 0.02


class EmbeddedServer:
    """One command's share in the server of a folder. Leaving the context manager gives it back."""

    home: Path
    """The folder ``.eventbus`` that holds the data."""
    dsn: str
    """Where to connect; works for every process of this user on this machine."""
    version: str
    """Major version of the server, as in ``18``."""

    def __init__(self, home: Path, users: int, running: Postmaster) -> None:
        self.home = home
        self.dsn = running.dsn
        self.version = (running.data / "PG_VERSION").read_text().strip()
        self._data = running.data
        self._users: int | None = users

    def stop(self) -> None:
        """Give the share back; the last one stops the server and waits for its end. A second call does nothing."""
        users, self._users = self._users, None
        if users is None:
            return
        _unlock(users)
        try:
            with _turn(self.home):
                _stop_if_unused(self.home)
        except FileNotFoundError:  # somebody deleted the folder, and with it the locks
            if running := Postmaster.of(self._data):
                running.signal("INT")
                _wait_until(lambda: Postmaster.of(self._data) is None, STOP_TIMEOUT)
                running.clean()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(folder: Path) -> EmbeddedServer:
    """Start or join the server of the working folder ``folder``; returns when it accepts connections.

    Raises :class:`ConfigurationError` when the extra is missing, the folder cannot be used, or the server does not
    start; the message says what to do.
    """
    home = folder.resolve() / FOLDER
    try:
        _prepare(home)
        with _turn(home):
            users = _lock(home / "users", "shared")
            try:
                return EmbeddedServer(home, users, _ensure_running(home))
            except BaseException:
                _unlock(users)
                _stop_if_unused(home)
                raise
    except OSError as error:
        raise ConfigurationError(
            f"the embedded PostgreSQL cannot use {home}: {error.strerror or error}; "
            "set EVENTBUS_DSN to use a server of yours"
        ) from error


@contextmanager
def temporary() -> Iterator[EmbeddedServer]:
    """A server with new, empty data in a temporary folder; both are gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="eventbus-"))
    folder.chmod(0o755)  # so that the server's account can enter it; the data in it is private by itself
    try:
        with start(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder)


def _prepare(home: Path) -> None:
    home.mkdir(exist_ok=True)
    if not (home / ".gitignore").exists():
        (home / ".gitignore").write_text("*\n")


def _ensure_running(home: Path) -> Postmaster:
    launched = False
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        running = Postmaster.of(home / "postgres")
        if running is not None and running.ready:
            return running
        if _is_free(home / "server"):
            if launched:
                words = postmaster.last_words(home / "postgres")
                raise ConfigurationError(f"the embedded PostgreSQL in {home} does not start: {words}")
            _launch(home)
            launched = True
        time.sleep(POLL)
    words = postmaster.last_words(home / "postgres")
    raise ConfigurationError(f"the embedded PostgreSQL in {home} is not ready after {START_TIMEOUT:.0f} s: {words}")


def _launch(home: Path) -> None:
    data = home / "postgres"
    account = Account.for_data(data)
    if account.switched:
        home.chmod(0o755)
    new = not (data / "PG_VERSION").exists()
    found = programs.find(None if new else int((data / "PG_VERSION").read_text()))
    postgres = programs.reachable(found, account)
    if new:
        postmaster.create(data, postgres, account)
    lock = _lock(home / "server", "exclusive")
    try:
        postmaster.launch(data, postgres, account, lock)
    finally:
        os.close(lock)  # closed, not unlocked: the server holds it now


def _stop_if_unused(home: Path) -> None:
    """Stop the server if no command uses it. The caller has the turn, so that none can join meanwhile."""
    if not _is_free(home / "users"):
        return
    signals: tuple[Literal["INT", "QUIT"], ...] = ("INT", "QUIT")
    for signal in signals:
        running = Postmaster.of(home / "postgres")
        if running is None:
            return
        running.signal(signal)
        if _wait_until(lambda: _is_free(home / "server"), STOP_TIMEOUT):
            running.clean()
            return


def _wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


@contextmanager
def _turn(home: Path) -> Iterator[None]:
    lock = _lock(home / "turn", "exclusive")
    try:
        yield
    finally:
        _unlock(lock)


def _lock(path: Path, kind: Literal["shared", "exclusive"]) -> int:
    """Wait for the lock ``path`` and hold it until the file descriptor is unlocked or its last process ends."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if kind == "shared" else fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_free(path: Path) -> bool:
    """Whether nobody holds the lock ``path``, shared or not."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
