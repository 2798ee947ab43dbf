"""Installs and upgrades the bus's schema: numbered ``.sql`` files, one transaction each.

Ten processes may migrate at once: each step takes a transaction-scoped advisory lock and looks again under it. A step
that fails leaves nothing of itself. When nothing is missing, nothing is written and no right to write is needed.

Each step is recorded with the digest of its text: until the first release steps are changed in place, and a schema that
was made by another text is refused instead of being worked with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from typing import Final

import psycopg
from psycopg.rows import class_row

from eventbus.errors import ConfigurationError, SchemaMismatch, SchemaMissing
from eventbus.plugins.values import Migration as PluginMigration
from eventbus.postgres import mismatches
from eventbus.postgres.statements import Statements, render

_OR_SQL: Final = "; or let a DBA run the output of: eventbus migrate --sql"


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema: its name (``0001_tables``), the text of its file, and the schema that it is for."""

    name: str
    template: str
    schema: str

    @property
    def text(self) -> str:
        """The step with the schema's name filled in."""
        return render(self.template, self.schema)

    @property
    def digest(self) -> str:
        """SHA-256 of the text of the file, in hexadecimal digits; the same for every schema."""
        return sha256(self.template.encode()).hexdigest()

    @property
    def purpose(self) -> str:
        """What the step is for: the first line of the file."""
        return self.template.partition("\n")[0].removeprefix("--").strip()


@dataclass(frozen=True, slots=True)
class Situation:
    """Who a connection is, what of the schema is there, and which rights the role has on it."""

    role: str
    database: str
    may_create_schema: bool
    schema_exists: bool
    owner: str
    may_use: bool
    may_create: bool
    installed: bool
    may_read: bool


Steps = Sequence[tuple[str, PluginMigration]]
"""Steps of plugins, each with the name of its plugin: :meth:`eventbus.plugins.registry.Plugins.migrations`."""


def migrations(schema: str, steps: Steps = ()) -> list[Migration]:
    """Every step that this code knows, in order, written for ``schema``, and after them those of plugins."""
    folder = resources.files("eventbus.postgres") / "migrations"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    texts = {file.name.removesuffix(".sql"): file.read_text(encoding="utf-8") for file in files}
    own = [Migration(name, text, schema) for name, text in texts.items()]
    return own + [Migration(f"{plugin}/{step.name}", step.sql, schema) for plugin, step in steps]


def migrate(dsn: str, schema: str, steps: Steps = ()) -> list[str]:
    """Apply what is missing; returns the names that this call applied. Each is atomic; a crash leaves whole steps.

    Raises :class:`~eventbus.errors.SchemaMismatch` when the schema is newer than this code or was made by another text
    of it, and :class:`~eventbus.errors.ConfigurationError` naming the right that the role lacks.
    """
    with _connect(dsn) as connection:
        missing = _missing(connection, schema, steps)
        if missing:
            _require_rights(_situation(connection, schema), schema)
        return [migration.name for migration in missing if _apply(connection, migration, schema, steps)]


def pending(dsn: str, schema: str, steps: Steps = ()) -> list[Migration]:
    """What :func:`migrate` would apply, in order. Raises what it would raise, but asks for no right to write."""
    with _connect(dsn) as connection:
        return _missing(connection, schema, steps)


def require_current(connection: psycopg.Connection, schema: str, steps: Steps = ()) -> None:
    """Return if the schema is what this code works with; raises one clear line otherwise.

    :class:`~eventbus.errors.SchemaMissing`, :class:`~eventbus.errors.SchemaMismatch` (it says which side to upgrade),
    or :class:`~eventbus.errors.ConfigurationError` when the role may not look.
    """
    situation = _situation(connection, schema)
    if not situation.installed:
        raise SchemaMissing(
            f'the bus has no schema "{schema}" in database "{situation.database}"; run: eventbus migrate'
        )
    applied = _applied(connection, situation, schema)
    missing = outstanding(applied, schema, steps)
    if missing:
        raise SchemaMismatch(mismatches.missing([migration.name for migration in missing], applied, schema))


def outstanding(applied: Mapping[str, str | None], schema: str, steps: Steps = ()) -> list[Migration]:
    """The steps that are not among ``applied``, which maps names to digests.

    Steps of plugins that are not used here are ignored. :class:`SchemaMismatch` if the schema is newer than this code,
    or if a step there had another text; it says whether that is the bus or which plugin.
    """
    known = migrations(schema, steps)
    here = {plugin for plugin, _ in steps}
    changed = [migration for migration in known if applied.get(migration.name, migration.digest) != migration.digest]
    if changed:
        raise SchemaMismatch(mismatches.changed([migration.name for migration in changed], schema))
    ours = {name for name in applied if "/" not in name or name.partition("/")[0] in here}
    unknown = sorted(ours - {migration.name for migration in known})
    if unknown:
        raise SchemaMismatch(mismatches.unknown(unknown, schema))
    return [migration for migration in known if migration.name not in applied]


