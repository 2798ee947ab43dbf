"""``eventbus stats``: a table for people, lines for pipes, JSON for programs, and a reason where there is nothing."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from eventbus.cli.extending import Commands
from eventbus.cli.failures import run
from eventbus.cli.options import new_app
from eventbus_stats import Stats, command

pytestmark = pytest.mark.parametrize("major", [18], indirect=True)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stats(table: psycopg.Connection, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Run:
    """Run the command on the database of ``table``: its exit code, standard output and standard error."""
    for name in [name for name in os.environ if name.startswith("EVENTBUS_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        app = new_app()
        Stats(Stats.Settings()).eventbus_commands(Commands(app))
        code = run(app, ["stats", "--dsn", dsn, *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def counted(connection: psycopg.Connection, queue: str = "ledger", minutes_ago: int = 2, handled: int = 7) -> None:
    connection.execute(
        "INSERT INTO eventbus.stats_minutes (minute, queue, published, handled, failed, retried, seconds_buckets,"
        " seconds_sum, seconds_max) VALUES (date_trunc('minute', now() - make_interval(mins => %s)), %s, 9, %s, 1, 1,"
        " '{0,0,0,0,0,8}', 0.003, 0.0005)",
        [minutes_ago, queue, handled],
    )


def test_a_pipe_gets_one_table_with_tabs(stats: Run, table: psycopg.Connection) -> None:
    counted(table)
    counted(table, "mails", handled=70)
    code, out, err = stats()
    titles, *lines = [line.split("\t") for line in out.splitlines()]
    assert (code, err, titles[:3]) == (0, "", ["queue", "published", "handled"])
    assert [line[:3] for line in lines] == [["mails", "9", "70"], ["ledger", "9", "7"]]


def test_programs_get_json_with_everything(stats: Run, table: psycopg.Connection) -> None:
    counted(table)
    code, out, _ = stats("--json", "--since", "10m", "--queue", "ledger")
    report = json.loads(out)
    [queue] = report["queues"]
    assert (code, report["total"]["handled"], queue["counts"]["retried"]) == (0, 7, 1)
    assert queue["error_rate"] == pytest.approx(1 / 8)
    assert queue["handler"]["count"] == 8
    assert 0.0004 <= queue["handler"]["p50"] <= queue["handler"]["p99"] <= 0.0005
    assert queue["waiting"] is None
    assert sum(queue["chart"]) == 7


def test_where_nothing_was_ever_counted_it_says_what_counts(stats: Run) -> None:
    code, out, err = stats()
    assert (code, out) == (0, "")
    assert "workers that use the plugin stats" in err
    code, out, err = stats("--json")
    assert (code, json.loads(out)["queues"]) == (0, [])


def test_where_nothing_happened_lately_it_says_how_to_see_what_did(stats: Run, table: psycopg.Connection) -> None:
    counted(table, minutes_ago=60 * 50)
    code, out, err = stats()
    assert (code, out) == (0, "")
    assert "nothing happened since" in err
    suggestion = err.rpartition("eventbus stats ")[2].split()
    assert suggestion == ["--since", "3d"]
    assert stats(*suggestion)[1].splitlines()[1].startswith("ledger\t")


def test_an_unknown_queue_is_an_error_that_lists_the_known_ones(stats: Run, table: psycopg.Connection) -> None:
    counted(table)
    counted(table, "mails", minutes_ago=60 * 50)
    code, out, err = stats("--queue", "leger")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "no queue 'leger'; known queues: ledger, mails" in err
    assert stats("--queue", "mails")[0] == 0


def test_a_period_that_is_none_is_an_error_that_shows_how_to_write_one(stats: Run) -> None:
    code, _, err = stats("--since", "yesterday")
    assert code == 2
    assert "2h" in err


@pytest.mark.parametrize("since", ["0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00Z"])
@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_a_period_from_before_anything_is_all_of_it(
    stats: Run, table: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, since: str, zone: str
) -> None:
    monkeypatch.setenv("PGTZ", zone)
    code, _, err = stats("--since", since)
    assert (code, err.partition(":")[0]) == (0, "nothing was counted yet")
    counted(table)
    code, out, _ = stats("--since", since, "--json")
    assert (code, json.loads(out)["total"]["handled"]) == (0, 7)


def test_without_the_table_it_says_what_makes_it(stats: Run, table: psycopg.Connection) -> None:
    table.execute("DROP TABLE eventbus.stats_minutes")
    code, _, err = stats()
    assert code == 1
    assert "run: eventbus migrate" in err


def test_watching_in_a_pipe_prints_one_table_after_the_other_until_ctrl_c(
    stats: Run, table: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(table)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt
        counted(table, f"queue{len(slept)}")

    monkeypatch.setattr("eventbus_stats.command.time.sleep", sleep)
    code, out, _ = stats("--watch")
    assert (code, slept) == (0, [2.0] * 3)
    assert [len(block.splitlines()) for block in out.split("\n\n")] == [2, 3, 4]


def test_ctrl_c_before_the_answer_is_no_success(
    stats: Run, table: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "look", look)
    assert stats()[0] == 130


def on_a_terminal(dsn: str, width: int, *arguments: str, until: str) -> tuple[str, int]:
    """What a terminal of so many columns shows of the command until ``until`` is there, and its exit code at Ctrl-C."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    program = (
        "import sys; from eventbus.cli.options import new_app, Commands; from eventbus.cli.failures import run;"
        " from eventbus_stats import Stats; app = new_app();"
        " Stats(Stats.Settings()).eventbus_commands(Commands(app)); sys.exit(run(app, sys.argv[1:]))"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", program, "stats", "--dsn", dsn, *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown, deadline = "", time.monotonic() + 40
    try:
        while until not in shown and time.monotonic() < deadline and select.select([ours], [], [], 5)[0]:
            try:
                shown += os.read(ours, 65_536).decode()
            except OSError:  # the other end is closed
                break
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        return shown, process.wait(20)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def plain(shown: str) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).replace("\r", "").splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_tables_that_fit_it_with_a_chart_of_each_queue(
    table: psycopg.Connection, dsn: str, width: int
) -> None:
    for minutes_ago in range(40):
        counted(table, "shop.receipts.send_receipt", minutes_ago, 1_000 + 100 * minutes_ago)
    shown, _ = on_a_terminal(dsn, width, until="retried")
    lines = plain(shown)
    assert max(map(len, lines)) <= width, shown
    [row, *_] = [line for line in lines if line.startswith("shop.receipts.send_receipt")]
    assert "118,000" in row
    assert set(row.split()[-1]) <= set("·▁▂▃▄▅▆▇█")
    assert any(line.startswith("queue") and "run p50" in line for line in lines)


def test_watching_on_a_terminal_draws_over_what_was_there_and_ends_well_at_ctrl_c(
    table: psycopg.Connection, dsn: str
) -> None:
    counted(table)
    shown, code = on_a_terminal(dsn, 80, "--watch", until="\x1b[2J\x1b[H")
    assert "\x1b[2J\x1b[H" in shown
    assert code == 0
