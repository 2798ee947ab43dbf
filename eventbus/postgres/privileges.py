"""The rights that a role needs to publish and to consume, and no more: what ``docs/command-line.md`` tells to grant.

A role with these rights needs neither CREATE nor ownership. Functions are executable by everybody; they act with the
rights of the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg

from eventbus.errors import ConfigurationError
from eventbus.postgres.statements import Statements

_EVENT: Final = ("event_id", "topic", "key", "payload", "headers", "priority", "size")


@dataclass(frozen=True, slots=True)
class Right:
    """Rights on one object of the schema; an empty ``object`` is the schema itself."""

    object: str
    privileges: tuple[str, ...]
    columns: tuple[str, ...] = ()
    sequence: bool = False

    def grant(self, schema: str, role: str) -> str:
        """The GRANT that gives it."""
        columns = f" ({', '.join(self.columns)})" if self.columns else ""
        return f'GRANT {", ".join(self.privileges)}{columns} ON {self._target(schema)} TO "{role}";'

    def _target(self, schema: str) -> str:
        if not self.object:
            return f'SCHEMA "{schema}"'
        return f'{"SEQUENCE" if self.sequence else "TABLE"} "{schema}".{self.object}'

    def parts(self, schema: str) -> Iterator[tuple[str, str, str | None, str]]:
        """Object, privilege and column one by one, and how a person calls it."""
        for privilege in self.privileges:
            for column in self.columns or (None,):
                of = f" ({column})" if column else ""
                yield self.object, privilege, column, f"{privilege}{of} ON {self._target(schema)}"


PUBLISH: Final = (
    Right("", ("USAGE",)),
    Right("outbox", ("INSERT",), _EVENT),
    Right("scheduled", ("INSERT",), ("due_at", *_EVENT)),
    Right("scheduled", ("SELECT",), ("event_id",)),
    Right("scheduled", ("DELETE",)),
)
"""For `outbox.publish_event` and `cancel_event`, and the SQL functions `publish` and `cancel`.

Never on `outbox.xid`: it decides what is relayed."""

CONSUME: Final = (
    Right("", ("USAGE",)),
    Right("migrations", ("SELECT",)),
    Right("bus", ("SELECT",)),
    Right("bus", ("UPDATE",), ("bindings_version",)),
    Right("outbox", ("SELECT",)),
    Right("outbox", ("INSERT",), _EVENT),
    Right("scheduled", ("SELECT", "UPDATE", "DELETE")),
    Right("ticks", ("SELECT", "INSERT")),
    Right("queues", ("SELECT", "INSERT")),
    Right("queues", ("UPDATE",), ("state", "tracking", "when_exhausted")),
    Right("pauses", ("SELECT", "INSERT", "UPDATE", "DELETE")),
    Right("duties", ("SELECT", "INSERT", "UPDATE")),
    Right("layouts", ("SELECT", "INSERT", "DELETE")),
    Right("fillings", ("SELECT", "INSERT", "UPDATE", "DELETE")),
    Right("bindings", ("SELECT", "INSERT", "DELETE")),
    Right("topics", ("SELECT", "INSERT", "UPDATE")),
    Right("routes", ("SELECT", "INSERT", "DELETE")),
    Right("deliveries", ("SELECT", "INSERT")),
    Right("workers", ("SELECT", "INSERT", "UPDATE", "DELETE")),
    Right("claims", ("SELECT", "INSERT")),
    Right("progress", ("SELECT", "INSERT")),
    Right("settlements", ("SELECT", "INSERT")),
    Right("exceptions", ("SELECT", "INSERT", "UPDATE", "DELETE")),
    Right("processed_events", ("SELECT", "INSERT", "DELETE")),
    Right("processed_events", ("UPDATE",), ("owner", "completed_at")),
    Right("dead_letters", ("SELECT", "INSERT")),
    Right("dead_letters", ("UPDATE",), ("lane", "blocks")),
    Right("outbox_id_seq", ("SELECT",), sequence=True),
    Right("relay_sleep", ("UPDATE",), sequence=True),
)
"""For `eventbus consume`, which also runs the relay."""

ATTACH: Final = (
    Right("replays", ("SELECT",)),
    *(Right(table, ("UPDATE",)) for table in ("outbox", "ticks", "bus")),
    *(
        Right(f"{table}_id_seq", ("SELECT", "UPDATE"), sequence=True)
        for table in ("outbox", "scheduled", "queues", "topics", "replays", "claims", "exceptions", "dead_letters")
    ),
)
"""Beyond those of a consumer: to take over a database that was restored from another one, which owners do."""


def grants(needs: Sequence[Right], schema: str, role: str) -> list[str]:
    """The GRANTs that give ``role`` these rights."""
    return [right.grant(schema, role) for right in needs]


def missing(connection: psycopg.Connection, schema: str, needs: Sequence[Right]) -> list[str]:
    """What of ``needs`` the connection's role lacks, as ``INSERT (topic) ON TABLE "eventbus".outbox``."""
    parts = [part for right in needs for part in right.parts(schema)]
    objects, privileges, columns, names = zip(*parts, strict=True)
    lacking = connection.execute(
        Statements("privileges", schema)["missing"],
        {"objects": list(objects), "rights": list(privileges), "columns": list(columns)},
    )
    return [names[n - 1] for (n,) in lacking]


def require(connection: psycopg.Connection, schema: str, needs: Sequence[Right]) -> None:
    """Return if the role has these rights; :class:`~eventbus.errors.ConfigurationError` with the GRANTs if not."""
    lacking = missing(connection, schema, needs)
    if lacking:
        role = str(connection.execute("SELECT current_user").fetchall()[0][0])
        statements = "; ".join(f'GRANT {right} TO "{role}"' for right in lacking)
        raise ConfigurationError(f'role "{role}" lacks rights; as the owner of the schema run: {statements}')
