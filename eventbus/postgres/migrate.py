"""Installs and upgrades the bus's schema: numbered ``.sql`` files, one transaction each.

Ten processes may migrate at once: each migration takes a transaction-scoped advisory lock and looks again under it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import psycopg
from psycopg import sql

LOCK_NAMESPACE = 0x65766274


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema: its name (``0001_tables``) and its text with the schema's name filled in."""

    name: str
    text: str


def migrations(schema: str) -> list[Migration]:
    """Every migration that this code knows, in order, written for ``schema``."""
    folder = resources.files("eventbus.postgres") / "migrations"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return [Migration(file.name.removesuffix(".sql"), render(file.read_text(encoding="utf-8"), schema)) for file in files]


def render(text: str, schema: str) -> str:
    """Fill in ``{schema}``, the quoted identifier, and ``{name}``, the bare name."""
    return text.replace("{schema}", f'"{schema}"').replace("{name}", schema)


def migrate(dsn: str, schema: str) -> list[str]:
    """Apply what is missing; returns the names that this call applied. Each is atomic; a crash leaves whole steps."""
    applied = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for migration in migrations(schema):
            if _apply(connection, migration, schema):
                applied.append(migration.name)
    return applied


def _apply(connection: psycopg.Connection, migration: Migration, schema: str) -> bool:
    with connection.transaction():
        connection.execute("SET LOCAL search_path = pg_catalog")
        connection.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", [LOCK_NAMESPACE, schema])
        connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        table = sql.Identifier(schema, "migrations")
        connection.execute(
            sql.SQL(
                "CREATE TABLE IF NOT EXISTS {} (name text PRIMARY KEY,"
                " applied_at timestamptz NOT NULL DEFAULT clock_timestamp())"
            ).format(table)
        )
        row = connection.execute(sql.SQL("SELECT 1 FROM {} WHERE name = %s").format(table), [migration.name]).fetchone()
        if row:
            return False
        connection.execute(migration.text)  # type: ignore[arg-type]
        connection.execute(sql.SQL("INSERT INTO {} (name) VALUES (%s)").format(table), [migration.name])
        return True
