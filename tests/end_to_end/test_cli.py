"""The command line does what it says, says it on one line, and ends with the exit code that scripts rely on."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer
from psycopg import sql

from eventbus import cli
from eventbus.cli.failures import masked
from eventbus.cli.screen import Screen
from eventbus.postgres import privileges
from eventbus.postgres.migrate import migrations
from tests.fixtures import consuming_rights, default_plugins, migrated
from tests.postgres.line import DEAD, RETRY, Line
from tests.waiting import wait_until

# Which version of PostgreSQL it is matters to the statements, which tests/postgres runs on both, not to the commands.
pytestmark = [pytest.mark.usefixtures("major"), pytest.mark.parametrize("major", [18], indirect=True)]

PROGRAM = str(Path(sys.executable).with_name("eventbus"))


class Result:
    """What one command said and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        """The answer of a command with --json."""
        return json.loads(self.out)

    def refused(self, code: int, *words: str) -> None:
        """It ended with ``code`` and said why on one line, which holds every one of ``words``."""
        assert (self.code, self.out) == (code, ""), self.err
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("eventbus: ")
        assert "Traceback" not in self.err
        for word in words:
            assert word in lines[0]


Run = Callable[..., Result]


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run one command in a folder of its own, as a shell would, but in this process."""
    for name in [name for name in os.environ if name.startswith("EVENTBUS_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


@pytest.fixture
def on(bus: Run, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The same with a migrated database behind EVENTBUS_DSN."""
    monkeypatch.setenv("EVENTBUS_DSN", dsn)
    return bus


@pytest.fixture
def line(conn: psycopg.Connection) -> Line:
    line = Line(conn)
    line.declare(ledger=["orders.#"])
    line.live()
    return line


@pytest.fixture
def new_role(conn: psycopg.Connection, dsn: str) -> Iterator[Callable[..., tuple[str, str]]]:
    """Make a role with some rights: its name and its DSN."""
    made: list[str] = []

    def new(rights: Sequence[privileges.Right]) -> tuple[str, str]:
        name = f"eventbus_test_{uuid.uuid4().hex[:12]}"
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        made.append(name)
        for grant in privileges.grants(rights, "eventbus", name):
            conn.execute(grant.encode())
        return name, psycopg.conninfo.make_conninfo(dsn, user=name)

    yield new
    for name in made:
        conn.execute(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"'.encode())


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Start]:
    """Run a command in a process of its own, in the test's folder; what is left of it in the end is killed."""
    with ExitStack() as stack:

        def start(*arguments: str, dsn: str | None, **options: Any) -> subprocess.Popen[str]:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENTBUS_")}
            started = subprocess.Popen(
                [PROGRAM, *arguments],
                env=environment | ({} if dsn is None else {"EVENTBUS_DSN": dsn}),
                cwd=tmp_path,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                **options,
            )
            stack.enter_context(started)
            stack.callback(started.kill)
            return started

        yield start


def payloads(conn: psycopg.Connection) -> list[str]:
    return [text for (text,) in conn.execute("SELECT payload::text FROM eventbus.outbox ORDER BY id")]


COMMANDS = (
    ("migrate",),
    ("publish",),
    ("consume",),
    ("queues",),
    ("queues", "pause"),
    ("queues", "resume"),
    ("queues", "lanes"),
    ("queues", "drop"),
    ("dead-letters",),
    ("dead-letters", "list"),
    ("dead-letters", "show"),
    ("dead-letters", "redrive"),
    ("dead-letters", "discard"),
    ("replay",),
    ("retries",),
    ("retries", "list"),
    ("scheduled", "list"),
    ("scheduled", "cancel"),
    ("explain",),
    ("topics",),
    ("resume",),
    ("demo",),
    ("torture",),
)


# Help, options, settings


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_teaches_it_with_an_example(bus: Run, command: tuple[str, ...]) -> None:
    said = bus(*command, "--help")
    assert said.code == 0
    after = said.out.partition("Example")[2]
    assert f"eventbus {' '.join(command)}" in " ".join(after.split())
    for option in ("--dsn", "--schema", "--json", "--debug"):
        assert option in said.out


def test_the_command_alone_shows_what_there_is(bus: Run) -> None:
    assert "dead-letters" in bus().out
    assert bus("--help").out.split() == bus().out.split()


@pytest.mark.parametrize("arguments", [("--help",), ("consume", "--help"), ("queues", "--help")])
def test_help_loads_no_database_driver_and_nobodys_handlers(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "shop.py").write_text("raise SystemExit('imported')")
    code = f"import sys; from eventbus.cli import main; main({list(arguments)!r}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    modules = done.stdout.splitlines()[-1]
    for heavy in ("psycopg", "pydantic_settings", "eventbus.bus", "shop"):
        assert f"'{heavy}'" not in modules