@contextmanager
def _connect(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        connection.read_only = False
        yield connection


def _situation(connection: psycopg.Connection, schema: str) -> Situation:
    with connection.cursor(row_factory=class_row(Situation)) as cursor:
        situation = cursor.execute(Statements("migrate", schema)["situation"]).fetchone()
    assert situation is not None
    return situation


def _applied(connection: psycopg.Connection, situation: Situation, schema: str) -> dict[str, str | None]:
    if not situation.installed:
        return {}
    if not situation.may_use:
        raise ConfigurationError(_lacks(situation, f'USAGE ON SCHEMA "{schema}"'))
    if not situation.may_read:
        raise ConfigurationError(_lacks(situation, f'SELECT ON "{schema}".migrations'))
    try:
        return _recorded(connection, Statements("migrate", schema))
    except psycopg.errors.UndefinedColumn:
        raise ConfigurationError(_taken(f'"{schema}".migrations')) from None


def _recorded(connection: psycopg.Connection, statements: Statements) -> dict[str, str | None]:
    return dict(connection.execute(statements["applied"]).fetchall())


def _missing(connection: psycopg.Connection, schema: str, steps: Steps) -> list[Migration]:
    with connection.transaction():
        connection.execute(Statements("migrate", schema)["settings"])
        return outstanding(_applied(connection, _situation(connection, schema), schema), schema, steps)


def _require_rights(situation: Situation, schema: str) -> None:
    if not situation.schema_exists and not situation.may_create_schema:
        raise ConfigurationError(_lacks(situation, f'CREATE ON DATABASE "{situation.database}"') + _OR_SQL)
    if situation.schema_exists and not (situation.may_create and situation.may_use):
        raise ConfigurationError(_lacks(situation, f'USAGE, CREATE ON SCHEMA "{schema}"') + _OR_SQL)


def _apply(connection: psycopg.Connection, migration: Migration, schema: str, steps: Steps) -> bool:
    statements = Statements("migrate", schema)
    try:
        with connection.transaction():
            connection.execute(statements["settings"])
            connection.execute(statements["lock"])
            if not _situation(connection, schema).schema_exists:
                connection.execute(statements["create_schema"])
            connection.execute(statements["create_table"])
            if migration not in outstanding(_recorded(connection, statements), schema, steps):
                return False
            _execute(connection, migration)
            connection.execute(_record(migration, schema).encode())
    except psycopg.errors.InsufficientPrivilege as error:
        owner = _situation(connection, schema).owner
        raise ConfigurationError(
            f'{migration.name} was not applied: {error.diag.message_primary}; run it as the owner "{owner}"{_OR_SQL}'
        ) from error
    except (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateFunction) as error:
        raise ConfigurationError(_taken(str(error.diag.message_primary))) from error
    return True


def _execute(connection: psycopg.Connection, migration: Migration) -> None:
    plugin, _, step = migration.name.rpartition("/")
    try:
        connection.execute(migration.text.encode())
    except (psycopg.OperationalError, psycopg.errors.InsufficientPrivilege):
        raise
    except psycopg.Error as error:
        if not plugin:
            raise
        position = error.diag.statement_position
        where = "" if position is None else f" (line {migration.text.count(chr(10), 0, int(position) - 1) + 1})"
        raise ConfigurationError(
            f"plugin {plugin}: its step {step} was not applied: {error.diag.message_primary or error}{where}; "
            "correct the step, or remove what is in its way"
        ) from error


def _record(migration: Migration, schema: str) -> str:
    values = f"('{migration.name}', '{migration.digest}')"
    return render(f"INSERT INTO {{schema}}.migrations (name, digest) VALUES {values};", schema)  # noqa: S608 - ours


def script(schema: str, steps: Steps = ()) -> str:
    """Every step as one script for psql, for a DBA to read and run; applied steps are skipped, each is atomic."""
    statements = Statements("migrate", schema)
    head = (
        f'-- Installs or upgrades the schema "{schema}" of eventbus. For psql 14 or newer: psql --file=THIS_FILE\n'
        "-- Each step is one transaction; steps that were applied before are skipped.\n"
        "\\set ON_ERROR_STOP on\n"
    )
    return head + "".join(_script_of(migration, statements, schema) for migration in migrations(schema, steps))


def _script_of(migration: Migration, statements: Statements, schema: str) -> str:
    applied = f"FROM ({statements.text('applied')}) AS a WHERE a.name = '{migration.name}'"
    changed = f"count(*) > 0 AND coalesce(max(a.digest), '') <> '{migration.digest}'"
    message = mismatches.changed([migration.name], schema).replace("'", "''")
    refusal = f"DO $do$ BEGIN RAISE EXCEPTION USING MESSAGE = '{message}'; END $do$;"
    return "\n".join(
        (
            f"\n\\echo {migration.name}",
            statements.text("begin"),
            statements.text("settings"),
            f"{statements.text('lock')} AS locked \\gset",
            render("SELECT pg_catalog.to_regnamespace('{schema}') IS NULL AS absent \\gset", schema),
            f"\\if :absent\n{statements.text('create_schema')}\n\\endif",
            statements.text("create_table"),
            f"SELECT {changed} AS changed, count(*) = 0 AS missing\n{applied} \\gset",
            f"\\if :changed\n{refusal}\n\\endif",
            f"\\if :missing\n{migration.text.strip()}\n{_record(migration, schema)}\n\\endif",
            "COMMIT;\n",
        )
    )


def _lacks(situation: Situation, right: str) -> str:
    return f'role "{situation.role}" lacks a right; grant it: GRANT {right} TO "{situation.role}"'


def _taken(what: str) -> str:
    return f"{what} is not the bus's: give the bus a schema of its own with the setting schema (EVENTBUS_SCHEMA)"
