"""The doctor finds what is wrong, says what to do about it, and one check that fails hides nothing of the others."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from eventbus import cli
from eventbus.plugins import Finding, Migration, hookimpl
from eventbus.postgres import privileges
from tests.end_to_end.distributions import NONE
from tests.postgres.line import Line

pytestmark = [pytest.mark.usefixtures("major"), pytest.mark.parametrize("major", [18], indirect=True)]


class Findings:
    """What the doctor said."""

    def __init__(self, code: int, out: str) -> None:
        self.code = code
        self.report: dict[str, Any] = json.loads(out)

    @property
    def codes(self) -> set[str]:
        """The codes of what is not ok."""
        return {found["code"] for found in self.report["findings"] if found["level"] != "ok"}

    def of(self, code: str) -> dict[str, Any]:
        """The one finding with this code."""
        [found] = [found for found in self.report["findings"] if found["code"] == code]
        return dict(found)


class Doctor:
    """Calls the command and reads its JSON."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, **environment: str) -> Findings:
        for name, value in environment.items():
            self._monkeypatch.setenv(f"EVENTBUS_{name.upper()}", value)
        code = cli.main(["doctor", "--json"])
        return Findings(code, self._capsys.readouterr().out)

    def text(self, *arguments: str) -> str:
        """What it says to people."""
        cli.main(["doctor", *arguments])
        return self._capsys.readouterr().out


