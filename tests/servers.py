"""PostgreSQL servers for the tests: the machine's own, and throw-away clusters that a test may stop and crash."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

import psutil
import psycopg
from psycopg import conninfo, sql

from eventbus.errors import ConfigurationError
from eventbus.runtime import programs
from eventbus.runtime.account import Account
from eventbus.runtime.programs import Programs
from tests.waiting import wait_until

MACHINE_DSN: Final = os.environ.get("TEST_POSTGRES_DSN", "postgresql://root@127.0.0.1:5432/postgres")
PREFIX: Final = "eventbus_test_"
PLACES: Final = (
    "/usr/lib/postgresql/{major}/bin",
    "/usr/pgsql-{major}/bin",
    "/opt/homebrew/opt/postgresql@{major}/bin",
    "/usr/local/opt/postgresql@{major}/bin",
)
FAST: Final = {
    # What these switch off protects against a crash of the operating system, which no test can cause. A killed
    # server loses exactly what it would lose with them on.
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": 100,
    "max_prepared_transactions": 10,
    "max_wal_size": "1GB",
    "wal_level": "logical",
}

StopMode = Literal["smart", "fast", "immediate"]


class Cluster:
    """A PostgreSQL of the tests' own: its data, log and socket in one temporary folder, no network port.

    Made stopped. ``options`` are server settings, on top of :data:`FAST`. As a context manager it starts, and in the
    end kills the server and removes the folder. Its DSNs stay the same over restarts.
    """

    user = "postgres"

    def __init__(self, version: Programs, **options: object) -> None:
        self.options: dict[str, object] = FAST | options
        self.folder = Path(tempfile.mkdtemp(prefix="eventbus-test-"))
        self.folder.chmod(0o755)
        self._owner = (self.folder / "owner.new").open("w")
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        (self.folder / "owner.new").rename(self.folder / "owner")  # nobody ever sees it without the lock
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self._account = Account.for_data(self.data)
        self.programs = programs.reachable(version, self._account)
        self._account.give(self.folder)
        try:
            self._run(
                "initdb", "-D", self.data, "-U", self.user, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"
            )
        except BaseException:
            self.remove()
            raise

    def start(self) -> None:
        """Start the server and wait until it accepts connections; after a crash that includes the recovery."""
        settings = {"listen_addresses": "", "unix_socket_directories": self.folder} | self.options
        flags = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        self._run("pg_ctl", "start", "-D", self.data, "-l", self.log, "-o", flags, "-w", "-t", "60")

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server: ``smart`` waits for the clients, ``fast`` ends them, ``immediate`` is a crash."""
        self._run("pg_ctl", "stop", "-D", self.data, "-m", mode, "-w", "-t", "60")

    def kill(self) -> None:
        """Kill every process of the server at once, as if the machine had lost its memory but not its disk."""
        _kill_server(self.folder)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start."""
        self.stop(mode)
        self.start()

    def dsn(self, database: str = "postgres") -> str:
        """Connection string for one database of this cluster, as a superuser."""
        return conninfo.make_conninfo(host=str(self.folder), port=5432, user=self.user, dbname=database)

    def remove(self) -> None:
        """Kill the server, if it runs, and delete everything."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._owner.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _run(self, program: str, *arguments: object) -> None:
        said = self.folder / f"{program}.out"  # a pipe would stay open in the server
        with said.open("wb") as output:
            done = subprocess.run(
                [self.programs.path(program), *map(str, arguments)],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                **self._account.spawn_options(),
            )
        if done.returncode != 0:
            log = self.log.read_text() if self.log.exists() else ""
            raise RuntimeError(f"{program} failed:\n{said.read_text()}\n{log[-2000:]}")


class Dropping:
    """Drops databases one after the other beside the tests. As a context manager it raises in the end what failed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._drops: list[Future[None]] = []

    def later(self, server: Server, name: str) -> None:
        """Drop a database soon."""
        self._drops.append(self._thread.submit(server.drop, name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        for drop in self._drops:
            drop.result()


@dataclass(frozen=True, slots=True)
class Server:
    """A running server that tests share: each makes databases of its own there, none stops it."""

    admin_dsn: str
    programs: Programs | None
    """Its own programs (``pg_dump`` and the like), if this machine has them."""
    dropping: Dropping | None = None
    """Who drops the databases that tests are done with, so that the next test need not wait for the disk."""

    def dsn(self, database: str) -> str:
        """Connection string for one database of this server."""
        return conninfo.make_conninfo(self.admin_dsn, dbname=database)

    @contextmanager
    def database(self, run: str, template: str = "template1") -> Iterator[str]:
        """A new database of the test run ``run``; its name. Dropped soon after, with whoever is still connected."""
        name = f"{PREFIX}{run}_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self.admin_dsn, autocommit=True) as admin:
            admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*map(sql.Identifier, (name, template))))
        try:
            yield name
        finally:
            if self.dropping is None:
                self.drop(name)
            else:
                self.dropping.later(self, name)

    def drop(self, name: str) -> None:
        """Drop a database and end its connections."""
        with psycopg.connect(self.admin_dsn, autocommit=True) as admin:
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    @contextmanager
    def run(self, run: str) -> Iterator[None]:
        """Announce a test run by an idle connection, after dropping what runs that were killed have left here."""
        with psycopg.connect(self.admin_dsn, autocommit=True, application_name=PREFIX + run) as announced:
            left_behind = announced.execute(
                "SELECT d.datname FROM pg_database d WHERE starts_with(d.datname, %s) AND NOT EXISTS"
                " (SELECT FROM pg_stat_activity a WHERE starts_with(a.application_name, %s)"
                " AND starts_with(d.datname, a.application_name || '_'))",
                [PREFIX, PREFIX],
            )
            for (name,) in left_behind.fetchall():
                self.drop(name)
            yield


def remove_abandoned_clusters() -> None:
    """Kill and delete the clusters of test runs that were killed; the lock on ``owner`` tells whose run lives."""
    for owner in Path(tempfile.gettempdir()).glob("eventbus-test-*/owner"):
        with suppress(OSError), owner.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _kill_server(owner.parent)
            shutil.rmtree(owner.parent, ignore_errors=True)


def installed(major: int) -> Programs | None:
    """The programs of one PostgreSQL version: this machine's, or the embedded ones; none if neither has it."""
    for folder in _bin_folders(major):
        if (folder / "initdb").exists() and programs.major_version(folder) == major:
            return Programs(folder, major)
    with suppress(ConfigurationError):
        return programs.find(major)
    return None


def _bin_folders(major: int) -> Iterator[Path]:
    yield from (Path(place.format(major=major)) for place in PLACES)
    if pg_config := shutil.which("pg_config"):
        yield Path(subprocess.run([pg_config, "--bindir"], check=True, capture_output=True, text=True).stdout.strip())


def _kill_server(folder: Path) -> None:
    file = folder / "data" / "postmaster.pid"
    try:
        postmaster = psutil.Process(int(file.read_text().split()[0]))
        if postmaster.name() != "postgres":
            return
        postmaster.suspend()  # or it would see its children die and start new ones
        family = [postmaster, *postmaster.children()]
    except (FileNotFoundError, psutil.NoSuchProcess):
        return
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    wait_until(lambda: not any(map(_lives, family)), 30)
    # Both name a process id that is somebody else's soon, or a zombie's, which a new server would wait for.
    file.unlink()
    (folder / ".s.PGSQL.5432.lock").unlink(missing_ok=True)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
