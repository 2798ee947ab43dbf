"""Where a command's answer goes: rich on a terminal, plain text in a pipe, JSON if it was asked for.

The answer is standard output; what is only said along the way is standard error. What comes from events is shown
with its control characters made visible, so that no payload and no error message can command the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Cell = str | int | None


class OutputClosed(Exception):
    """Whoever read the answer has gone away, as ``head`` does."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. ``style`` is rich's; ``narrow``: never wrapped."""

    title: str
    style: str = ""
    right: bool = False
    narrow: bool = False


class Screen:
    """One command's standard output and standard error."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def answer(self, value: Any, text: str) -> None:
        """The answer: ``value`` as JSON, or ``text``."""
        if self.as_json:
            self.json(value)
        else:
            self.line(text)

    def json(self, value: Any) -> None:
        """``value`` as one JSON document."""
        import orjson

        _write(orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode())

    def line(self, text: str = "", style: str = "") -> None:
        """One line of the answer."""
        if style and sys.stdout.isatty():
            from rich.console import Console
            from rich.text import Text

            Console(soft_wrap=True).print(Text(text, style=style))
        else:
            _write(text)

    def note(self, text: str) -> None:
        """One line about what is going on; not part of the answer."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
        """A table: drawn on a terminal, with tabs between the cells in a pipe."""
        if sys.stdout.isatty():
            _draw(columns, rows)
            return
        lines = ["\t".join(column.title for column in columns)]
        lines += ["\t".join(shown(cell) for cell in row) for row in rows]
        _write("\n".join(lines))

    @contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Callable[[int, str], None]]:
        """A progress bar on a terminal: call it with how much more is done, and a word about it."""
        if not sys.stderr.isatty():
            yield lambda _step, _word: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[word]}"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
        )
        with bar:
            task = bar.add_task(what, total=total, word="")
            yield lambda step, word: bar.update(task, advance=step, word=word)

    def confirmed(self, question: str, *, yes: bool) -> bool:
        """Whether a person says yes, or ``--yes`` has. Where nobody can be asked, it has to."""
        import typer

        if yes:
            return True
        if not sys.stdin.isatty():
            raise typer.BadParameter("nobody can be asked here; to go ahead, give --yes", param_hint="--yes")
        return bool(typer.confirm(question, err=True))


def _write(text: str) -> None:
    """Write line by line: unbuffered (PYTHONUNBUFFERED), a large write that the reader cuts short is not an error."""
    for line in text.split("\n"):
        sys.stdout.write(line + "\n")


def counted(number: int, noun: str) -> str:
    """``1 event``, ``2,000 events``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shown(value: object) -> str:
    """A cell as plain text on one line, its control characters visible."""
    text = "" if value is None else str(value)
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else " " if letter.isspace() else ascii(letter)[1:-1] for letter in text
    )


def _draw(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            style=column.style,
            justify="right" if column.right else "left",
            no_wrap=column.narrow,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    Console().print(table)
