from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from eventbus.postgres.migrate import migrate
from eventbus_circuit_breaker.tests.test_records import Table

pytestmark = pytest.mark.parametrize("major", [18], indirect=True)


@pytest.fixture
def table(conn: psycopg.Connection) -> Table:
    return Table(conn)


def eventbus(dsn: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the plugin, in an empty folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENTBUS_")}
    environment |= {"EVENTBUS_DSN": dsn, "EVENTBUS_PLUGINS": "circuit_breaker", "TZ": "UTC"}
    return subprocess.run(
        [sys.executable, "-m", "eventbus", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_open_breakers_are_shown_with_what_comes_next_and_why(dsn: str, table: Table, tmp_path: Path) -> None:
    table.open()
    shown = eventbus(dsn, tmp_path, "circuits")
    assert shown.returncode == 1, shown.stderr
    head, row = shown.stdout.splitlines()
    assert head.split("\t") == ["queue", "state", "next", "trips", "since", "why"]
    queue, state, following, trips, since, why = row.split("\t")
    assert (queue, state, trips, why) == ("q", "open", "1", "5 failures in a row; OSError: no")
    assert following in {"probe in 30 s", "probe in 29 s", "probe in 28 s", "probe in 27 s"}
    assert len(since) == len("2030-01-31 09:12:07")


def test_programs_get_the_same_as_json(dsn: str, table: Table, tmp_path: Path) -> None:
    table.open()
    shown = eventbus(dsn, tmp_path, "circuits", "--json")
    [breaker] = json.loads(shown.stdout)
    assert (shown.returncode, breaker["queue"], breaker["state"], breaker["trips"]) == (1, "q", "open", 1)
    assert {"seconds", "began_at", "opened_at", "closed_at", "reason", "error"} < set(breaker)


def test_without_an_open_breaker_the_answer_is_that_and_exit_code_0(dsn: str, table: Table, tmp_path: Path) -> None:
    shown = eventbus(dsn, tmp_path, "circuits")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "no circuit breaker is open\n")
    table.open()
    table.close(None)
    shown = eventbus(dsn, tmp_path, "circuits")
    assert (shown.returncode, shown.stderr) == (0, "no circuit breaker is open; 1 was, and closed again (--all)\n")
    everything = eventbus(dsn, tmp_path, "circuits", "--all")
    assert everything.returncode == 0
    assert everything.stdout.splitlines()[1].split("\t")[:4] == ["q", "closed", "", "0"]


def test_closing_by_hand_lets_the_queue_go_on_and_says_if_there_was_nothing_to_close(
    dsn: str, table: Table, tmp_path: Path
) -> None:
    table.open()
    done = eventbus(dsn, tmp_path, "circuits", "close", "q", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["closed"] == "q"
    assert table.pauses() == {}
    again = eventbus(dsn, tmp_path, "circuits", "close", "q")
    assert (again.returncode, again.stdout) == (1, "the circuit breaker of q is not open\n")


@pytest.mark.parametrize("words", [("circuits",), ("circuits", "close", "q")], ids=["look", "close"])
def test_without_the_tables_it_says_what_to_do(empty_dsn: str, tmp_path: Path, words: tuple[str, ...]) -> None:
    migrate(empty_dsn, "eventbus")
    shown = eventbus(empty_dsn, tmp_path, *words)
    assert (shown.returncode, shown.stdout) == (1, "")
    [line] = shown.stderr.splitlines()
    assert line.endswith("does not exist; run: eventbus migrate")
