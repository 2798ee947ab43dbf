"""What plugins can rely on is written down and tested: each hook, each signal, and each plugin that comes along."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest

from eventbus import signals
from eventbus.hookspecs import SPECIFICATIONS
from eventbus.plugins.loading import Known, installed
from tests.documents import ROOT, Page

PAGE: Final = Page(ROOT / "docs/plugins.md")
HOOKS: Final = {name: hook for part in SPECIFICATIONS for name, hook in vars(part).items() if name[0] != "_"}
PACKAGES: Final = sorted(path.parent for path in (ROOT / "plugins").glob("*/__init__.py"))
TESTS: Final = sorted([*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "plugins").glob("*/tests/**/test_*.py")])
PUBLIC: Final = {
    "eventbus",
    "eventbus.cli.extending",
    "eventbus.errors",
    "eventbus.hookspecs",
    "eventbus.plugins",
    "eventbus.settings",
    "eventbus.signals",
    "eventbus.transport",
}
EXAMPLES: Final = ("audit_plugin", "error_reporting_plugin")

each_plugin = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


def rows_of(title: str) -> dict[str, list[str]]:
    """The table below a heading of the page: its cells by the name in the first one."""
    section = re.split(r"^## ", PAGE.prose, flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith(f"{title}\n")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "`" in line[:4]]
    return {row[0].strip("[").split("`")[1]: row[1:] for row in rows if row[0].strip("[").startswith("`")}


def parts_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def marks_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str]]:
    """``("hook", "eventbus_settled")`` for each ``@pytest.mark.hook("eventbus_settled", …)`` above a test."""
    for decorator in function.decorator_list:
        kind = ast.unparse(decorator.func).removeprefix("pytest.mark.") if isinstance(decorator, ast.Call) else ""
        if isinstance(decorator, ast.Call) and kind in ("hook", "signal"):
            yield from ((kind, str(ast.literal_eval(argument))) for argument in decorator.args)


def proven(kind: str) -> dict[str, list[str]]:
    """The tests that a mark names as the proof of a hook or of a signal, and that mention it where they are."""
    found: dict[str, list[str]] = {}
    for path in TESTS:
        text = path.read_text(encoding="utf-8")
        if f"pytest.mark.{kind}(" not in text:
            continue
        for node in ast.walk(parts_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for marked, name in marks_of(node):
                    if marked == kind and is_used(kind, name, path):
                        found.setdefault(name, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def is_used(kind: str, name: str, path: Path) -> bool:
    """Whether a module implements the hook, be it in the text of a plugin, or has something to do with the signal."""
    text = path.read_text(encoding="utf-8")
    if kind == "hook":
        return re.search(rf"@hookimpl\b.*\n(\s+@.+\n)*\s+(async )?def {name}\(", text) is not None
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(parts_of(path)))


def test_every_hook_is_documented_with_its_arguments() -> None:
    rows = rows_of("Hooks")
    arguments = {name: ", ".join(re.findall(r"`(\w+)`", rows[name][0])) for name in HOOKS if name in rows}
    assert arguments == {name: ", ".join(list(inspect.signature(hook).parameters)[1:]) for name, hook in HOOKS.items()}


def test_every_hook_says_when_it_is_called_what_it_may_return_and_where_it_runs() -> None:
    rows = rows_of("Hooks")
    incomplete = [name for name in HOOKS if len(rows[name]) != 4 or not all(rows[name][1:])]
    assert incomplete == []


def test_no_hook_is_documented_that_does_not_exist() -> None:
    assert {name for name in rows_of("Hooks") if name.startswith("eventbus_")} <= set(HOOKS)


def test_every_hook_has_a_test_that_names_it() -> None:
    assert sorted(set(HOOKS) - set(proven("hook"))) == []


def test_every_signal_is_documented_as_the_code_says() -> None:
    said = {name: list(str(signal.__doc__).partition(": ")[::2]) for name, signal in signals.ALL.items()}
    assert rows_of("Signals") == said


def test_every_signal_has_a_test_that_names_it() -> None:
    assert sorted(set(signals.ALL) - set(proven("signal"))) == []


def test_no_test_names_a_hook_or_a_signal_that_does_not_exist() -> None:
    assert set(proven("hook")) <= set(HOOKS)
    assert set(proven("signal")) <= set(signals.ALL)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_shows_the_examples_as_they_are(name: str) -> None:
    [block] = [block for block in PAGE.blocks if block.file == f"{name}.py"]
    assert block.code == f"# {name}.py\n" + (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")


def test_every_plugin_that_comes_along_is_on_the_page() -> None:
    rows = rows_of("The plugins that come with eventbus")
    assert set(rows) == {known.name for known in ours()}


@each_plugin
def test_a_plugin_has_a_readme_tests_and_an_entry_point(package: Path) -> None:
    assert (package / "README.md").is_file()
    assert list((package / "tests").glob("test_*.py"))
    assert plugin_of(package)


@each_plugin
def test_a_plugin_says_what_it_is_for_and_what_each_setting_means(package: Path) -> None:
    plugin = plugin_of(package)
    assert (inspect.getdoc(plugin) or "").partition("\n")[0]
    readme = (package / "README.md").read_text(encoding="utf-8")
    for name, field in plugin.Settings.model_fields.items():
        assert field.description, f"{name} has no description"
        assert f"`{name}`" in readme, f"{name} is not in the README"
    assert plugin.Settings.model_config.get("frozen") is True
    assert plugin.Settings.model_config.get("extra") == "forbid"


@each_plugin
def test_a_plugin_imports_only_what_is_public(package: Path) -> None:
    private = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(package.rglob("*.py"))
        if "tests" not in path.relative_to(package).parts
        for line, name in imports_of(path)
        if name.partition(".")[0] == "eventbus" and name not in PUBLIC
    ]
    assert private == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_import_only_what_is_public(name: str) -> None:
    found = [module for _, module in imports_of(ROOT / "examples" / f"{name}.py")]
    assert {module for module in found if module.partition(".")[0] == "eventbus"} <= PUBLIC


@pytest.mark.parametrize(
    "code", ["import eventbus.bus", "from eventbus.postgres import admin", "def f():\n import eventbus.cli"]
)
def test_the_search_for_imports_finds_them(code: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert [name for _, name in imports_of(path) if name not in PUBLIC]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("hook", "class P:\n    @hookimpl\n    def eventbus_settled(self): ..."),
        ("hook", "class P:\n    @hookimpl(tryfirst=True)\n    async def eventbus_settled(self): ..."),
        ("hook", "class P:\n    @hookimpl\n    @contextmanager\n    def eventbus_settled(self): ..."),
        ("hook", "TEXT = '''\nclass P:\n    @hookimpl\n    def eventbus_settled(self): ...\n'''"),
        ("signal", "signals.eventbus_settled.connect(print)"),
    ],
)
def test_a_mark_counts_only_where_its_hook_or_signal_is_used(kind: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(code)
    assert is_used(kind, "eventbus_settled", path)
    path.write_text("'eventbus_settled'\n\ndef eventbus_settled(): ...")
    assert not is_used(kind, "eventbus_settled", path)


def ours() -> list[Known]:
    """The plugins of our own distribution, by its own word and not by that of an installation that may be older."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    points = document["project"]["entry-points"]["eventbus"]
    assert {known.name for known in installed() if known.distribution == "eventbus"} == set(points)
    return [Known(name, value, "eventbus") for name, value in points.items()]


def plugin_of(package: Path) -> Any:
    """The class that is registered for a package."""
    [known] = [known for known in ours() if known.value.partition(":")[0] == package.name]
    assert package.name == f"eventbus_{known.name}"
    module, _, attribute = known.value.partition(":")
    return getattr(import_module(module), attribute)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, with the line; ``from eventbus import signals`` is ``eventbus.signals``."""
    for node in ast.walk(parts_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            submodules = [alias.name for alias in node.names if (ROOT / "eventbus" / f"{alias.name}.py").is_file()]
            if node.module == "eventbus" and submodules:
                yield from ((node.lineno, f"eventbus.{name}") for name in submodules)
            else:
                yield node.lineno, node.module