def test_only_consume_imports_handlers(on: Run, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("raise SystemExit('imported')")
    for command in ("migrate", "queues", "topics", "dead-letters", "retries"):
        assert on(command).code == 0


def test_unknown_names_are_usage_errors(on: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    on("frob").refused(2, "frob", "eventbus --help")
    on("queues", "--frob").refused(2, "--frob", "eventbus queues --help")
    on("publish", "a", "1", "--batch", "none").refused(2, "--batch")
    monkeypatch.setenv("EVENTBUS_SHEMA", "x")
    on("queues").refused(2, "EVENTBUS_SHEMA", "EVENTBUS_SCHEMA")


def test_options_may_stand_before_and_after_the_command(bus: Run, dsn: str) -> None:
    migrated(dsn, "Other-bus")
    assert bus("--dsn", dsn, "publish", "a.b", "--schema", "Other-bus").code == 0
    for arguments in (
        ("--dsn", dsn, "--schema", "Other-bus", "--json", "queues"),
        ("queues", "--dsn", dsn, "--schema", "Other-bus", "--json"),
        ("--dsn", "postgresql://127.0.0.1:1/x", "queues", "--dsn", dsn, "--json", "--schema", "Other-bus"),
    ):
        assert bus(*arguments).json["backlog"]["events"] == 1
    assert bus("--dsn", dsn, "queues", "--json").json["backlog"]["events"] == 0


def test_every_command_answers_in_json(on: Run, line: Line, tmp_path: Path) -> None:
    line.kill("ledger", 3)
    letters = [letter for (letter,) in line.conn.execute("SELECT id FROM eventbus.dead_letters ORDER BY id")]
    event_id = line.publish()
    line.publish()
    line.relay()
    assert line.settle(line.claim("ledger", 1), **{f"s{4}": RETRY})
    (tmp_path / "two.ndjson").write_text('{"topic": "a"}\n' * 2)
    assert on("migrate", "--json").json == {"schema": "eventbus", "applied": []}
    assert on("migrate", "--plan", "--json").json == {"schema": "eventbus", "pending": []}
    assert "CREATE SCHEMA" in on("migrate", "--sql", "--json").json["sql"]
    assert on("publish", "a.b", "--json").json["topic"] == "a.b"
    assert on("publish", "--file", "two.ndjson", "--json").json == {"published": 2, "transactions": 1, "skipped": []}
    queues = on("queues", "--json").json
    assert [(q["name"], q["waiting"], q["retrying"], q["dead"]) for q in queues["queues"]] == [("ledger", 1, 1, 3)]
    assert queues["bus"]["state"] == "running"
    assert [letter["payload"] for letter in on("dead-letters", "list", "--json").json] == [{"n": 2}, {"n": 1}, {"n": 0}]
    assert on("dead-letters", "show", letters[0], "--json").json["reason"] == "gave up"
    assert [retry["attempts"] for retry in on("retries", "list", "--json").json] == [1]
    assert on("explain", event_id, "--json").json["copies"][0]["standing"]["stage"] == "retrying"
    assert [topic["topic"] for topic in on("topics", "--json").json] == ["orders.created"]
    assert on("dead-letters", "redrive", letters[0], "--json").json["redriven"] == letters[:1]
    assert on("dead-letters", "discard", letters[1], "--yes", "--json").json["discarded"] == letters[1:2]
    assert on("queues", "drop", "ledger", "--yes", "--json").json["dropped"]["dead"] == 1
    assert on("resume", "--json").json == {"resumed": False}
    for listing in (("dead-letters",), ("retries",)):
        assert on(*listing, "--json").json == []


PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_page_on_the_command_line_has_every_command(bus: Run, command: tuple[str, ...]) -> None:
    assert f"## eventbus {command[0]}" in PAGE
    assert command[-1] in PAGE.partition(f"## eventbus {command[0]}")[2]


def test_the_page_on_the_command_line_has_every_option_of_the_larger_commands(bus: Run) -> None:
    for command in ("migrate", "publish", "consume", "demo", "torture"):
        for option in set(re.findall(r"--[a-z-]+", bus(command, "--help").out)) - {"--help", "--wait"}:
            assert option in PAGE, f"{command} {option}"


@pytest.mark.parametrize(
    ("needs", "role"),
    [(privileges.PUBLISH, "shop_web"), (consuming_rights(), "shop_worker")],
    ids=["publish", "consume"],
)
def test_the_rights_on_the_page_are_those_that_the_tests_grant(needs: Sequence[privileges.Right], role: str) -> None:
    assert "\n".join(["```sql", *privileges.grants(needs, "eventbus", role), "```"]) in PAGE


# Servers and schemas


def test_ten_migrations_at_once_all_succeed_and_apply_each_step_once(process: Start, empty_dsn: str) -> None:
    running = [process("migrate", "--json", dsn=empty_dsn) for _ in range(10)]
    answers = [(*one.communicate(timeout=60), one.returncode) for one in running]
    assert {code for _, _, code in answers} == {0}
    applied = sorted(name for out, _, _ in answers for name in json.loads(out)["applied"])
    assert applied == [migration.name for migration in migrations("eventbus", default_plugins().migrations())]


def test_no_command_but_migrate_touches_the_schema_of_a_server_of_yours(bus: Run, empty_dsn: str) -> None:
    bus("queues", "--dsn", empty_dsn).refused(1, 'no schema "eventbus"', "eventbus migrate")
    bus("publish", "a", "--dsn", empty_dsn).refused(1, "eventbus migrate")
    plan = bus("migrate", "--plan", "--dsn", empty_dsn)
    assert plan.code == 0
    assert [row.split("\t")[0] for row in plan.out.splitlines()[1:]] == [
        step.name for step in migrations("eventbus", default_plugins().migrations())
    ]
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT to_regnamespace('eventbus')").fetchone() == (None,)


def test_the_script_for_a_dba_needs_no_server(bus: Run) -> None:
    said = bus("migrate", "--sql", "--schema", "Other-bus", "--dsn", "postgresql://127.0.0.1:1/x")
    assert (said.code, said.err) == (0, "")
    assert 'CREATE TABLE "Other-bus".outbox' in said.out


def test_a_schema_of_another_version_is_named_with_the_side_to_upgrade(on: Run, conn: psycopg.Connection) -> None:
    conn.execute("INSERT INTO eventbus.migrations (name, digest) VALUES ('9999_later', '')")
    on("queues").refused(1, "9999_later", "upgrade this installation")
    on("migrate").refused(1, "9999_later", "upgrade this installation")


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://root:geheim@127.0.0.1:1/x",
        "host=127.0.0.1 port=1 password=geheim",
        "host=127.0.0.1 port=1 password='geh eim'",
        "postgresql//root:geheim@127.0.0.1/x",
        "postgresql://root:geheim@127.0.0.1/x?frob=1",
        "postgresql://127.0.0.1:1/x?password=geheim&user=root",
    ],
)
@pytest.mark.parametrize("command", [("queues",), ("migrate",), ("publish", "a"), ("queues", "--debug")])
def test_a_server_that_cannot_be_reached_is_one_line_without_the_password(
    bus: Run, dsn: str, command: tuple[str, ...]
) -> None:
    said = bus(*command, "--dsn", dsn)
    assert said.code == 1
    for secret in ("geheim", "geh eim", "eim'"):
        assert secret not in said.err + said.out
    if "--debug" in command:
        assert "Traceback" in said.err
    else:
        said.refused(1)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "at postgresql://root:geh@h/x and postgresql://a:b@c",
            "at postgresql://root:***@h/x and postgresql://a:***@c",
        ),
        ("missing = after postgresql//root:g:e/h@h/x", "missing = after postgresql//root:***@h/x"),
        ("host=h password=geheim port=1", "host=h password=*** port=1"),
        (r"password = 'geh\'eim x' port=1", "password = *** port=1"),
        ("//h/x?user=a&password=geheim&sslpassword=b", "//h/x?user=a&password=***&sslpassword=***"),
        ("postgresql://root@h/x and http://h:80/a", "postgresql://root@h/x and http://h:80/a"),
    ],
)
def test_no_password_of_a_connection_string_is_ever_shown(text: str, shown: str) -> None:
    assert masked(text) == shown


