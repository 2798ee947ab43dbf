"""The schema arrives whole, once, under any name, whoever else is at it and whatever the role's settings are."""

from __future__ import annotations

import hashlib
import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import psycopg
import pytest
from psycopg import sql

from eventbus.errors import ConfigurationError, SchemaMismatch, SchemaMissing
from eventbus.event import OutboxEvent
from eventbus.plugins.values import Migration as PluginMigration
from eventbus.postgres import migrate as steps
from eventbus.postgres import privileges
from eventbus.postgres.admin import is_foreign, resume
from eventbus.postgres.migrate import Migration, migrate, migrations, pending, require_current, script
from eventbus.postgres.publishing import PublishStatements
from eventbus.publishing.outbox import Outbox
from eventbus.settings import load
from tests.servers import Server
from tests.waiting import wait_until

NAMES = [migration.name for migration in migrations("eventbus")]


@pytest.fixture
def empty(empty_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def new_role(empty: psycopg.Connection, empty_dsn: str) -> Iterator[Callable[[], tuple[str, str]]]:
    """Make roles without any right: name, and a DSN into the test's database."""
    made: list[str] = []

    def new() -> tuple[str, str]:
        name = f"eventbus_test_{uuid.uuid4().hex[:12]}"
        empty.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        made.append(name)
        return name, psycopg.conninfo.make_conninfo(empty_dsn, user=name)

    yield new
    for name in made:
        empty.execute(sql.SQL("DROP OWNED BY {0}").format(sql.Identifier(name)))
        empty.execute(sql.SQL("DROP ROLE {0}").format(sql.Identifier(name)))


@contextmanager
def only_first(count: int) -> Iterator[None]:
    """As if this code knew only the first steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "migrations", lambda schema, _=(): migrations(schema)[:count])
        yield


def ten_at_once(dsn: str, schema: str) -> list[str]:
    barrier = Barrier(10)

    def one(_: int) -> list[str]:
        barrier.wait(30)
        return migrate(dsn, schema)

    with ThreadPoolExecutor(10) as threads:
        return sorted(name for applied in threads.map(one, range(10)) for name in applied)


def objects(connection: psycopg.Connection, schema: str) -> set[str]:
    """Every table, index, sequence, function and trigger of a schema, with its definition."""
    found = connection.execute(
        """
        SELECT format('%%s %%s', c.relkind, c.relname) FROM pg_class c WHERE c.relnamespace = %(s)s::regnamespace
        UNION ALL
        SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.pronamespace = %(s)s::regnamespace
        UNION ALL
        SELECT pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
        WHERE c.relnamespace = %(s)s::regnamespace AND NOT t.tgisinternal
        """,
        {"s": f'"{schema}"'},
    )
    return {row[0] for row in found}


def publish_and_relay(connection: psycopg.Connection, schema: str) -> int:
    """One event through publish(), declare, resolve and tick; how many deliveries the queue got."""
    name = sql.Identifier(schema)
    one = json.dumps([{"name": "q", "patterns": ["#"]}])
    connection.execute(sql.SQL("SELECT {}.declare_queues(%s)").format(name), [one])
    connection.execute(sql.SQL("SELECT {}.publish('orders.created', '1')").format(name))
    connection.execute(
        sql.SQL(
            "SELECT {0}.resolve_topics(b.bindings_version, json_build_object('orders.created', json_build_array(q.id)))"
            " FROM {0}.bus b, {0}.queues q"
        ).format(name)
    )
    row = connection.execute(sql.SQL("SELECT deliveries FROM {}.tick(100)").format(name)).fetchone()
    assert row
    return int(row[0])


def test_an_empty_database_gets_every_step_in_order_and_a_second_run_does_nothing(empty_dsn: str) -> None:
    assert [step.name for step in pending(empty_dsn, "eventbus")] == NAMES
    assert migrate(empty_dsn, "eventbus") == NAMES
    assert migrate(empty_dsn, "eventbus") == []
    assert pending(empty_dsn, "eventbus") == []


def test_ten_processes_on_an_empty_database_apply_each_step_once_and_none_fails(empty_dsn: str) -> None:
    assert ten_at_once(empty_dsn, "eventbus") == NAMES


def test_ten_processes_one_version_behind_apply_the_last_step_once_and_none_fails(empty_dsn: str) -> None:
    with only_first(len(NAMES) - 1):
        migrate(empty_dsn, "eventbus")
    assert ten_at_once(empty_dsn, "eventbus") == NAMES[-1:]


@pytest.mark.parametrize("setting", ["transaction_isolation = 'serializable'", "transaction_read_only = on"])
def test_a_role_with_odd_transaction_defaults_can_migrate_beside_others(
    empty: psycopg.Connection, empty_dsn: str, new_role: Callable[[], tuple[str, str]], setting: str
) -> None:
    role, dsn = new_role()
    empty.execute(sql.SQL("ALTER ROLE {} SET default_{}").format(sql.Identifier(role), sql.SQL(setting)))
    empty.execute(sql.SQL("ALTER ROLE {} SET lock_timeout = '1ms'").format(sql.Identifier(role)))
    empty.execute(
        sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(sql.Identifier(empty.info.dbname), sql.Identifier(role))
    )
    assert ten_at_once(dsn, "eventbus") == NAMES


def test_two_buses_live_in_one_database_under_names_with_capitals_and_hyphens(
    empty: psycopg.Connection, empty_dsn: str
) -> None:
    empty.execute("DROP SCHEMA public CASCADE")
    for schema in ("evt", "Evt-2"):
        assert migrate(empty_dsn, schema) == NAMES
        require_current(empty, schema)
    assert publish_and_relay(empty, "evt") == 1
    assert publish_and_relay(empty, "Evt-2") == 1
    counts = empty.execute('SELECT (SELECT count(*) FROM evt.outbox), (SELECT count(*) FROM "Evt-2".outbox)')
    assert counts.fetchone() == (1, 1)


def test_a_hostile_search_path_changes_nothing(empty: psycopg.Connection, empty_dsn: str) -> None:
    empty.execute("CREATE SCHEMA evil")
    for signature in ("clock_timestamp() RETURNS timestamptz", "pg_current_xact_id() RETURNS xid8"):
        empty.execute(
            f"CREATE FUNCTION evil.{signature} LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil was called'; END $$".encode()
        )
    empty.execute("CREATE TABLE evil.outbox (); CREATE TABLE evil.migrations (name text); CREATE TABLE evil.queues ()")
    hostile = psycopg.conninfo.make_conninfo(empty_dsn, options="-c search_path=evil,pg_catalog")
    assert migrate(hostile, "eventbus") == NAMES
    assert pending(hostile, "eventbus") == []
    with psycopg.connect(hostile, autocommit=True) as connection:
        require_current(connection, "eventbus")
        assert publish_and_relay(connection, "eventbus") == 1


def test_a_step_that_fails_leaves_nothing_of_itself_and_the_steps_before_it(
    empty: psycopg.Connection, empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrations("eventbus")
    broken = Migration("9999_broken", "CREATE TABLE {schema}.half_done (); SELECT 1/0;", "eventbus")
    monkeypatch.setattr(steps, "migrations", lambda schema, _=(): [*known, broken])
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(empty_dsn, "eventbus")
    assert [step.name for step in pending(empty_dsn, "eventbus")] == ["9999_broken"]
    assert empty.execute("SELECT to_regclass('eventbus.half_done')").fetchone() == (None,)


def test_a_first_step_that_fails_leaves_not_even_the_schema(
    empty: psycopg.Connection, empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "migrations", lambda schema, _=(): [Migration("0001_broken", "SELECT 1/0;", schema)])
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(empty_dsn, "eventbus")
    assert empty.execute("SELECT to_regnamespace('eventbus')").fetchone() == (None,)


def test_a_database_without_the_bus_says_what_to_run(empty: psycopg.Connection) -> None:
    with pytest.raises(SchemaMissing, match="run: eventbus migrate"):
        require_current(empty, "eventbus")
    empty.execute("CREATE SCHEMA eventbus")
    with pytest.raises(SchemaMissing, match="run: eventbus migrate"):
        require_current(empty, "eventbus")


def test_an_older_schema_says_to_upgrade_the_schema(empty: psycopg.Connection, empty_dsn: str) -> None:
    with only_first(len(NAMES) - 1):
        migrate(empty_dsn, "eventbus")
    with pytest.raises(SchemaMismatch, match=f"{NAMES[-1]} missing.*upgrade the schema: eventbus migrate"):
        require_current(empty, "eventbus")


def test_a_newer_schema_says_to_upgrade_the_installation_and_is_left_alone(
    empty: psycopg.Connection, empty_dsn: str
) -> None:
    migrate(empty_dsn, "eventbus")
    empty.execute("INSERT INTO eventbus.migrations (name, digest) VALUES ('9999_later', '')")
    with pytest.raises(SchemaMismatch, match=r"9999_later unknown here.*upgrade this installation"):
        require_current(empty, "eventbus")
    with only_first(len(NAMES) - 1), pytest.raises(SchemaMismatch, match="upgrade this installation"):
        migrate(empty_dsn, "eventbus")


OTHER_CODE = [
    pytest.param("UPDATE eventbus.migrations SET digest = repeat('0', 64) WHERE name = '0002_publish'", id="changed"),
    pytest.param("UPDATE eventbus.migrations SET digest = '' WHERE name = '0002_publish'", id="empty"),
    pytest.param("ALTER TABLE eventbus.migrations DROP COLUMN digest", id="from before digests"),
    pytest.param(
        "UPDATE eventbus.migrations SET digest = 'x' WHERE name = '0002_publish';"
        "INSERT INTO eventbus.migrations (name, digest) VALUES ('0005_renamed', 'x')",
        id="a step renamed since",
    ),
]


@pytest.mark.parametrize("how", OTHER_CODE)
def test_a_schema_of_another_development_version_is_refused_before_it_fails_in_odd_ways(
    empty: psycopg.Connection, empty_dsn: str, how: str
) -> None:
    migrate(empty_dsn, "eventbus")
    empty.execute(how.encode())
    before = objects(empty, "eventbus")
    refused = r"another development version.*0002_publish.*drop the schema and run eventbus migrate"
    with pytest.raises(SchemaMismatch, match=refused) as error:
        require_current(empty, "eventbus")
    assert "\n" not in str(error.value)
    with pytest.raises(SchemaMismatch, match=refused):
        migrate(empty_dsn, "eventbus")
    with pytest.raises(SchemaMismatch, match=refused):
        pending(empty_dsn, "eventbus")
    with only_first(1), pytest.raises(SchemaMismatch):
        migrate(empty_dsn, "eventbus")
    assert objects(empty, "eventbus") == before


def step(plugin: str, name: str, text: str = "SELECT 1;") -> tuple[str, PluginMigration]:
    return plugin, PluginMigration(name, f"-- For a test.\n{text}")


FIRST, SECOND, OTHER = (
    step("m", "0001_a", "CREATE TABLE {schema}.m_a (a int);"),
    step("m", "0002_b"),
    step("n", "0001_n"),
)


def refusal(error: type[ConfigurationError], function: Callable[..., Any], *arguments: Any) -> str:
    """What a function says when it refuses, on one line."""
    with pytest.raises(error) as refused:
        function(*arguments)
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_a_changed_step_of_a_plugin_is_its_own_and_nobody_is_told_to_drop_the_bus(
    server: Server, empty: psycopg.Connection, empty_dsn: str, tmp_path: Path
) -> None:
    migrate(empty_dsn, "By-hand", [FIRST])
    changed = step("m", "0001_a", "CREATE TABLE {schema}.m_a (a bigint);")
    said = refusal(SchemaMismatch, require_current, empty, "By-hand", [changed])
    assert "plugin m has changed a step" in said
    assert "0001_a" in said
    assert "drop the schema" not in said
    assert "eventbus (not" not in said
    for function in (migrate, pending):
        assert refusal(SchemaMismatch, function, empty_dsn, "By-hand", [changed]) == said
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        run_script(server, empty_dsn, tmp_path, script("By-hand", [changed]))
    assert said.encode() in stopped.value.stderr, "in quotes that SQL understands"
    empty.execute('DROP TABLE "By-hand".m_a')
    empty.execute(said.partition("after: ")[2].encode())
    assert migrate(empty_dsn, "By-hand", [changed]) == ["m/0001_a"], "what it says does not help"


def test_a_plugin_that_is_older_than_its_tables_is_the_one_to_upgrade(
    empty: psycopg.Connection, empty_dsn: str
) -> None:
    migrate(empty_dsn, "eventbus", [FIRST, SECOND, OTHER])
    for function, connected in ((require_current, empty), (migrate, empty_dsn)):
        said = refusal(SchemaMismatch, function, connected, "eventbus", [FIRST, OTHER])
        assert "plugin m is older than its tables" in said
        assert "(0002_b unknown here): upgrade the plugin" in said
        assert "newer eventbus" not in said
    require_current(empty, "eventbus", [OTHER])


def test_tables_of_plugins_that_are_missing_do_not_make_the_bus_old(empty: psycopg.Connection, empty_dsn: str) -> None:
    migrate(empty_dsn, "eventbus")
    said = refusal(SchemaMismatch, require_current, empty, "eventbus", [FIRST, SECOND])
    assert said == "the tables of plugin m are missing; run: eventbus migrate"
    migrate(empty_dsn, "eventbus", [FIRST])
    said = refusal(SchemaMismatch, require_current, empty, "eventbus", [FIRST, SECOND, OTHER])
    assert said == (
        "the tables of plugin m are older than the plugin (0002_b missing), the tables of plugin n are missing; "
        "run: eventbus migrate"
    )


def test_what_is_wrong_with_the_bus_itself_is_told_before_what_is_wrong_with_plugins(
    empty: psycopg.Connection, empty_dsn: str
) -> None:
    with only_first(len(NAMES) - 1):
        migrate(empty_dsn, "eventbus")
    said = refusal(SchemaMismatch, require_current, empty, "eventbus", [FIRST])
    assert f"older than this eventbus ({NAMES[-1]} missing)" in said
    migrate(empty_dsn, "eventbus", [FIRST])
    empty.execute("UPDATE eventbus.migrations SET digest = 'x' WHERE name IN ('m/0001_a', '0002_publish')")
    said = refusal(SchemaMismatch, require_current, empty, "eventbus", [FIRST])
    assert "(not the same: 0002_publish)" in said
    empty.execute("INSERT INTO eventbus.migrations (name, digest) VALUES ('9999_later', ''), ('m/0002_b', '')")
    empty.execute("DELETE FROM eventbus.migrations WHERE digest = 'x'")
    said = refusal(SchemaMismatch, require_current, empty, "eventbus", [FIRST])
    assert "newer eventbus (9999_later unknown here)" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SELECT 1;\nCREAT TABLE m (a int);", 'syntax error at or near "CREAT" (line 3)'),
        ("CREATE TABLE {schema}.queues (a int);", 'relation "queues" already exists'),
        ("SELECT 1/0;", "division by zero"),
    ],
    ids=["syntax", "a table in the way", "data"],
)
def test_a_step_of_a_plugin_that_fails_names_the_plugin_and_the_step(
    empty: psycopg.Connection, empty_dsn: str, text: str, words: str
) -> None:
    said = refusal(ConfigurationError, migrate, empty_dsn, "eventbus", [FIRST, step("m", "0002_b", text)])
    assert said.startswith("plugin m: its step 0002_b was not applied: ")
    assert words in said
    assert "a schema of its own" not in said
    assert [each.name for each in pending(empty_dsn, "eventbus", [FIRST, SECOND])] == ["m/0002_b"]


def test_a_step_that_other_code_applied_meanwhile_is_not_taken_for_ours(
    empty: psycopg.Connection, empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(empty_dsn, "eventbus")
    mine = Migration("9999_mine", "SELECT 1;", "eventbus")
    known = migrations("eventbus")
    monkeypatch.setattr(steps, "migrations", lambda schema, _=(): [*known, mine])
    locked = "SELECT pg_advisory_xact_lock(hashtextextended('eventbus migrate eventbus', 0))"
    with psycopg.connect(empty_dsn) as other, ThreadPoolExecutor(1) as thread:
        other.execute(locked.encode())
        other.execute("INSERT INTO eventbus.migrations (name, digest) VALUES ('9999_mine', 'theirs')")
        applying = thread.submit(migrate, empty_dsn, "eventbus")
        wait_until(lambda: waits_for_a_lock(empty))
        other.commit()
        with pytest.raises(SchemaMismatch, match="9999_mine"):
            applying.result(10)


def waits_for_a_lock(connection: psycopg.Connection) -> bool:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return connection.execute(waiting.encode()).fetchone() == (1,)


def test_the_digest_of_a_step_is_that_of_its_file_whatever_the_schema_is_called() -> None:
    for one, other in zip(migrations("one"), migrations("other"), strict=True):
        file = Path(steps.__file__).parent / "migrations" / f"{one.name}.sql"
        assert one.digest == other.digest == hashlib.sha256(file.read_bytes()).hexdigest()
        assert one.text != other.text


def test_a_table_of_somebody_else_in_the_way_is_named_and_kept(empty: psycopg.Connection, empty_dsn: str) -> None:
    empty.execute("CREATE TABLE public.queues (mine int)")
    with pytest.raises(ConfigurationError, match=r"queues.*a schema of its own"):
        migrate(empty_dsn, "public")
    assert empty.execute("SELECT mine FROM public.queues").fetchall() == []
    empty.execute("CREATE TABLE public.migrations (app text)")
    with pytest.raises(ConfigurationError, match=r"migrations.*a schema of its own"):
        pending(empty_dsn, "public")


def test_the_script_for_a_dba_makes_the_same_schema_and_records_itself(
    server: Server, empty: psycopg.Connection, empty_dsn: str, tmp_path: Path
) -> None:
    run_script(server, empty_dsn, tmp_path, script("By-hand"))
    require_current(empty, "By-hand")
    migrate(empty_dsn, "By-code")
    assert {text.replace("By-hand", "By-code") for text in objects(empty, "By-hand")} == objects(empty, "By-code")
    run_script(server, empty_dsn, tmp_path, script("By-hand"))
    assert migrate(empty_dsn, "By-hand") == []


def test_the_script_for_a_dba_upgrades_an_older_schema(
    server: Server, empty: psycopg.Connection, empty_dsn: str, tmp_path: Path
) -> None:
    with only_first(2):
        migrate(empty_dsn, "eventbus")
    run_script(server, empty_dsn, tmp_path, script("eventbus"))
    require_current(empty, "eventbus")


def test_the_script_for_a_dba_stops_at_an_error_and_keeps_whole_steps(
    server: Server, empty: psycopg.Connection, empty_dsn: str, tmp_path: Path
) -> None:
    with only_first(2):
        migrate(empty_dsn, "eventbus")
    empty.execute("CREATE FUNCTION eventbus.next_due(timestamptz) RETURNS int LANGUAGE sql AS 'SELECT 1'")
    with pytest.raises(subprocess.CalledProcessError):
        run_script(server, empty_dsn, tmp_path, script("eventbus"))
    assert [step.name for step in pending(empty_dsn, "eventbus")] == NAMES[2:]
    assert empty.execute("SELECT to_regproc('eventbus.tick')").fetchone() == (None,)


def test_the_script_for_a_dba_stops_at_a_schema_of_another_development_version(
    server: Server, empty: psycopg.Connection, empty_dsn: str, tmp_path: Path
) -> None:
    with only_first(2):
        migrate(empty_dsn, "eventbus")
    empty.execute("UPDATE eventbus.migrations SET digest = '0' WHERE name = '0002_publish'")
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        run_script(server, empty_dsn, tmp_path, script("eventbus"))
    assert b"another development version" in stopped.value.stderr
    assert empty.execute("SELECT count(*) FROM eventbus.migrations").fetchone() == (2,)
    empty.execute("ALTER TABLE eventbus.migrations DROP COLUMN digest")
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        run_script(server, empty_dsn, tmp_path, script("eventbus"))
    assert b"not the same: 0001_tables" in stopped.value.stderr


def run_script(server: Server, dsn: str, folder: Path, text: str) -> None:
    if server.programs is None:
        pytest.skip("no psql of this server's version")
    file = folder / "eventbus.sql"
    file.write_text(text)
    subprocess.run([server.programs.path("psql"), "-X", "-q", "-f", file, dsn], check=True, capture_output=True)


def test_a_role_that_may_not_create_is_told_the_exact_grant(
    empty: psycopg.Connection, empty_dsn: str, new_role: Callable[[], tuple[str, str]]
) -> None:
    role, dsn = new_role()
    database = empty.info.dbname
    with pytest.raises(ConfigurationError, match=f'GRANT CREATE ON DATABASE "{database}" TO "{role}"'):
        migrate(dsn, "eventbus")
    assert [step.name for step in pending(dsn, "eventbus")] == NAMES
    empty.execute("CREATE SCHEMA eventbus")
    with pytest.raises(ConfigurationError, match=f'GRANT USAGE, CREATE ON SCHEMA "eventbus" TO "{role}"'):
        migrate(dsn, "eventbus")
    empty.execute(sql.SQL("GRANT USAGE, CREATE ON SCHEMA eventbus TO {}").format(sql.Identifier(role)))
    assert migrate(dsn, "eventbus") == NAMES


def test_a_role_that_does_not_own_the_tables_is_told_who_does(
    empty: psycopg.Connection,
    empty_dsn: str,
    new_role: Callable[[], tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    migrate(empty_dsn, "eventbus")
    known = migrations("eventbus")
    altering = Migration("9999_alter", "ALTER TABLE {schema}.outbox ADD COLUMN extra int;", "eventbus")
    monkeypatch.setattr(steps, "migrations", lambda schema, _=(): [*known, altering])
    role, dsn = new_role()
    for right in ("USAGE, CREATE ON SCHEMA eventbus", "SELECT ON eventbus.migrations"):
        empty.execute(sql.SQL("GRANT {} TO {}").format(sql.SQL(right), sql.Identifier(role)))
    owner = empty.info.user
    with pytest.raises(ConfigurationError, match=f'9999_alter was not applied.*run it as the owner "{owner}"'):
        migrate(dsn, "eventbus")


def test_a_role_without_rights_on_a_current_schema_is_told_the_exact_grants(
    empty: psycopg.Connection, empty_dsn: str, new_role: Callable[[], tuple[str, str]]
) -> None:
    migrate(empty_dsn, "eventbus")
    role, dsn = new_role()
    with psycopg.connect(dsn, autocommit=True) as connection:
        for right in ('USAGE ON SCHEMA "eventbus"', 'SELECT ON "eventbus".migrations'):
            with pytest.raises(ConfigurationError, match=f'GRANT {right} TO "{role}"'):
                require_current(connection, "eventbus")
            empty.execute(f'GRANT {right} TO "{role}"'.encode())
        require_current(connection, "eventbus")
    assert migrate(dsn, "eventbus") == [], "a plain role may find out that nothing is missing"


def test_a_role_with_the_documented_grants_publishes_and_can_do_nothing_else(
    empty: psycopg.Connection, empty_dsn: str, new_role: Callable[[], tuple[str, str]]
) -> None:
    migrate(empty_dsn, "eventbus")
    role, dsn = new_role()
    for grant in privileges.grants(privileges.PUBLISH, "eventbus", role):
        empty.execute(grant.encode())
    with psycopg.connect(dsn, autocommit=True) as connection:
        assert privileges.missing(connection, "eventbus", privileges.PUBLISH) == []
        connection.execute(
            "INSERT INTO eventbus.outbox (event_id, topic, key, payload, headers, priority, size)"
            " VALUES (gen_random_uuid(), 'orders.created', 'k', '{}', '{}', 9, 2)"
        )
        connection.execute("SELECT eventbus.publish('orders.created', '1', priority => 3)")
        delayed = "SELECT eventbus.publish('orders.created', '1', delay => '1 hour')"
        connection.execute(delayed.encode())
        assert connection.execute(f"SELECT eventbus.cancel(({delayed}))".encode()).fetchone() == (True,)
        publish_and_cancel(connection)
        for forbidden in (
            "INSERT INTO eventbus.outbox (xid, topic, payload, size) VALUES ('3', 'a', '1', 1)",
            "INSERT INTO eventbus.scheduled (due_at, created_at, topic, payload) VALUES (now(), now(), 'a', '1')",
            "SELECT payload FROM eventbus.outbox",
            "SELECT payload FROM eventbus.scheduled",
            "UPDATE eventbus.scheduled SET due_at = now()",
            "DELETE FROM eventbus.outbox",
            "CREATE TABLE eventbus.mine ()",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(forbidden.encode())
    counts = empty.execute("SELECT (SELECT count(*) FROM eventbus.outbox), (SELECT count(*) FROM eventbus.scheduled)")
    assert counts.fetchone() == (2, 2)


def publish_and_cancel(connection: psycopg.Connection) -> None:
    """The same through the library."""
    outbox = Outbox(PublishStatements("eventbus"), load({}, environment={}))
    with connection.transaction():
        late = outbox.publish_event("orders.created", 1, delay=60, priority=9, conn=connection)
        outbox.publish_events([OutboxEvent("orders.created", 1, delay=60)], conn=connection)
        assert outbox.cancel_event(late, conn=connection)
        connection.execute("SAVEPOINT before")
        outbox.publish_event("orders.created", 1, conn=connection)
        connection.execute("ROLLBACK TO before")


def consume_one(connection: psycopg.Connection, outcome: str) -> None:
    """Relay, claim and settle one event by the engine's functions, and everything else that a worker calls."""
    assert publish_and_relay_due(connection) == 1
    worker = uuid.uuid4()
    connection.execute("SELECT eventbus.register_worker(%s, 'host', 1)", [worker])
    connection.execute("SELECT eventbus.beat(%s, 30, 0, '{}')", [worker])
    token = uuid.uuid4()
    claimed = connection.execute(
        "SELECT claim_id, queue_id, seq FROM eventbus.claim(%s, %s,"
        " ARRAY(SELECT id FROM eventbus.queues), ARRAY[10], 1000000)",
        [worker, token],
    ).fetchall()
    [(claim_id, queue_id, seq)] = claimed
    outcomes = json.dumps([{"claim": claim_id, "outcomes": [{"seq": seq, "outcome": outcome, "reason": "no"}]}])
    assert connection.execute("SELECT eventbus.record_progress(%s, %s, '{}', '[]')", [claim_id, token]).fetchone()
    settled = connection.execute("SELECT eventbus.settle(%s, %s, %s)", [[claim_id], [token], outcomes]).fetchall()
    assert settled == [(claim_id,)]
    if outcome == "retry":
        [(exception_id,)] = connection.execute(
            "SELECT exception_id FROM eventbus.claim_due(%s, %s, %s, ARRAY[10], ARRAY['-infinity'::timestamptz],"
            " 1000000, false) WHERE exception_id IS NOT NULL",
            [worker, token, [queue_id]],
        ).fetchall()
        done = json.dumps([{"id": exception_id, "outcome": "done"}])
        assert connection.execute(
            "SELECT eventbus.settle_exceptions(%s, %s, %s)", [[exception_id], [token], done]
        ).fetchall() == [(exception_id,)]
    connection.execute("SELECT eventbus.take_over(%s, 30, 3)", [worker])
    connection.execute("SELECT eventbus.release_unknown(%s, '{}', '{}')", [worker])
    connection.execute("SELECT eventbus.fall_asleep(5)")
    connection.execute("SELECT eventbus.unregister_worker(%s)", [worker])


def publish_and_relay_due(connection: psycopg.Connection) -> int:
    connection.execute("SELECT eventbus.fire_due(10, '-infinity')")
    first: dict[str, Any] = {"name": "worker-queue", "patterns": ["orders.*", "x"], "kind": "ordered"}
    second = {"name": "worker-queue", "patterns": ["orders.*"], "tracking": "idempotent", "when_exhausted": "skip"}
    for queue in (first, first | {"kind": "plain"}, second):
        connection.execute("SELECT eventbus.declare_queues(%s)", [json.dumps([queue])])
    connection.execute(
        "SELECT eventbus.resolve_topics(b.bindings_version, json_build_object('orders.created',"
        " json_build_array(q.id))) FROM eventbus.bus b, eventbus.queues q"
    )
    row = connection.execute("SELECT deliveries FROM eventbus.tick(100)").fetchone()
    assert row
    return int(row[0])


@pytest.mark.parametrize("outcome", ["done", "retry", "dead"])
def test_a_role_with_the_documented_grants_consumes_and_can_change_nothing_else(
    empty: psycopg.Connection, empty_dsn: str, new_role: Callable[[], tuple[str, str]], outcome: str
) -> None:
    migrate(empty_dsn, "eventbus")
    role, dsn = new_role()
    for grant in privileges.grants(privileges.CONSUME, "eventbus", role):
        empty.execute(grant.encode())
    empty.execute("SELECT eventbus.publish('orders.created', '1', delay => '0')")
    with psycopg.connect(dsn, autocommit=True) as connection:
        require_current(connection, "eventbus")
        privileges.require(connection, "eventbus", privileges.CONSUME)
        consume_one(connection, outcome)
        for forbidden in ("UPDATE eventbus.outbox SET topic = 'a'", "DELETE FROM eventbus.deliveries"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(forbidden.encode())
    dead = empty.execute("SELECT count(*) FROM eventbus.dead_letters").fetchone()
    assert dead == (1 if outcome == "dead" else 0,)


def test_a_consumer_with_the_rights_to_attach_takes_over_a_restored_database(
    empty: psycopg.Connection, empty_dsn: str, new_role: Callable[[], tuple[str, str]]
) -> None:
    migrate(empty_dsn, "eventbus")
    role, dsn = new_role()
    for grant in privileges.grants((*privileges.CONSUME, *privileges.ATTACH), "eventbus", role):
        empty.execute(grant.encode())
    empty.execute("UPDATE eventbus.ticks SET system_identifier = 1")
    with psycopg.connect(dsn, autocommit=True) as connection:
        assert privileges.missing(connection, "eventbus", privileges.ATTACH) == []
        assert resume(connection, "eventbus")
        assert not is_foreign(connection, "eventbus")


@pytest.mark.parametrize("needs", [privileges.PUBLISH, privileges.CONSUME], ids=["publish", "consume"])
def test_every_right_that_is_taken_away_is_named_before_anything_starts(
    empty: psycopg.Connection,
    empty_dsn: str,
    new_role: Callable[[], tuple[str, str]],
    needs: tuple[privileges.Right, ...],
) -> None:
    migrate(empty_dsn, "eventbus")
    role, dsn = new_role()
    for grant in privileges.grants(needs, "eventbus", role):
        empty.execute(grant.encode())
    with psycopg.connect(dsn, autocommit=True) as connection:
        for right in [name for part in needs for *_, name in part.parts("eventbus")]:
            empty.execute(f'REVOKE {right} FROM "{role}"'.encode())
            assert privileges.missing(connection, "eventbus", needs) == [right]
            with pytest.raises(ConfigurationError) as refused:
                privileges.require(connection, "eventbus", needs)
            assert f'GRANT {right} TO "{role}"' in str(refused.value)
            empty.execute(f'GRANT {right} TO "{role}"'.encode())