@pytest.fixture
def doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dsn: str, tmp_path: os.PathLike[str]
) -> Doctor:
    for name in [name for name in os.environ if name.startswith("EVENTBUS_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENTBUS_DSN", dsn)
    monkeypatch.setenv("EVENTBUS_PLUGINS", NONE)
    return Doctor(capsys, monkeypatch)


@pytest.fixture
def line(conn: psycopg.Connection) -> Line:
    """A bus with a live worker and one queue."""
    line = Line(conn)
    line.declare(ledger=["orders.#"])
    line.live()
    return line


@pytest.fixture
def stranger(conn: psycopg.Connection, dsn: str, run: str) -> Iterator[str]:
    """The DSN of a role that may read what was migrated and nothing else."""
    name = f"eventbus_test_{run}_stranger"
    conn.execute(f"CREATE ROLE {name} LOGIN".encode())
    conn.execute(f"GRANT USAGE ON SCHEMA eventbus TO {name}".encode())
    conn.execute(f"GRANT SELECT ON eventbus.migrations TO {name}".encode())
    yield make_conninfo(dsn, user=name)
    conn.execute(f"DROP OWNED BY {name}; DROP ROLE {name}".encode())


class Feverish:
    """Has a finding."""

    @hookimpl
    def eventbus_health(self, connection: psycopg.Connection, schema: str) -> Sequence[Finding]:
        [row] = connection.execute(f"SELECT count(*) FROM {schema}.queues".encode()).fetchall()
        return [Finding("degraded", "too_warm", f"{row[0]} queues are too warm", "open a window")]


class Unconscious:
    """Cannot be asked."""

    @hookimpl
    def eventbus_health(self) -> Sequence[Finding]:
        raise RuntimeError("no answer from postgresql://app:s3cret@db/shop")


class Tabled:
    """Has a table that nobody has made yet."""

    @hookimpl
    def eventbus_migrations(self) -> Sequence[Migration]:
        return [Migration("0001_notes", "-- Notes.\nCREATE TABLE {schema}.tabled_notes (n integer);")]


class Untabled:
    """Does not know its tables."""

    @hookimpl
    def eventbus_migrations(self) -> Sequence[Migration]:
        raise RuntimeError("no answer")


class Healthy:
    """Has nothing to say."""

    @hookimpl
    def eventbus_health(self) -> None:
        return None


def test_a_bus_on_which_all_is_fine_is_called_fine(doctor: Doctor, line: Line) -> None:
    found = doctor()
    assert (found.code, found.report["level"], found.codes) == (0, "ok", set())
    checks = [each["check"] for each in found.report["findings"]]
    assert checks == [
        "settings", "plugins", "server", "listen", "schema", "rights", "bus", "workers", "relay", "queues",
        "dead letters",
    ]  # fmt: skip


def test_without_a_worker_it_matters_whether_events_wait(doctor: Doctor, line: Line, conn: psycopg.Connection) -> None:
    conn.execute("DELETE FROM eventbus.workers")
    assert doctor().of("workers_none")["level"] == "degraded"
    line.publish()
    found = doctor()
    assert (found.code, found.of("workers_none")["level"]) == (1, "stalled")
    assert "eventbus consume" in found.of("workers_none")["hint"]


def test_a_worker_that_fell_silent_is_named(doctor: Doctor, line: Line, conn: psycopg.Connection) -> None:
    conn.execute("UPDATE eventbus.workers SET heartbeat_at = clock_timestamp() - interval '1 hour'")
    line.live(pid=43)
    found = doctor()
    assert found.codes == {"workers_silent"}
    assert "box:42" in found.of("workers_silent")["message"]


def test_a_paused_bus_is_stalled_and_told_how_to_go_on(doctor: Doctor, line: Line, conn: psycopg.Connection) -> None:
    conn.execute("UPDATE eventbus.bus SET state = 'paused', reason = 'restored'")
    found = doctor().of("bus_paused")
    assert (found["level"], found["message"], found["hint"]) == (
        "stalled", "the bus is paused: restored", "to go on: eventbus resume",
    )  # fmt: skip


def test_a_restored_copy_is_told_from_a_bus_that_runs(doctor: Doctor) -> None:
    assert "bus_foreign" in doctor().codes


def test_committed_events_that_nobody_relays_are_found(doctor: Doctor, line: Line, conn: psycopg.Connection) -> None:
    line.publish()
    assert doctor().codes == set()
    conn.execute("UPDATE eventbus.outbox SET published_at = clock_timestamp() - interval '1 hour'")
    assert "relay_late" in doctor().codes


def test_a_queue_on_which_nobody_works_is_found_and_a_busy_one_is_not(
    doctor: Doctor, line: Line, conn: psycopg.Connection
) -> None:
    line.publish()
    line.publish()
    line.relay()
    conn.execute("UPDATE eventbus.outbox SET published_at = clock_timestamp() - interval '1 hour'")
    found = doctor()
    assert found.codes == {"queue_unattended"}
    assert "ledger: 2 events wait" in found.of("queue_unattended")["message"]
    line.claim("ledger", 1)
    assert doctor().codes == set()


@pytest.mark.parametrize(
    ("source", "seconds", "said"),
    [
        ("manual", None, ": too hot; to go on: eventbus queues resume ledger"),
        ("circuit_breaker", 7_200.0, ": too hot; it goes on in 2 h"),
    ],
)
def test_a_paused_queue_is_told_with_who_paused_it_and_why(
    doctor: Doctor, line: Line, source: str, seconds: float | None, said: str
) -> None:
    line.one("SELECT eventbus.pause_queue(%s, %s, 'too hot', %s, NULL)", line.numbers["ledger"], source, seconds)
    found = doctor().of("queue_paused")
    assert (found["level"], found["message"].startswith("ledger is paused ")) == ("degraded", True)
    assert found["message"].endswith(said)
    assert (source in found["message"]) == (source != "manual")


def test_what_waits_in_a_paused_queue_has_no_second_finding(
    doctor: Doctor, line: Line, conn: psycopg.Connection
) -> None:
    line.publish()
    line.relay()
    conn.execute("UPDATE eventbus.outbox SET published_at = clock_timestamp() - interval '1 hour'")
    line.one("SELECT eventbus.pause_queue(%s, 'manual', 'too hot', NULL, NULL)", line.numbers["ledger"])
    assert doctor().codes == {"queue_paused"}


def test_dead_letters_that_wait_are_counted_by_queue(doctor: Doctor, line: Line) -> None:
    line.kill("ledger", 3)
    found = doctor()
    assert found.codes == {"dead_letters_wait"}
    assert found.of("dead_letters_wait")["message"] == "3 wait: ledger (3)"


def test_a_way_on_which_notifications_do_not_arrive_is_found(doctor: Doctor, line: Line, dsn: str, server: Any) -> None:
    elsewhere = make_conninfo(dsn, dbname="postgres")  # as deaf to this database as a pooler in transaction mode
    found = doctor(listen_dsn=elsewhere)
    assert found.codes == {"listen_deaf"}
    assert "EVENTBUS_LISTEN_DSN" in found.of("listen_deaf")["hint"]
    assert doctor(notify="false").codes == set()


def test_a_role_without_rights_is_told_which_to_ask_for(doctor: Doctor, line: Line, stranger: str) -> None:
    found = doctor(dsn=stranger).of("rights_missing")
    assert found["level"] == "stalled"
    assert 'GRANT INSERT (topic) ON TABLE "eventbus".outbox TO ' in found["hint"]


def test_a_role_that_only_publishes_is_degraded(
    doctor: Doctor, line: Line, stranger: str, conn: psycopg.Connection
) -> None:
    role = psycopg.conninfo.conninfo_to_dict(stranger)["user"]
    for grant in privileges.grants(privileges.PUBLISH, "eventbus", str(role)):
        conn.execute(grant.encode())
    found = doctor(dsn=stranger).of("rights_missing")
    assert found["level"] == "degraded"
    assert found["message"].endswith("may not consume")


def test_checks_that_a_role_may_not_make_fail_alone(doctor: Doctor, line: Line, stranger: str) -> None:
    found = doctor(dsn=stranger)
    failed = {each["check"] for each in found.report["findings"] if each["code"] == "check_failed"}
    assert {"bus", "workers", "relay", "queues"} <= failed
    assert found.of("server_ok")
    assert found.of("listen_ok")


def test_a_server_that_only_reads_is_found(doctor: Doctor, line: Line, dsn: str) -> None:
    found = doctor(dsn=make_conninfo(dsn, options="-c default_transaction_read_only=on"))
    assert found.of("server_read_only")["level"] == "stalled"


def test_a_server_that_cannot_be_reached_is_told_without_the_password(doctor: Doctor) -> None:
    found = doctor(dsn="postgresql://app:s3cret@127.0.0.1:1/shop")
    assert found.codes == {"server_unreachable"}
    assert "s3cret" not in json.dumps(found.report)


def test_a_missing_schema_is_told_and_what_needs_it_is_not_asked(doctor: Doctor, line: Line) -> None:
    found = doctor(schema="elsewhere")
    assert found.codes == {"schema_missing"}
    assert "eventbus migrate" in found.of("schema_missing")["message"]


def test_a_schema_of_another_version_is_told(doctor: Doctor, line: Line, conn: psycopg.Connection) -> None:
    conn.execute("INSERT INTO eventbus.migrations (name, digest) VALUES ('9999_future', 'x')")
    assert doctor().codes == {"schema_mismatch"}


def test_tables_of_a_plugin_that_are_not_there_yet_are_told(doctor: Doctor, line: Line) -> None:
    found = doctor(plugins=f"{__name__}:Tabled")
    assert found.codes == {"schema_mismatch"}
    assert "eventbus migrate" in found.of("schema_mismatch")["message"]


def test_a_plugin_whose_tables_cannot_be_told_hides_nothing(doctor: Doctor, line: Line) -> None:
    found = doctor(plugins=f"{__name__}:Untabled")
    assert found.codes == {"plugin_broken"}
    assert found.of("schema_ok")


def test_a_setting_that_cannot_work_is_a_finding(doctor: Doctor) -> None:
    found = doctor(lease="soon")
    assert (found.code, found.codes) == (1, {"settings_invalid"})
    assert "EVENTBUS_LEASE" in found.of("settings_invalid")["message"]


def test_a_broken_plugin_is_a_finding_and_the_rest_is_checked(doctor: Doctor, line: Line) -> None:
    found = doctor(plugins=f"nix,{__name__}:Feverish")
    assert found.codes == {"plugin_broken", "too_warm"}
    assert "unknown plugin nix" in found.of("plugin_broken")["message"]


@pytest.mark.hook("eventbus_health")
def test_what_plugins_find_is_part_of_it_and_one_that_fails_hides_nothing(doctor: Doctor, line: Line) -> None:
    found = doctor(plugins=",".join(f"{__name__}:{name}" for name in ("Unconscious", "Feverish", "Healthy")))
    warm, failed = found.of("too_warm"), found.of("check_failed")
    assert (found.code, found.report["level"]) == (1, "degraded")
    assert (warm["check"], warm["message"], warm["hint"]) == ("feverish", "1 queues are too warm", "open a window")
    assert (failed["check"], failed["level"]) == ("unconscious", "degraded")
    assert "no answer from postgresql://app:***@db/shop" in failed["message"]


def test_people_read_one_line_per_finding_and_the_hint_below(doctor: Doctor, line: Line) -> None:
    line.kill("ledger", 1)
    lines = doctor.text().splitlines()
    at = next(number for number, text in enumerate(lines) if "dead letters" in text)
    assert lines[at].split() == ["degraded", "dead", "letters", "1", "wait:", "ledger", "(1)"]
    assert lines[at + 1].strip().startswith("eventbus dead-letters")
    assert all(text.startswith(("ok ", "degraded ", "stalled ", "  ")) for text in lines)