# Publishing


def test_an_event_arrives_as_it_was_typed(on: Run, conn: psycopg.Connection) -> None:
    event_id = str(uuid.uuid4())
    said = on(
        "publish", "orders.created", '{"n": 12345678901234567890, "t": "é ☃", "f": 0.1}', "--key", "k 1",
        "--header", "tenant=acme=x", "--header", "trace=", "--event-id", event_id, "--priority", 7,
    )  # fmt: skip
    assert (said.code, said.out) == (0, event_id + "\n")
    row = conn.execute("SELECT event_id::text, topic, key, payload, headers, priority FROM eventbus.outbox").fetchone()
    payload = {"n": 12345678901234567890, "t": "é ☃", "f": 0.1}
    assert row == (event_id, "orders.created", "k 1", payload, {"tenant": "acme=x", "trace": ""}, 7)


def test_a_delayed_event_is_due_when_it_was_said(on: Run, conn: psycopg.Connection) -> None:
    assert on("publish", "a", "--delay", "2h").code == 0
    assert on("publish", "b", "--at", "2040-01-31T09:00:00+01:00").code == 0
    rows = conn.execute(
        "SELECT topic, due_at - created_at BETWEEN '119 min' AND '121 min', due_at = '2040-01-31 08:00:00+00'"
        " FROM eventbus.scheduled ORDER BY topic"
    ).fetchall()
    assert rows == [("a", True, False), ("b", False, True)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("TOPIC",)),
        (("orders..created",), ("orders..created",)),
        (("a", "hello"), ("not JSON", "'\"hello\"'")),
        (("a", '{"a": 1, "a": 2}'), ('"a" twice',)),
        (("a", "0.12345678901234567890123"), ("does not fit into a double",)),
        (("a", "1e999"), ("does not fit into a double",)),
        (("a", "NaN"), ("NaN",)),
        (("a", "1", "--key", ""), ("key",)),
        (("a", "1", "--header", "tenant"), ("tenant", "NAME=VALUE")),
        (("a", "1", "--header", "Tenant=x"), ("Tenant", "tenant")),
        (("a", "1", "--header", "x=1", "--header", "y=1", "--header", "x=1"), ("'x'", "twice")),
        (("a", "1", "--priority", "10"), ("--priority", "9")),
        (("a", "1", "--priority", "high"), ("--priority",)),
        (("--priority", "0", "--file", "x"), ("--priority", "--file")),
        (("a", "1", "--delay", "soon"), ("soon", "15m")),
        (("a", "1", "--at", "2040-01-31T09:00:00"), ("offset",)),
        (("a", "1", "--delay", "1s", "--at", "2040-01-31T09:00:00Z"), ("delay and at",)),
        (("a", "1", "--event-id", "17"), ("--event-id",)),
        (("a", "1", "--file", "x"), ("PAYLOAD", "--file")),
        (("--file", "missing.ndjson"), ("missing.ndjson", "No such file")),
    ],
)
def test_what_cannot_be_published_is_refused_with_what_to_change(
    on: Run, conn: psycopg.Connection, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    on("publish", *arguments).refused(2, *words)
    assert payloads(conn) == []


def test_a_file_is_published_in_order_in_transactions_of_the_size_that_was_asked_for(
    on: Run, conn: psycopg.Connection, tmp_path: Path
) -> None:
    lines = [json.dumps({"topic": "t", "payload": n, "key": f"k{n}", "headers": {"n": str(n)}, "priority": n})
             for n in range(10)]  # fmt: skip
    (tmp_path / "events.ndjson").write_bytes(("\ufeff" + "\r\n\r\n".join(lines)).encode())
    said = on("publish", "--file", "events.ndjson", "--batch", 4)
    assert (said.code, said.out) == (0, "published 10 events in 3 transactions\n")
    rows = conn.execute("SELECT payload, key, headers->>'n', priority, xid FROM eventbus.outbox ORDER BY id").fetchall()
    assert [row[:4] for row in rows] == [(n, f"k{n}", str(n), n) for n in range(10)]
    assert [len([row for row in rows if row[4] == xid]) for xid in dict.fromkeys(row[4] for row in rows)] == [4, 4, 2]


def test_standard_input_may_be_payloads_of_one_topic(on: Run, conn: psycopg.Connection) -> None:
    assert on("publish", "orders.imported", "--file", "-", stdin='{"topic": "x"}\n\n"two"\n3').code == 0
    rows = conn.execute("SELECT topic, payload FROM eventbus.outbox ORDER BY id").fetchall()
    assert rows == [("orders.imported", {"topic": "x"}), ("orders.imported", "two"), ("orders.imported", 3)]


BAD_LINES = {
    "not JSON": "{'topic': 1}",
    "no object": "[1, 2]",
    "no topic": '{"payload": 1}',
    "bad topic": '{"topic": "a..b"}',
    "unknown field": '{"topic": "a", "playload": 1}',
    "bad key": '{"topic": "a", "key": 7}',
    "bad id": '{"topic": "a", "event_id": "7"}',
    "bad delay": '{"topic": "a", "delay": "soon"}',
    "bad priority": '{"topic": "a", "priority": 10}',
    "priority as text": '{"topic": "a", "priority": "5"}',
    "bad moment": '{"topic": "a", "at": "tomorrow"}',
    "inexact": '{"topic": "a", "payload": 0.1234567890123456789012}',
}


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_stops_before_anything_of_its_batch_is_sent_and_the_command_it_names_goes_on_exactly_there(
    on: Run, conn: psycopg.Connection, tmp_path: Path, bad: str
) -> None:
    lines = [json.dumps({"topic": "t", "payload": n}) for n in range(10)]
    lines[6] = bad
    (tmp_path / "events.ndjson").write_text("\n".join(lines))
    said = on("publish", "--file", "events.ndjson", "--batch", "4")
    said.refused(1, "events.ndjson, line 7:", "4 events of lines 1-4 and nothing else committed")
    assert payloads(conn) == ["0", "1", "2", "3"]
    (tmp_path / "events.ndjson").write_text("\n".join([*lines[:6], '{"topic": "t", "payload": 6}', *lines[7:]]))
    go_on = re.search(r"tail -n \+(\d+) (\S+) \| eventbus (.*)$", said.err)
    assert go_on
    rest = "\n".join((tmp_path / go_on[2]).read_text().split("\n")[int(go_on[1]) - 1 :])
    assert on(*go_on[3].split(), stdin=rest).code == 0
    assert payloads(conn) == [str(n) for n in range(10)]


def test_bad_lines_can_be_left_out_and_are_reported_each_with_its_number(
    on: Run, conn: psycopg.Connection, tmp_path: Path
) -> None:
    lines = ['{"topic": "t", "payload": 1}', "nonsense", '{"topic": ".."}', '{"topic": "t", "payload": 4}']
    (tmp_path / "events.ndjson").write_text("\n".join(lines))
    said = on("publish", "--file", "events.ndjson", "--skip-bad", "--json")
    assert said.code == 1
    assert said.json["published"] == 2
    assert [skipped["line"] for skipped in said.json["skipped"]] == [2, 3]
    assert "line 2 left out: not JSON" in said.err
    assert payloads(conn) == ["1", "4"]


def test_a_payload_over_the_limit_is_a_bad_line(on: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTBUS_MAX_PAYLOAD_BYTES", "10")
    on("publish", "t", "--file", "-", stdin='"short"\n"much too long"').refused(1, "line 2", "nothing is committed")


def test_a_server_that_goes_away_in_the_middle_says_what_is_committed_and_what_is_unknown(
    on: Run, conn: psycopg.Connection, dsn: str, tmp_path: Path
) -> None:
    conn.execute(
        "CREATE FUNCTION public.cut() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM pg_terminate_backend(pg_backend_pid()) WHERE NEW.payload::text = '5'; RETURN NEW; END $$"
    )
    conn.execute("CREATE TRIGGER cut BEFORE INSERT ON eventbus.outbox FOR EACH ROW EXECUTE FUNCTION public.cut()")
    said = on("publish", "t", "--file", "-", "--batch", "2", stdin="\n".join(map(str, range(9))))
    said.refused(1, "lines 5-6", "may be committed or not", "4 events of lines 1-4 and nothing else")
    assert payloads(conn) == ["0", "1", "2", "3"]


def test_ctrl_c_while_a_file_comes_in_says_what_is_committed_and_nothing_else(
    process: Start, dsn: str, conn: psycopg.Connection
) -> None:
    running = process("publish", "t", "--file", "-", "--batch", "1", dsn=dsn, stdin=subprocess.PIPE)
    assert running.stdin
    running.stdin.write("1\n2\n")
    running.stdin.flush()
    wait_until(lambda: len(payloads(conn)) == 1, timeout=30)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert (running.returncode, out) == (130, "")
    known = "1 event of lines 1-1 and nothing else committed"
    unknown = "lines 1-1 were being committed, so they may be committed or not; before them, nothing is committed"
    assert err.startswith((f"stopped; {known}", f"stopped; {unknown}"))  # we see the commit before the publisher does
    assert len(err.strip().splitlines()) == 1


def test_ctrl_c_in_the_middle_of_a_commit_does_not_say_that_nothing_is_committed(
    process: Start, dsn: str, conn: psycopg.Connection
) -> None:
    conn.execute(
        "CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM pg_advisory_xact_lock(4711) WHERE NEW.payload::text = '2'; RETURN NULL; END $$"
    )
    conn.execute(
        "CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON eventbus.outbox DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION public.wait()"
    )
    conn.execute("SELECT pg_advisory_lock(4711)")
    running = process("publish", "t", "--file", "-", "--batch", "1", dsn=dsn, stdin=subprocess.PIPE)
    assert running.stdin
    running.stdin.write("1\n2\n3\n")
    running.stdin.flush()
    committing = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory' AND query = 'COMMIT'"
    wait_until(lambda: conn.execute(committing).fetchone() is not None, timeout=30)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert err.startswith(
        "stopped; lines 2-2 were being committed, so they may be committed or not; before them, 1 event"
    )


# Consuming

HANDLERS = """
import os
import psycopg
from eventbus import Event, subscribe

DSN = os.environ["EVENTBUS_DSN"]

@subscribe("orders.#", name="ledger")
def book(event: Event) -> None:
    with psycopg.connect(DSN) as conn:
        conn.execute("INSERT INTO public.booked VALUES (%s)", [event.payload])

@subscribe("#", name="audit")
async def audit(event: Event) -> None: ...
"""


def test_the_handlers_of_a_module_run_with_the_database_of_the_command(
    process: Start, dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(HANDLERS)
    conn.execute("CREATE TABLE public.booked (n int)")
    Line(conn).declare(ledger=["orders.#"], audit=["#"])
    published = process("publish", "orders.x", "--file", "-", dsn=dsn, stdin=subprocess.PIPE)
    assert "published 5 events" in published.communicate("1\n2\n3\n4\n5\n", timeout=30)[0]
    consumed = process("consume", "shop", "--until-idle", "--queues", "ledger", dsn=dsn)
    _, err = consumed.communicate(timeout=60)
    assert consumed.returncode == 0, err
    assert "consuming ledger" in err
    booked = conn.execute("SELECT n FROM public.booked ORDER BY n").fetchall()
    assert booked == [(1,), (2,), (3,), (4,), (5,)]
    audit = json.loads(process("queues", "--json", dsn=dsn).communicate(timeout=30)[0])["queues"][0]
    assert (audit["name"], audit["waiting"]) == ("audit", 5), "a queue that was not chosen keeps its events"


def test_the_log_of_a_worker_is_text_that_cannot_command_the_terminal_or_json(
    process: Start, dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(
        "from eventbus import RetryPolicy, subscribe\n"
        "@subscribe('#', name='q', retry=RetryPolicy(max_attempts=1))\n"
        "async def fail(payload: dict) -> None: raise ValueError('\\x1b[31mred\\nFAKE LINE')\n"
    )
    Line(conn).declare(q=["#"])
    for options in ((), ("--json",)):
        process("publish", "a", "{}", dsn=dsn).communicate(timeout=30)
        worker = process("consume", "shop", "--until-idle", *options, dsn=dsn)
        _, err = worker.communicate(timeout=60)
        assert worker.returncode == 0, err
        assert "\x1b" not in err
        assert not any(text.startswith("FAKE") for text in err.splitlines())
        if options:
            records = [json.loads(text) for text in err.splitlines()]
            assert {"at", "level", "message"} <= set(records[0])
            assert any("red" in record["message"] for record in records)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, ("module 'shop' not found",)),
        ("import no_such_package", ("no_such_package", "shop.py:1")),
        ("def broken(:", ("SyntaxError", "shop.py:1")),
        ("import sys; sys.exit(0)", ("'shop' ended the program", "shop.py:1")),
        ("x = 1", ("no handler is subscribed",)),
    ],
    ids=["missing", "inner import", "syntax", "exit", "no handler"],
)
def test_a_module_that_cannot_be_used_is_one_line_with_the_true_reason(
    process: Start, dsn: str, tmp_path: Path, source: str | None, words: tuple[str, ...]
) -> None:
    if source is not None:
        (tmp_path / "shop.py").write_text(source)
    worker = process("consume", "shop", dsn=dsn)
    out, err = worker.communicate(timeout=60)
    said = Result(worker.returncode, out, "\n".join(text for text in err.splitlines() if " INFO " not in text))
    said.refused(2, *words)


def test_a_traceback_is_shown_to_those_who_ask(process: Start, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import no_such_package")
    _, err = process("consume", "shop", "--debug", dsn=dsn).communicate(timeout=60)
    assert "Traceback (most recent call last)" in err
    assert "ModuleNotFoundError" in err


def test_unknown_queues_and_missing_rights_end_a_worker_before_it_starts(
    process: Start,
    bus: Run,
    dsn: str,
    conn: psycopg.Connection,
    tmp_path: Path,
    new_role: Callable[..., tuple[str, str]],
) -> None:
    (tmp_path / "shop.py").write_text(
        "from eventbus import subscribe\n@subscribe('#', name='q')\ndef f(payload: dict): ...\n"
    )
    worker = process("consume", "shop", "--queues", "nope", dsn=dsn)
    _, err = worker.communicate(timeout=60)
    assert (worker.returncode, "unknown queue 'nope'; known: q" in err) == (2, True), err
    role, as_role = new_role(consuming_rights())
    worker = process("consume", "shop", "--until-idle", dsn=as_role)
    _, err = worker.communicate(timeout=60)
    assert (worker.returncode, "restored" in err, "eventbus resume" in err) == (1, True, True), "a clone looks restored"
    assert bus("resume", "--dsn", dsn).code == 0
    worker = process("consume", "shop", "--until-idle", dsn=as_role)
    assert worker.communicate(timeout=60)[0] == ""
    assert worker.returncode == 0, "the documented grants are enough"
    conn.execute(f'REVOKE INSERT ON eventbus.claims FROM "{role}"'.encode())
    worker = process("consume", "shop", "--until-idle", dsn=as_role)
    _, err = worker.communicate(timeout=60)
    assert worker.returncode == 2, err
    assert f'GRANT INSERT ON TABLE "eventbus".claims TO "{role}"' in err


def test_without_waiting_a_server_that_is_down_ends_the_worker(process: Start, bus: Run, tmp_path: Path) -> None:
    (tmp_path / "stall.py").write_text(
        "from eventbus import subscribe\n@subscribe('#', name='q')\ndef f(payload: dict): ...\n"
    )
    worker = process("consume", "stall", "--no-wait", dsn="postgresql://127.0.0.1:1/x")
    out, err = worker.communicate(timeout=60)
    Result(worker.returncode, out, err).refused(1, "no connection to PostgreSQL")


def test_a_server_that_refuses_the_connection_is_not_waited_for(
    process: Start, bus: Run, tmp_path: Path, dsn: str
) -> None:
    (tmp_path / "stall.py").write_text(
        "from eventbus import subscribe\n@subscribe('#', name='q')\ndef f(payload: dict): ...\n"
    )
    nowhere = psycopg.conninfo.make_conninfo(dsn, dbname="there_is_no_such_database")
    worker = process("consume", "stall", dsn=nowhere)
    out, err = worker.communicate(timeout=60)
    Result(worker.returncode, out, err).refused(1, "does not exist")


def test_delayed_events_are_listed_in_the_order_in_which_they_fire(on: Run) -> None:
    assert on("scheduled", "list").err == "no delayed events\n"
    late = on("publish", "orders.reminder", "1", "--at", "9999-12-31T23:59:59Z").out.strip()
    soon = on("publish", "orders.reminder", "1", "--delay", "2h", "--key", "k", "--priority", "9").out.strip()
    other = on("publish", "mails.due", "1", "--delay", "1d").out.strip()
    assert [row["event_id"] for row in on("scheduled", "list", "--json").json] == [soon, other, late]
    [first, second] = on("scheduled", "list", "--topic", "orders.*", "--json").json
    assert (first["event_id"], first["key"], first["priority"], first["size"]) == (soon, "k", 9, 1)
    assert 7190 < first["due_in"] <= 7200
    assert (second["event_id"], second["due_at"]) == (late, "9999-12-31T23:59:59.000000Z")
    said = on("scheduled", "--json")
    assert len(said.json) == 3
    table = on("scheduled", "list", "--limit", "1")
    header, row = (text.split("\t") for text in table.out.splitlines())
    assert header == ["event", "topic", "due", "at", "key", "priority"]
    assert (row[0], row[1], row[4:]) == (soon, "orders.reminder", ["k", "9"])
    assert "there are more" in table.err
    on("scheduled", "list", "--topic", "nothing.#").refused(1, "nothing.#", "mails.due", "orders.reminder")
    on("scheduled", "list", "--topic", "a..b").refused(2, "a..b")


def test_delayed_events_are_taken_back_and_what_is_not_there_is_an_exit_code(on: Run, conn: psycopg.Connection) -> None:
    ids = [on("publish", "a", "1", "--delay", "2h").out.strip() for _ in range(3)]
    unknown = str(uuid.uuid4())
    assert (on("scheduled", "cancel", ids[0]).code, on("scheduled", "cancel", ids[0]).code) == (0, 1)
    said = on("scheduled", "cancel", ids[1], unknown, ids[1].upper(), "--json")
    assert (said.code, said.json) == (1, {"cancelled": [ids[1]], "missing": [unknown]})
    assert unknown in said.err
    on("scheduled", "cancel", ids[2], "17").refused(2, "'17'")
    on("scheduled", "cancel").refused(2, "EVENT_ID")
    assert [str(one) for (one,) in conn.execute("SELECT event_id FROM eventbus.scheduled")] == [ids[2]]
    assert on("scheduled", "cancel", ids[2]).out == "1 event cancelled\n"
    assert on("explain", ids[2]).code == 1


def test_a_publisher_can_take_back_with_its_own_rights_or_is_told_the_grant(
    bus: Run, conn: psycopg.Connection, new_role: Callable[..., tuple[str, str]]
) -> None:
    role, as_role = new_role(privileges.PUBLISH)
    event_id = bus("publish", "a", "1", "--delay", "1h", "--dsn", as_role).out.strip()
    conn.execute(f'REVOKE DELETE ON eventbus.scheduled FROM "{role}"'.encode())
    refused = f'GRANT DELETE ON TABLE "eventbus".scheduled TO "{role}"'
    bus("scheduled", "cancel", event_id, "--dsn", as_role).refused(2, refused)
    conn.execute(f'GRANT DELETE ON eventbus.scheduled TO "{role}"'.encode())
    assert bus("scheduled", "cancel", event_id, "--dsn", as_role).code == 0


def test_a_publisher_without_a_right_is_told_the_grant(
    bus: Run, conn: psycopg.Connection, new_role: Callable[..., tuple[str, str]]
) -> None:
    role, as_role = new_role(privileges.PUBLISH)
    assert bus("publish", "a", "1", "--dsn", as_role).code == 0
    conn.execute(f'REVOKE INSERT (key) ON eventbus.outbox FROM "{role}"'.encode())
    bus("publish", "a", "1", "--dsn", as_role).refused(2, f'GRANT INSERT (key) ON TABLE "eventbus".outbox TO "{role}"')
    assert payloads(conn) == ["1"]


# Looking and putting right


def test_queues_are_a_table_for_programs_in_a_pipe_and_the_bus_is_told_apart(on: Run, line: Line) -> None:
    line.kill("ledger", 2)
    line.publish()
    line.conn.execute("UPDATE eventbus.bus SET state = 'paused', reason = 'a copy'")
    said = on("queues")
    header, row = (text.split("\t") for text in said.out.splitlines())
    assert dict(zip(header, row, strict=True)) == {
        "queue": "ledger", "patterns": "orders.#", "waiting": "0", "running": "0", "retrying": "0", "parked": "0",
        "dead": "2", "oldest": "",
    }  # fmt: skip
    assert "workers: 1" in said.err
    assert "not relayed yet: 1" in said.err
    assert "PAUSED: a copy" in said.err
    assert on("resume").out == "the bus goes on\n"


def test_the_lanes_of_an_ordered_queue_are_chosen_and_the_answer_says_when_they_count(on: Run, line: Line) -> None:
    line.conn.execute("""SELECT eventbus.declare_queues('[{"name": "keyed", "patterns": ["#"], "kind": "ordered"}]')""")
    said = on("queues", "lanes", "keyed", 4)
    assert "keyed gets 4 lanes instead of 16, once the present ones are empty" in said.out
    assert "keyed goes over to other lanes once the present ones are empty" in on("queues").err
    assert on("queues", "lanes", "keyed", 4, "--json").json == {"queue": "keyed", "before": 4, "after": 4}
    on("queues", "lanes", "ledger", 4).refused(1, "'ledger' is not ordered and has no lanes", "ordered=True")
    on("queues", "lanes", "legder", 4).refused(1, "no queue 'legder'; known queues")
    for wrong in (0, 1025, "x"):
        on("queues", "lanes", "keyed", wrong).refused(2, "N")
    line.conn.execute(
        """SELECT eventbus.declare_queues('[{"name": "urgent", "patterns": ["#"], "kind": "prioritized"}]')"""
    )
    on("queues", "lanes", "urgent", 4).refused(1, "a lane for each priority", "priorities=")


def test_keys_that_stand_still_are_shown_with_what_they_wait_for(on: Run, line: Line) -> None:
    assert "no key of an ordered queue stands still" in on("queues", "--blocked").err
    assert on("queues", "--blocked", "--json").json == []
    line.conn.execute("""SELECT eventbus.declare_queues('[{"name": "keyed", "patterns": ["#"], "kind": "ordered",
        "lanes": 1}]')""")
    line.numbers["keyed"] = line.one("SELECT id FROM eventbus.queues WHERE name = 'keyed'")
    for key in ("dead", "dead", "late", "late"):
        line.publish(key=key)
    line.relay()
    parked = {"outcome": "parked"}
    assert line.settle(line.claim("keyed"), s1=DEAD, s2=parked, s3=RETRY, s4=parked)
    said = on("queues", "--blocked")
    rows = [text.split("\t") for text in said.out.splitlines()]
    assert rows[0] == ["queue", "key", "parked", "behind", "since"]
    assert [row[:3] for row in rows[1:]] == [["keyed", "dead", "1"], ["keyed", "late", "1"]]
    assert rows[1][3] == "dead letter 1: gave up"
    assert rows[2][3].startswith("a retry, due in ")
    assert rows[2][3].endswith("ValueError: no such order")
    assert "eventbus dead-letters redrive NUMBER" in said.err
    assert [item["by"] for item in on("queues", "--blocked", "--json").json] == ["dead letter", "retry"]


def test_a_queue_is_paused_and_resumed_and_says_so_wherever_somebody_looks(on: Run, line: Line) -> None:
    event = line.publish()
    line.relay()
    said = on("queues", "pause", "ledger", "--reason", "the bank\nis closed")
    assert (said.code, said.err) == (0, "")
    assert re.fullmatch(
        r"ledger is paused since [-0-9]+ [:0-9]+: the bank is closed; to go on: eventbus queues resume ledger\n",
        said.out,
    )
    assert "ledger is paused since" in on("queues").err
    [pause] = on("queues", "--json").json["pauses"]
    assert (pause["queue"], pause["source"], pause["until"]) == ("ledger", "manual", None)
    assert "the queue is paused since" in on("explain", event).out
    assert on("queues", "pause", "ledger", "--reason", "x", "--for", "10m", "--json").json["ends_in"] > 590
    line.one("SELECT eventbus.pause_queue(1, 'breaker', 'five failures', 600, 30)")
    said = on("queues", "resume", "ledger")
    assert said.out.startswith("ended: ledger paused since ")
    assert "still: ledger is paused by breaker since" in said.out
    assert on("queues", "resume", "ledger").out.startswith("ledger was not paused by hand\nstill: ")
    assert [item["source"] for item in on("queues", "resume", "ledger", "--all", "--json").json["ended"]] == ["breaker"]
    assert on("queues", "resume", "ledger", "--all").out == "ledger was not paused\n"
    assert on("queues", "--json").json["pauses"] == []


def test_a_pause_without_a_reason_or_of_a_queue_that_is_not_there_is_refused(on: Run, line: Line) -> None:
    on("queues", "pause", "ledger").refused(2, "--reason")
    on("queues", "pause", "ledger", "--reason", " ").refused(2, "--reason", "say why")
    for wrong in ("soon", "0", "-1s", "9999999d"):
        on("queues", "pause", "ledger", "--reason", "x", "--for", wrong).refused(2, "--for")
    on("queues", "pause", "legder", "--reason", "x").refused(1, "no queue 'legder'; known queues: ledger")
    on("queues", "resume", "legder").refused(1, "no queue 'legder'; known queues: ledger")


def test_a_queue_that_still_gets_old_events_says_how_far_it_is(on: Run, line: Line) -> None:
    line.publish()
    line.relay()
    line.conn.execute(
        """SELECT eventbus.declare_queues('[{"name": "late", "patterns": ["#"], "start": "earliest"}]')"""
    )
    assert "late still gets what was relayed before it began: 0%" in on("queues").err
    assert "PAUSED" not in on("queues").err


def test_a_queue_is_dropped_only_after_a_yes(on: Run, line: Line) -> None:
    line.kill("ledger", 2)
    on("queues", "drop", "ledger").refused(2, "--yes")
    assert line.queue("ledger").dead == 2
    said = on("queues", "drop", "ledger", "--yes")
    assert said.out == "dropped ledger: 0 waiting, 0 running, 0 retrying, 2 dead\n"
    on("queues", "drop", "ledger", "--yes").refused(1, "no queue 'ledger'", "there are no queues yet")


def test_an_answer_that_is_broken_off_drops_nothing(on: Run, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_off(*_: object, **__: object) -> bool:
        raise typer.Abort

    monkeypatch.setattr(Screen, "confirmed", broken_off)
    assert on("queues", "drop", "ledger").code == 130
    monkeypatch.setattr(Screen, "confirmed", lambda *_, **__: False)
    assert on("queues", "drop", "ledger").code == 1
    assert line.queue("ledger").state == "active"


@pytest.mark.parametrize("name", ["a'; DROP TABLE eventbus.outbox; --", 'two "words"', "%s %(x)s", "\\", "two words"])
def test_odd_names_are_answered_in_words_and_never_by_the_sql_parser(on: Run, line: Line, name: str) -> None:
    on("queues", "drop", name, "--yes").refused(1, "no queue", "known queues: ledger")
    on("dead-letters", "list", "--queue", name).refused(1, "known queues: ledger")
    on("dead-letters", "list", "--topic", name).refused(2, "pattern")
    on("publish", name).refused(2, "topic")


def test_dead_letters_are_redriven_and_discarded_by_number_and_missing_ones_are_an_error(on: Run, line: Line) -> None:
    first, second, third = line.kill("ledger", 3)
    said = on("dead-letters", "redrive", first, 999)
    assert (said.code, said.out) == (1, "1 dead letter back in the queue\n")
    assert "999" in said.err
    on("dead-letters", "show", 999).refused(1, "no dead letter 999")
    on("dead-letters", "discard", second).refused(2, "--yes")
    assert on("dead-letters", "discard", second, "--yes").out == "1 dead letter deleted\n"
    assert on("dead-letters", "redrive", "--all").code == 0
    assert on("dead-letters").err == "no dead letters\n"
    assert sorted(seq for (seq,) in line.conn.execute("SELECT seq FROM eventbus.exceptions")) == [1, 3]
    assert third


def test_redrive_and_discard_take_nothing_that_was_not_named(on: Run, line: Line) -> None:
    line.kill("ledger", 2)
    for command in ("redrive", "discard"):
        on("dead-letters", command).refused(2, "--queue", "--all")
        on("dead-letters", command, 1, "--all").refused(2, "--all", "leave the ids out")
        on("dead-letters", command, "--queue", "nope").refused(1, "known queues: ledger")
        on("dead-letters", command, "--topic", "nope.*").refused(1, "known topics: orders.created")
    assert line.queue("ledger").dead == 2


def test_a_letter_shows_everything_and_its_control_characters_harmlessly(on: Run, line: Line) -> None:
    line.publish(payload="\x1b[31m\u202e", key="k\x07")
    line.relay()
    error = {"type": "E", "message": "\x1b[2J", "traceback": "Traceback\n  line\x1b"}
    assert line.settle(line.claim("ledger"), s1=DEAD | {"error": error})
    for command in (("dead-letters", "show", 1), ("dead-letters",)):
        said = on(*command)
        assert said.code == 0
        assert not set("\x1b\x07\u202e") & set(said.out)
    assert "\\x1b[2J" in on("dead-letters", "show", 1).out


def test_an_event_is_explained_or_not_found(on: Run, line: Line) -> None:
    event_id = line.publish(key="k")
    line.relay()
    said = on("explain", event_id)
    assert said.code == 0
    for words in ("orders.created", "queue ledger  (matches orders.#)", "waiting at position 1"):
        assert words in said.out
    on("explain", uuid.uuid4()).refused(1, "no event")
    on("explain", "17").refused(2, "'17'", "EVENT_ID")


def test_topics_show_who_gets_them_and_how_many_got_lost(on: Run, line: Line) -> None:
    line.publish("lost.event")
    line.relay()
    header, row = (text.split("\t") for text in on("topics", "--count").out.splitlines())
    assert (row[0], *row[2:]) == ("lost.event", "nobody", "1", "1")
    assert header[0] == "topic"


def test_a_reader_that_goes_away_ends_the_command_quietly(process: Start, dsn: str, conn: psycopg.Connection) -> None:
    conn.execute(
        "INSERT INTO eventbus.topics (topic, bindings_version, fanout)"
        " SELECT repeat('x', 200) || g, 1, 0 FROM generate_series(1, 3000) g"
    )
    for options in ((), ("--json",)):
        running = process("topics", *options, dsn=dsn)
        assert running.stdout
        assert running.stderr
        running.stdout.read(1)
        running.stdout.close()
        assert running.stderr.read() == ""
        running.stderr.close()
        assert running.wait(30) == 141


# The embedded server


@pytest.mark.slow
def test_without_a_server_everything_works_in_a_folder_and_says_so_on_one_line(
    process: Start, bus: Run, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(
        "from eventbus import subscribe\n@subscribe('orders.*', name='ledger')\ndef book(payload: dict): ...\n"
    )
    said = bus("queues")
    assert (said.code, len(said.err.splitlines())) == (0, 2), said.err
    assert said.err.startswith("eventbus: no EVENTBUS_DSN, so this is the embedded PostgreSQL 18 in .eventbus/\n")
    assert bus("migrate").out == "schema eventbus is up to date\n"
    published = bus("publish", "orders.created", "{}")
    assert bus("explain", published.out.strip()).code == 0
    consumed = process("consume", "shop", "--until-idle", dsn=None)
    assert "embedded PostgreSQL" in consumed.communicate(timeout=60)[1]
    assert consumed.returncode == 0
    [queue] = bus("queues", "--json").json["queues"]
    assert queue["waiting"] == 0
    assert queue["name"] == "ledger"


@pytest.mark.parametrize(
    "command",
    [
        ("dead-letters", "redrive", "--all"),
        ("dead-letters", "discard", "--all", "--yes"),
        ("replay", "receipts"),
        ("queues", "drop", "receipts", "--yes"),
        ("resume",),
    ],
    ids=" ".join,
)
def test_a_role_that_only_consumes_is_told_in_one_line_what_is_left_to_the_owner(
    bus: Run, conn: psycopg.Connection, new_role: Callable[..., tuple[str, str]], command: tuple[str, ...]
) -> None:
    conn.execute("""SELECT eventbus.declare_queues('[{"name": "receipts", "patterns": ["a"]}]')""")
    _, as_role = new_role(consuming_rights())
    bus(*command, "--dsn", as_role).refused(2, "permission denied", "run this as the owner of the schema")
