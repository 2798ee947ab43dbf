"""The page of cases names every case once, and only tests that there are."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
NUMBERS = {
    "PAY": (1, 3, 5, 6, 8, 10, 12, 15), "TOP": (1, 3, 5, 6), "NTF": (1, 3, 5, 8), "TXN": (1, 2, 4, 7, 9),
    "HND": (1, 3, 5, 7, 9, 11, 14), "PRC": (1, 2, 5, 7), "DBF": (1, 3, 5, 7, 9, 12), "SCH": (1, 3, 6, 9),
    "DUP": (1, 3, 5, 7, 10), "ORD": (1, 4), "SCL": (1, 3, 6), "DSH": (1, 3, 5, 8, 10), "CLI": (1, 3, 5),
    "EXT": (1, 3, 4, 7),
}  # fmt: skip
CASES = [f"{kind}-{number:02}" for kind, numbers in NUMBERS.items() for number in numbers]
NAMED = sorted(set(re.findall(r"`((?:plugins/\w+/)?tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_no_case_is_left_out_or_answered_twice() -> None:
    assert Counter(re.findall(r"\b[A-Z]{3}-\d\d\b", PAGE)) == Counter(CASES)


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_every_test_that_is_named_exists(path: str) -> None:
    module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    there = {item.name for item in ast.walk(module) if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {name for named_path, name in NAMED if named_path == path} <= there
