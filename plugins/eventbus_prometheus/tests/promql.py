"""Reads the part of PromQL that the dashboard and the rules use; fails at whatever is not of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

BY_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds to everything that it scrapes."""

_TOKEN = re.compile(
    r'\s*(?:(?P<word>[a-zA-Z_:][\w:]*)|(?P<number>\d+(?:\.\d+)?)|(?P<text>"[^"]*")|(?P<span>\[(?:\d+[smh]|\$__rate_interval)\])'
    r"|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/><=(){},]))"
)
_AGGREGATIONS = {"sum", "max", "min"}
_OVER_TIME = {"rate", "increase", "delta"}
_FUNCTIONS = {"absent", "vector", "histogram_quantile"}
_BETWEEN = {"+", "-", "*", "/", "==", "!=", ">", "<", ">=", "<=", "or", "and"}


@dataclass(frozen=True)
class Use:
    """One metric in an expression: with which labels, in which function over time, and what labels are left."""

    metric: str
    labels: frozenset[str]
    function: str | None = None
    kept: frozenset[str] = frozenset()


def uses(expression: str) -> Sequence[Use]:
    """The metrics that an expression uses; ValueError if it is none."""
    reader = _Reader(expression)
    found = list(reader.expression())
    if reader.next is not None:
        raise ValueError(f"{reader.next} in {expression}")
    return found


class _Reader:
    def __init__(self, expression: str) -> None:
        self._text = expression
        self._at = 0
        self._kind: str | None = None
        self.next: str | None = None
        self.step()

    def step(self) -> str:
        """The token at hand; then the one after it is."""
        taken = self.next or ""
        if self._text[self._at :].strip():
            match = _TOKEN.match(self._text, self._at)
            if match is None:
                raise ValueError(f"{self._text[self._at :]!r} in {self._text}")
            self._at, self._kind, self.next = match.end(), match.lastgroup, match[match.lastgroup or 0]
        else:
            self._kind = self.next = None
        return taken

    def expect(self, wanted: str) -> None:
        if self.step() != wanted:
            raise ValueError(f"no {wanted} in {self._text}")

    def expression(self) -> Iterator[Use]:
        yield from self.term()
        while self.next in _BETWEEN:
            self.step()
            yield from self.term()

    def term(self) -> Iterator[Use]:
        if self.next == "(":
            yield from self.arguments()
        elif self._kind == "number":
            self.step()
        elif self._kind == "word":
            yield from self.word(self.step())
        else:
            raise ValueError(f"{self.next} in {self._text}")

    def word(self, word: str) -> Iterator[Use]:
        if word in _AGGREGATIONS:
            kept = frozenset(self.names()) if self.next == "by" and self.step() else frozenset[str]()
            for use in self.arguments():
                yield replace(use, labels=use.labels | kept, kept=kept)
        elif word in _OVER_TIME:
            for use in self.arguments(span=True):
                yield replace(use, function=word)
        elif word in _FUNCTIONS:
            yield from self.arguments()
        else:
            yield Use(word, frozenset(self.matchers()))

    def arguments(self, *, span: bool = False) -> Iterator[Use]:
        self.expect("(")
        yield from self.expression()
        while self.next == ",":
            self.step()
            yield from self.expression()
        if span != (self._kind == "span"):
            raise ValueError(f"a span is missing, or not wanted, in {self._text}")
        if span:
            self.step()
        self.expect(")")

    def names(self) -> Iterator[str]:
        self.expect("(")
        while True:
            yield self.step()
            if self.next != ",":
                break
            self.step()
        self.expect(")")

    def matchers(self) -> Iterator[str]:
        if self.next != "{":
            return
        self.step()
        while self.next != "}":
            yield self.step()
            if self.step() not in {"=", "!=", "=~", "!~"} or self._kind != "text":
                raise ValueError(f"no matcher of a label in {self._text}")
            self.step()
            if self.next == ",":
                self.step()
        self.step()
