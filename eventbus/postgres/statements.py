"""The named statements of ``sql/*.sql``: what the command line asks the database, apart from the engine's functions.

A file is a list of statements. Each begins with its name and one line of purpose::

    -- name: resume
    -- Lets a paused bus run again.
    UPDATE {schema}.bus SET ...
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import Final

_HEAD: Final = re.compile(r"^-- name: ([a-z_]+)\n-- (.+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement for one schema. ``text`` may hold several commands if it has no parameters."""

    name: str
    purpose: str
    text: str

    @property
    def query(self) -> bytes:
        """The statement as psycopg executes it."""
        return self.text.encode()


class Statements:
    """The statements of one file, by name."""

    def __init__(self, file: str, schema: str) -> None:
        folder = resources.files("eventbus.postgres") / "sql"
        source = (folder / f"{file}.sql").read_text(encoding="utf-8")
        self._by_name = {statement.name: statement for statement in parse(render(source, schema))}

    def __getitem__(self, name: str) -> bytes:
        """The statement ``name`` as psycopg executes it."""
        return self._by_name[name].query

    def text(self, name: str) -> str:
        """The statement ``name`` as a person reads it."""
        return self._by_name[name].text


def parse(source: str) -> list[Statement]:
    """The statements of a file, in order; what stands before the first one is a comment on the file."""
    heads = list(_HEAD.finditer(source))
    ends = [head.start() for head in heads[1:]] + [len(source)]
    return [
        Statement(head[1], head[2], source[head.end() : end].strip()) for head, end in zip(heads, ends, strict=True)
    ]


def render(text: str, schema: str) -> str:
    """Fill in ``{schema}``, the quoted identifier, and ``{name}``, the bare name."""
    return text.replace("{schema}", f'"{schema}"').replace("{name}", schema)
