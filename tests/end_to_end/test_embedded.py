"""The embedded server: nobody's data is lost, nobody's server is stopped, and none is left that no one can use."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import psycopg
import pytest

from eventbus.errors import ConfigurationError
from eventbus.runtime import account, embedded, postmaster, programs
from eventbus.runtime.postmaster import Postmaster
from tests.waiting import wait_until

COMMAND = """
import sys
from pathlib import Path
from eventbus.runtime import embedded

with embedded.start(Path(sys.argv[1])) as server:
    print(server.dsn, flush=True)
    sys.stdin.read()
"""


class Command:
    """Another process that uses the server of a folder until it is told to finish."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def dsn(self) -> str:
        """Where it is connected; waits until it is."""
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def finish(self) -> int:
        """Let it end in order."""
        self.process.communicate(timeout=60)
        return self.process.returncode

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def new_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder without data that every account may enter, as most are."""
    path = Path(tempfile.mkdtemp(prefix="eventbus-test-embedded-"))
    path.chmod(0o755)
    yield path
    monkeypatch.undo()
    if (path / embedded.FOLDER).is_dir():
        embedded.start(path).stop()
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def prepared() -> Iterator[Path]:
    """A folder with data, to copy: that takes a third of the time of making it."""
    path = Path(tempfile.mkdtemp(prefix="eventbus-test-embedded-"))
    path.chmod(0o755)
    embedded.start(path).stop()
    yield path / embedded.FOLDER
    shutil.rmtree(path)


@pytest.fixture
def folder(new_folder: Path, prepared: Path) -> Path:
    """A working folder whose server has run before."""
    subprocess.run(["cp", "-a", prepared, new_folder], check=True)
    return new_folder


@pytest.fixture
def command(new_folder: Path) -> Iterator[Callable[[], Command]]:
    """Start other processes on the folder; those that a test has not ended are killed."""
    with ExitStack() as stack:

        def start() -> Command:
            started = Command(new_folder)
            stack.callback(started.kill)
            return started

        yield start


def remember(dsn: str, value: int) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS remembered (x int)")
        connection.execute("INSERT INTO remembered VALUES (%s)", [value])


def remembered(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as connection:
        return [x for (x,) in connection.execute("SELECT x FROM remembered ORDER BY x").fetchall()]


def running(folder: Path) -> Postmaster | None:
    return Postmaster.of(folder / embedded.FOLDER / "postgres")


def test_what_one_command_wrote_is_there_for_the_next(new_folder: Path) -> None:
    with embedded.start(new_folder) as server:
        remember(server.dsn, 1)
        assert server.version == str(programs.find().major)
    assert running(new_folder) is None
    with embedded.start(new_folder) as server:
        assert remembered(server.dsn) == [1]


def test_a_command_that_ends_does_not_stop_the_server_of_another(folder: Path, command: Callable[[], Command]) -> None:
    first, second = command(), command()
    assert first.dsn() == second.dsn()
    assert first.finish() == 0
    found = running(folder)
    assert found
    remember(found.dsn, 1)
    assert second.finish() == 0
    assert running(folder) is None


def test_commands_of_one_process_share_too_and_stopping_twice_takes_nothing_from_the_other(folder: Path) -> None:
    first, second = embedded.start(folder), embedded.start(folder)
    first.stop()
    first.stop()
    remember(second.dsn, 1)
    second.stop()
    assert running(folder) is None


def test_ten_commands_that_start_at_once_get_one_server_and_it_ends_with_the_last(
    new_folder: Path, command: Callable[[], Command]
) -> None:
    commands = [command() for _ in range(10)]
    assert len({each.dsn() for each in commands}) == 1
    assert [each.finish() for each in commands] == [0] * 10
    assert running(new_folder) is None


def test_a_killed_command_takes_the_server_from_nobody(folder: Path, command: Callable[[], Command]) -> None:
    killed = command()
    dsn = killed.dsn()
    with embedded.start(folder):
        killed.kill()
        remember(dsn, 1)
    assert running(folder) is None


def test_the_server_of_a_killed_only_command_serves_the_next_and_ends_with_it(
    folder: Path, command: Callable[[], Command]
) -> None:
    killed = command()
    dsn = killed.dsn()
    remember(dsn, 1)
    killed.kill()
    with embedded.start(folder) as server:
        assert server.dsn == dsn
        assert remembered(server.dsn) == [1]
    assert running(folder) is None


def test_ctrl_c_in_one_terminal_does_not_stop_the_server_of_another(
    folder: Path, command: Callable[[], Command]
) -> None:
    interrupted = command()
    dsn = interrupted.dsn()
    with embedded.start(folder):
        os.killpg(interrupted.process.pid, signal.SIGINT)
        interrupted.process.communicate(timeout=60)
        remember(dsn, 1)


def test_a_killed_server_comes_back_with_everything_that_was_committed(folder: Path) -> None:
    with embedded.start(folder) as server:
        remember(server.dsn, 1)
        found = running(folder)
        assert found
        os.kill(found.pid, signal.SIGKILL)
        wait_until(lambda: running(folder) is None)
        with embedded.start(folder) as again:
            assert remembered(again.dsn) == [1]
        assert running(folder), "the first command still counts as a user"
        assert not found.socket_folder.exists()
    assert running(folder) is None


def test_a_process_that_got_the_id_of_a_dead_server_is_neither_taken_for_it_nor_harmed(folder: Path) -> None:
    with embedded.start(folder) as server:
        remember(server.dsn, 1)
        found = running(folder)
        assert found
        left_behind = (found.data / "postmaster.pid").read_text().splitlines()
    options = account.Account.for_data(found.data).spawn_options()
    with subprocess.Popen(["/bin/sleep", "600"], **options) as innocent:
        (found.data / "postmaster.pid").write_text("\n".join([str(innocent.pid), *left_behind[1:]]) + "\n")
        with embedded.start(folder) as server:
            assert remembered(server.dsn) == [1]
        assert innocent.poll() is None
        innocent.kill()


def test_a_first_start_that_was_killed_halfway_spoils_nothing(new_folder: Path) -> None:
    halfway = new_folder / embedded.FOLDER / "postgres.unfinished"
    halfway.mkdir(parents=True)
    (halfway / "PG_VERSION").write_text("18\n")
    with embedded.start(new_folder) as server:
        remember(server.dsn, 1)


@pytest.mark.parametrize("name", ["d" * 200, '-x it\'s $HOME; "quoted" `späce` %s %41 ☃'])
def test_a_folder_may_have_any_name_and_depth(new_folder: Path, name: str) -> None:
    working = new_folder / name
    working.mkdir()
    with embedded.start(working) as server:
        remember(server.dsn, 1)
    with embedded.start(working) as server:
        assert remembered(server.dsn) == [1]


def test_nobody_else_on_the_machine_or_the_network_can_connect(folder: Path) -> None:
    with embedded.start(folder):
        found = running(folder)
        assert found
        assert stat.S_IMODE(found.socket_folder.stat().st_mode) == 0o700
        assert psutil.Process(found.pid).net_connections("inet") == []
    assert not found.socket_folder.exists()


def test_data_is_kept_out_of_git(new_folder: Path) -> None:
    subprocess.run(["git", "init", "--quiet", new_folder], check=True)
    embedded.start(new_folder).stop()
    seen = subprocess.run(
        ["git", "-C", new_folder, "status", "--porcelain"], check=True, capture_output=True, text=True
    )
    assert seen.stdout == ""


def test_a_deleted_folder_leaves_no_server_behind(folder: Path) -> None:
    server = embedded.start(folder)
    found = running(folder)
    assert found
    link = folder / embedded.FOLDER / "postgres"
    elsewhere = folder / "elsewhere"  # as where the server's account cannot enter the folder
    link.rename(elsewhere)
    shutil.rmtree(folder / embedded.FOLDER)
    server._data = elsewhere
    server.stop()
    assert Postmaster.of(elsewhere) is None
    assert not found.socket_folder.exists()


def test_without_the_extra_the_message_says_what_to_install(new_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'pip install "eventbus\[embedded\]".*EVENTBUS_DSN'):
        embedded.start(new_folder)


def test_data_of_another_version_is_refused_by_name_and_left_alone(new_folder: Path) -> None:
    data = new_folder / embedded.FOLDER / "postgres"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("12\n")
    with pytest.raises(ConfigurationError, match=r"written by PostgreSQL 12.*has version"):
        embedded.start(new_folder)
    assert [path.name for path in data.iterdir()] == ["PG_VERSION"]
    shutil.rmtree(new_folder / embedded.FOLDER)


def test_a_temporary_server_leaves_no_data_behind() -> None:
    with embedded.temporary() as server:
        remember(server.dsn, 1)
        found = running(server.home.parent)
        assert found
        assert found.data.parent == server.home
    assert not server.home.parent.exists()
    assert not found.socket_folder.exists()


def test_a_server_that_does_not_start_says_why(folder: Path) -> None:
    embedded.start(folder).stop()
    configuration = (folder / embedded.FOLDER / "postgres" / "postgresql.conf").resolve()
    before = configuration.read_text()
    configuration.write_text(before + "shared_buffers = nonsense\n")
    with pytest.raises(ConfigurationError, match=r"does not start.*shared_buffers"):
        embedded.start(folder)
    configuration.write_text(before)


def test_a_folder_that_cannot_hold_data_is_one_clear_line(new_folder: Path) -> None:
    (new_folder / embedded.FOLDER).write_text("a file")
    with pytest.raises(ConfigurationError, match=r"cannot use .*\.eventbus.*EVENTBUS_DSN") as caught:
        embedded.start(new_folder)
    assert "\n" not in str(caught.value)


def test_lost_data_is_not_silently_replaced_by_an_empty_database(new_folder: Path) -> None:
    home = new_folder / embedded.FOLDER
    home.mkdir()
    (home / "postgres").symlink_to(new_folder / "gone")
    with pytest.raises(ConfigurationError, match="gone"):
        embedded.start(new_folder)
    shutil.rmtree(home)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another account")
def test_root_gets_a_server_in_a_private_folder_and_the_folder_stays_private(
    new_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Path(tempfile.mkdtemp(prefix="eventbus-test-shared-"))
    shared.chmod(0o755)
    monkeypatch.setattr(postmaster, "SHARED_STATE", shared)
    new_folder.chmod(0o700)
    with embedded.start(new_folder) as server:
        remember(server.dsn, 1)
        found = running(new_folder)
        assert found
        assert found.data.parent == shared
        assert psutil.Process(found.pid).uids().real != 0
    assert stat.S_IMODE(new_folder.stat().st_mode) == 0o700
    with embedded.start(new_folder) as server:
        assert remembered(server.dsn) == [1]
    shutil.rmtree(new_folder / embedded.FOLDER)
    shutil.rmtree(shared)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another account")
def test_root_can_use_programs_that_only_root_may_enter(new_folder: Path) -> None:
    private, copies = new_folder / "private", new_folder / "copies"
    private.mkdir(mode=0o700)
    found = programs.find()
    package = found.bin.parent.parent
    shutil.copytree(found.bin.parent, private / package.name / found.bin.parent.name, symlinks=True)
    shutil.copytree(f"{package}.libs", private / f"{package.name}.libs")
    subprocess.run(["chmod", "-R", "go-rwx", private], check=True)  # as installed with umask 077
    hidden = programs.Programs(private / package.name / found.bin.parent.name / "bin", found.major)
    server_account = account.Account.for_data(new_folder / "none")
    assert not server_account.runs(hidden.bin / "initdb")
    reachable = programs.reachable(hidden, server_account, copies=copies)
    assert server_account.runs(reachable.bin / "initdb")
    assert programs.reachable(hidden, server_account, copies=copies) == reachable
    assert len(list(copies.iterdir())) == 1
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_a_first_start_that_fails_leaves_nothing_behind(new_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = programs.Programs(Path("/bin"), 18)
    monkeypatch.setattr(programs.Programs, "path", lambda self, name: "/bin/false")
    with pytest.raises(ConfigurationError, match="cannot create its data"):
        postmaster.create(new_folder / "postgres", broken, account.Account.for_data(new_folder / "postgres"))
    assert list(new_folder.iterdir()) == []


def test_a_socket_of_a_server_that_died_is_not_taken_for_a_server(new_folder: Path) -> None:
    data = new_folder / "data"
    data.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(new_folder / ".s.PGSQL.5432"))
    lines = [str(os.getpid()), str(data), "1", "5432", str(new_folder), "", "0 0", "ready"]
    (data / "postmaster.pid").write_text("\n".join(lines))
    assert Postmaster.of(data) is None
