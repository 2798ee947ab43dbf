"""The pages of the documentation, read as Markdown: blocks of code, links, headings, and the text between.

How a page says what happens to a block of code, in the info string after its three backticks:

- ``python`` and ``bash`` run, in the order of the page, in one folder and one Python process per page;
- ``sql run`` runs too; a plain ``sql`` block is only shown;
- ``python no-run: reason`` is only shown. The reason is for the author of the page; readers do not see it.

A block whose first line is a comment with a file name (``# shop.py``) becomes that file instead; a later block has to
use it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent

_FENCE = re.compile(r"^\s*(`{3,}|~{3,})(.*)$")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_SPAN = re.compile(r"(`+)(.+?)\1")
_FILE = re.compile(r"^# ([\w./-]+\.\w+)$")
_NO_RUN = re.compile(r"no-run(?::\s*(.*))?")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; ``line`` is the number of its first line of code, counted from 1."""

    line: int
    language: str
    options: str
    code: str

    @property
    def no_run(self) -> str | None:
        """Why it must not run; empty if the page gives no reason, None if nothing is said."""
        found = _NO_RUN.fullmatch(self.options)
        return None if found is None else (found[1] or "")

    @property
    def file(self) -> str | None:
        """The file that this block is, if it is one."""
        found = _FILE.match(self.code.partition("\n")[0])
        return None if found is None or self.no_run is not None else found[1]

    @property
    def runs(self) -> bool:
        """Whether it is code to run."""
        if self.no_run is not None or self.file is not None:
            return False
        return self.language in {"python", "bash"} or (self.language == "sql" and self.options == "run")


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return self.path.relative_to(ROOT).as_posix() if self.path.is_relative_to(ROOT) else self.path.name

    @cached_property
    def text(self) -> str:
        """Everything."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[Block]:
        """Its fenced blocks; raises ``ValueError`` for one that never ends."""
        return [part for part in self._parts if isinstance(part, Block)]

    @cached_property
    def prose(self) -> str:
        """The lines outside of fenced blocks."""
        return "\n".join(part for part in self._parts if isinstance(part, str))

    @property
    def spans(self) -> list[str]:
        """The inline code of the prose."""
        return [found[2].strip() for found in _SPAN.finditer(self.prose)]

    @property
    def links(self) -> list[str]:
        """Where its links lead."""
        return _LINK.findall(_SPAN.sub("code", self.prose))

    @property
    def anchors(self) -> set[str]:
        """What a link to a heading of this page may say after ``#``."""
        anchors: set[str] = set()
        for line in self.prose.splitlines():
            if heading := _HEADING.match(line):
                slug = _slug(heading[1])
                same = sum(anchor == slug or anchor.startswith(f"{slug}-") for anchor in anchors)
                anchors.add(f"{slug}-{same}" if slug in anchors else slug)
        return anchors

    @property
    def _parts(self) -> Iterator[Block | str]:
        lines = iter(enumerate(self.text.splitlines(), start=1))
        for number, line in lines:
            fence = _FENCE.match(line)
            if fence is None:
                yield line
                continue
            code: list[str] = []
            for _, inner in lines:
                if inner.strip().startswith(fence[1]) and not inner.strip().strip(fence[1][0]):
                    break
                code.append(inner)
            else:
                raise ValueError(f"{self.name}:{number}: this block of code never ends")
            language, _, options = fence[2].strip().partition(" ")
            yield Block(number + 1, language, options.strip(), textwrap.dedent("\n".join(code)) + "\n")


def pages() -> list[Page]:
    """README.md and everything under docs/."""
    return [Page(ROOT / "README.md"), *(Page(path) for path in sorted((ROOT / "docs").rglob("*.md")))]


def _slug(heading: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
