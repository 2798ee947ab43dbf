"""The rules of the house that no tool checks: without them the code slowly stops being one that people can follow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "eventbus"
MODULES: Final = sorted(PACKAGE.rglob("*.py"))
LONGEST_MODULE: Final = 300
NAMES_THAT_SAY_NOTHING: Final = {"utils", "util", "helpers", "helper", "common", "misc", "base", "manager", "impl"}
MUTABLE: Final = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
READ_ONLY: Final = re.compile(r"Final\[(Mapping|Sequence|Set|Collection|Iterable)\b")
STATEMENT: Final = re.compile(
    r"\b(SELECT\s.+\sFROM|INSERT\s+INTO|UPDATE\s+\S+\s+SET|DELETE\s+FROM|CREATE\s+(TABLE|SCHEMA|FUNCTION)|"
    r"SELECT\s+(set_config|pg_\w+)\s*\()|^\s*(LISTEN|NOTIFY)\s",
    re.DOTALL,
)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def mutable_globals(module: ast.Module) -> Iterator[int]:
    """Lines on which a module binds a container that somebody could change later, or asks to rebind a name."""
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            names, value, annotation = [ast.unparse(each) for each in statement.targets], statement.value, ""
        elif isinstance(statement, ast.AnnAssign) and statement.value:
            names, value = [ast.unparse(statement.target)], statement.value
            annotation = ast.unparse(statement.annotation)
        else:
            continue
        called = ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
        containers = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
        allowed = names == ["__all__"] or READ_ONLY.match(annotation)
        if not allowed and (isinstance(value, containers) or called in MUTABLE):
            yield statement.lineno
    yield from (node.lineno for node in ast.walk(module) if isinstance(node, ast.Global))


def statements(module: ast.Module) -> Iterator[int]:
    """Lines with SQL in a string that is not a docstring."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and id(node) not in documentation:
            text = node.value if isinstance(node.value, str) else ""
            yield from (node.lineno for _ in STATEMENT.finditer(text))


def test_every_module_can_be_read_in_one_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_every_module_is_named_after_what_is_in_it() -> None:
    assert [str(path) for path in MODULES if NAMES_THAT_SAY_NOTHING & set(path.stem.lower().split("_"))] == []


def test_two_buses_in_one_process_cannot_disturb_each_other_through_a_module() -> None:
    assert [where(path, line) for path in MODULES for line in mutable_globals(tree(path))] == []


def test_whoever_reviews_the_sql_finds_all_of_it_under_postgres() -> None:
    outside = [path for path in MODULES if "postgres" not in path.relative_to(PACKAGE).parts]
    assert [where(path, line) for path in outside for line in statements(tree(path))] == []


@pytest.mark.parametrize(
    "text",
    [
        "cache = {}",
        "seen: set[str] = set()",
        "x = collections.deque()",
        "y = [i for i in ()]",
        "def f():\n    global z",
    ],
)
def test_the_search_for_state_finds_state(text: str) -> None:
    assert list(mutable_globals(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["__all__ = ['a']", "A: Final[Mapping[str, int]] = {}", "B = (1, 2)", "C = frozenset()"]
)
def test_the_search_for_state_leaves_constants_alone(text: str) -> None:
    assert not list(mutable_globals(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["run('SELECT a\\nFROM b')", "x = 'INSERT INTO a'", "x = f'DELETE FROM {table}'", "x = 'LISTEN y'"]
)
def test_the_search_for_sql_finds_sql(text: str) -> None:
    assert list(statements(ast.parse(text)))


def test_the_search_for_sql_leaves_prose_alone() -> None:
    assert not list(statements(ast.parse("'''SELECT a FROM b, in a docstring'''\nraise E('select one from the list')")))
