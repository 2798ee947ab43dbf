"""What every other test relies on: databases of its own, servers that can be crashed, and nothing left behind."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.fixtures import NewCluster
from tests.servers import PREFIX, Cluster, Server, installed, remove_abandoned_clusters
from tests.waiting import wait_until


def databases(server: Server) -> set[str]:
    with psycopg.connect(server.admin_dsn) as admin:
        return {name for (name,) in admin.execute("SELECT datname FROM pg_database").fetchall()}


def test_each_version_is_tested_on_that_version(server: Server, major: int) -> None:
    with psycopg.connect(server.admin_dsn) as admin:
        assert admin.info.server_version // 10_000 == major


def test_no_test_sees_what_another_wrote(server: Server, run: str) -> None:
    with server.database(run) as first, server.database(run) as second:
        with psycopg.connect(server.dsn(first)) as connection:
            connection.execute("CREATE TABLE mine ()")
        with psycopg.connect(server.dsn(second)) as connection:
            assert connection.execute("SELECT to_regclass('mine')").fetchone() == (None,)


@pytest.mark.timeout(200)
def test_a_test_that_forgets_a_connection_leaves_no_database(server: Server, run: str) -> None:
    with server.database(run) as name:
        forgotten = psycopg.connect(server.dsn(name))
    try:
        wait_until(lambda: name not in databases(server), 180)  # others are dropped before it, one after the other
    finally:
        forgotten.close()


def test_a_run_drops_what_a_killed_run_left_and_nothing_of_a_run_that_lives(server: Server) -> None:
    with server.run("living"), server.database("living") as of_the_living:
        of_the_killed = f"{PREFIX}{uuid.uuid4().hex}"
        with psycopg.connect(server.admin_dsn, autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {of_the_killed}")
        with server.run("next"):
            assert of_the_living in databases(server)
            assert of_the_killed not in databases(server)


def test_the_schema_of_a_test_database_is_installed_and_new(conn: psycopg.Connection) -> None:
    assert conn.execute("SELECT count(*) FROM eventbus.outbox").fetchone() == (0,)


def test_what_was_committed_before_a_crash_is_there_afterwards(owned_cluster: Cluster) -> None:
    with psycopg.connect(owned_cluster.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS x")
        owned_cluster.kill()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(owned_cluster.dsn())
    owned_cluster.start()
    with psycopg.connect(owned_cluster.dsn()) as connection:
        assert connection.execute("SELECT x FROM kept").fetchone() == (1,)


def test_a_restart_keeps_the_dsn(owned_cluster: Cluster) -> None:
    before = owned_cluster.dsn()
    owned_cluster.restart("immediate")
    assert owned_cluster.dsn() == before
    psycopg.connect(before).close()


def test_clusters_of_parallel_tests_do_not_meet(new_cluster: NewCluster) -> None:
    first, second = new_cluster(18), new_cluster(18, max_prepared_transactions=3)
    identifiers = set()
    for cluster in (first, second):
        with psycopg.connect(cluster.dsn()) as connection:
            identifiers.add(connection.execute("SELECT system_identifier FROM pg_control_system()").fetchone())
    assert len(identifiers) == 2
    with psycopg.connect(second.dsn()) as connection:
        assert connection.execute("SHOW max_prepared_transactions").fetchone() == ("3",)


def test_a_cluster_leaves_neither_a_process_nor_a_file() -> None:
    programs = installed(18)
    assert programs is not None
    with Cluster(programs) as cluster:
        postmaster = int((cluster.data / "postmaster.pid").read_text().split()[0])
    assert not cluster.folder.exists()
    assert not _runs(postmaster)


def test_a_run_removes_the_clusters_of_a_killed_run_and_none_of_a_run_that_lives(owned_cluster: Cluster) -> None:
    code = (
        "import os, signal; from tests.servers import Cluster, installed\n"
        "cluster = Cluster(installed(18)); cluster.start()\n"
        "print(cluster.folder, (cluster.data / 'postmaster.pid').read_text().split()[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE, text=True)
    folder, postmaster = killed.stdout.split()
    remove_abandoned_clusters()
    wait_until(lambda: not Path(folder).exists() and not _runs(int(postmaster)))  # another run may be at it just now
    psycopg.connect(owned_cluster.dsn()).close()


def test_a_run_does_not_take_a_cluster_that_another_one_is_making_for_an_abandoned_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = installed(18)
    assert programs is not None
    lock = fcntl.flock

    def lock_after_a_clean_up(*arguments: Any) -> None:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(fcntl, "flock", lock)
            remove_abandoned_clusters()
        lock(*arguments)

    with monkeypatch.context() as here:
        here.setattr(fcntl, "flock", lock_after_a_clean_up)
        cluster = Cluster(programs)
    assert cluster.data.exists()
    cluster.remove()


def test_a_dump_of_the_older_version_can_be_restored_by_the_newer(new_cluster: NewCluster, tmp_path: Path) -> None:
    old, new = new_cluster(15), new_cluster(18)
    with psycopg.connect(old.dsn()) as connection:
        connection.execute("CREATE TABLE moved AS SELECT 7 AS x")
    dump = tmp_path / "dump"
    # By the pg_dump of the server itself: security releases have taught servers things that an older pg_dump, even of
    # a newer version, writes down wrongly.
    subprocess.run([old.programs.path("pg_dump"), "-Fc", "-f", dump, old.dsn()], check=True)
    subprocess.run([new.programs.path("pg_restore"), "-d", new.dsn(), dump], check=True)
    with psycopg.connect(new.dsn()) as connection:
        assert connection.execute("SELECT x FROM moved").fetchone() == (7,)


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
