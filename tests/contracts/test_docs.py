"""The documentation says what is true: its code runs, its links lead somewhere, what it names exists."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from psycopg.conninfo import conninfo_to_dict

from eventbus.cli import GROUPS
from eventbus.cli.options import Commands, new_app
from eventbus.plugins.registry import Plugins, loaded
from eventbus.settings import PREFIX, Settings
from tests.documents import ROOT, Page, pages
from tests.fixtures import migrated

PAGES = pages()
LANGUAGES = {"python", "bash", "sql", "text", "json", "toml", "ini", "yaml", "mermaid"}
README = Page(ROOT / "README.md")
GUARANTEES = Page(ROOT / "docs/guarantees.md")
OPERATIONS = Page(ROOT / "docs/operations.md")
_TEST = re.compile(r"tests/[\w/]+\.py::\w+")
_VARIABLE = re.compile(rf"\b{PREFIX}[A-Z][A-Z_]*\b")
_LIBPQ = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD", "dbname": "PGDATABASE"}

BUILDS_UP = """
```python
number = 40
```

```sql run
CREATE TABLE shown (n int);
INSERT INTO shown VALUES (1)
```

```python
# one.py
print(1)
```

```bash
python one.py > one.txt
```

- in a list, with an await outside of a function:

  ```python
  import os, pathlib, psycopg

  async with await psycopg.AsyncConnection.connect(os.environ["EVENTBUS_DSN"]) as conn:
      [row] = await (await conn.execute("SELECT n FROM shown")).fetchall()
  assert number + row[0] + int(pathlib.Path("one.txt").read_text()) == 42
  ```
"""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
each_page_with_code = pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.runs or block.file for block in page.blocks)],
    ids=lambda page: page.name,
)


@pytest.fixture
def home(empty_dsn: str) -> str:
    """A database in which the bus was installed. Not a clone of one: that would be paused like a restored copy."""
    migrated(empty_dsn)
    return empty_dsn


def play(page: Page, dsn: str, folder: Path) -> None:
    """Run the blocks of a page; fails with everything that they said."""
    blocks = [asdict(block) | {"file": block.file} for block in page.blocks if block.runs or block.file]
    environment = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "PG"))}
    parts = conninfo_to_dict(dsn)
    environment |= {variable: str(parts[name]) for name, variable in _LIBPQ.items() if name in parts}
    environment |= {"EVENTBUS_DSN": dsn, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    player = subprocess.Popen(
        [sys.executable, ROOT / "tests/page_player.py"],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = player.communicate(json.dumps({"path": str(page.path), "blocks": blocks}), timeout=80)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(player.pid, signal.SIGKILL)  # a block may have started something in the background
        player.wait()
    assert player.returncode == 0, f"{page.name} does not work as printed:\n{said}"


@each_page_with_code
@pytest.mark.parametrize("major", [15], indirect=True)
def test_what_a_reader_copies_from_a_page_works(page: Page, home: str, tmp_path: Path) -> None:
    play(page, home, tmp_path)


@pytest.mark.parametrize(
    ("block", "found"),
    [
        ("python\nassert 1 == 2", 'page.md", line 4'),
        ("python\nimport asyncio\nawait asyncio.sleep(0)\nraise RuntimeError('late')", "line 6"),
        ("bash\nfalse", "page.md:4: exit code 1"),
        ("bash\nfalse | true", "exit code 1"),
        ("bash\necho $no_such_variable", "unbound variable"),
        ("bash\neventbus no-such-command", "exit code 2"),
        ("sql run\nSELECT no_such_column", "no_such_column"),
    ],
)
@pytest.mark.parametrize("major", [15], indirect=True)
def test_a_block_that_does_not_work_is_found(block: str, found: str, home: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"# Page\n\n```{block}\n```\n")
    with pytest.raises(AssertionError, match="does not work as printed") as failure:
        play(Page(path), home, tmp_path)
    assert found in str(failure.value)


@pytest.mark.parametrize("major", [15], indirect=True)
def test_blocks_of_a_page_build_on_each_other(home: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(BUILDS_UP)
    play(Page(path), home, tmp_path)


@each_page
def test_no_block_of_code_escapes_the_check_without_a_reason(page: Page) -> None:
    assert "```" not in page.prose, f"{page.name}: a block that is quoted or indented by something else than spaces"
    for block in page.blocks:
        where = f"{page.name}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: say what this block is, one of {sorted(LANGUAGES)}"
        if block.no_run is not None:
            assert len(block.no_run.split()) > 1, f"{where}: say why: no-run: <reason>"
        elif block.language == "sql":
            assert block.options in {"", "run"}, f"{where}: unknown option '{block.options}'"
        else:
            assert not block.options, f"{where}: unknown option '{block.options}'"


@each_page
def test_every_file_that_a_page_shows_is_used_there(page: Page) -> None:
    for number, block in enumerate(page.blocks):
        if block.file and block.file != "pyproject.toml":
            later = "".join(other.code for other in page.blocks[number + 1 :] if other.runs or other.file)
            assert Path(block.file).stem in later, f"{page.name}:{block.line}: nothing runs {block.file}"


@each_page
def test_no_link_of_a_page_leads_nowhere(page: Page) -> None:
    for link in page.links:
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), f"{page.name}: {link}: no such file"
        assert path.is_relative_to(ROOT), f"{page.name}: {link} leaves the repository"
        if anchor:
            assert anchor in Page(path).anchors, f"{page.name}: {link}: no such heading"


@each_page
def test_every_command_that_a_page_names_exists(page: Page) -> None:
    shown = "".join(block.code for block in page.blocks if block.language == "bash")
    named = [*page.spans, *(line.strip() for line in shown.splitlines())]
    for words in (text.split() for text in named if text.startswith("eventbus ")):
        assert names_a_command(words[1:]), f"{page.name}: no such command: {' '.join(words)}"


@each_page
def test_every_setting_that_a_page_names_exists(page: Page) -> None:
    known = {variable_of(field) for field in Settings.model_fields} | set(variables_of_plugins())
    assert set(_VARIABLE.findall(page.text)) <= known


def test_every_page_can_be_found_from_the_index() -> None:
    index = Page(ROOT / "docs/index.md")
    linked = {(index.path.parent / link.partition("#")[0]).resolve() for link in index.links}
    missing = [page.name for page in PAGES if page.path not in {*linked, index.path} and page.name != "README.md"]
    assert not missing


@pytest.mark.parametrize("page", [README, GUARANTEES], ids=lambda page: page.name)
def test_every_guarantee_names_tests_that_exist(page: Page) -> None:
    named = _TEST.findall(page.text)
    assert named
    missing = [test for test in named if not exists(test)]
    assert not missing


def test_no_guarantee_is_left_out() -> None:
    sections = re.split(r"^## ", GUARANTEES.prose, flags=re.MULTILINE)[1:]
    numbers = [int(found[1]) for section in sections if (found := re.match(r"(\d+)\. ", section))]
    assert numbers == list(range(1, 13))
    for section in sections:
        if re.match(r"\d+\. ", section):
            assert _TEST.search(section) or "not in this version" in section, section.splitlines()[0]


def test_the_figures_say_on_what_they_were_measured() -> None:
    figures = re.search(r"<!-- bench:begin -->(.*)<!-- bench:end -->", README.text, re.DOTALL)
    assert figures is not None
    assert "make bench" in figures[1]
    if re.search(r"\|\s*[\d.,]+", figures[1]):
        assert re.search(r"\d{4}-\d{2}-\d{2}", figures[1]), "on which day?"
        assert re.search(r"postgresql:? \d+", figures[1], re.IGNORECASE), "on which server?"
        assert re.search(r"\d+ (cores|CPUs)", figures[1]), "on which machine?"


def test_the_table_of_settings_is_the_one_of_the_code() -> None:
    shown = re.search(r"<!-- settings:begin -->\n(.*)<!-- settings:end -->", OPERATIONS.text, re.DOTALL)
    assert shown is not None
    assert shown[1].strip() == settings_table()


def settings_table() -> str:
    """The settings as a table, made from the code."""
    rows = ["| variable | default | what it is |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        if name == "plugin_settings":  # each has a variable of its own
            continue
        text = ",".join(field.default) if isinstance(field.default, tuple) else json.dumps(field.default).strip('"')
        default = "none" if field.default in (None, ()) else f"`{text}`"
        rows.append(f"| `{variable_of(name)}` | {default} | {field.description} |")
    return "\n".join(rows)


def variables_of_plugins() -> Iterator[str]:
    """The environment variables of the settings of our plugins and of those in the examples."""
    for plugin in our_plugins():
        fields = () if plugin.settings is None else type(plugin.settings).model_fields
        for field in (*fields, "queues", "except_queues"):
            yield f"{PREFIX}{plugin.name}_{field}".upper()


def our_plugins() -> Plugins:
    """The plugins that come along and those of the examples."""
    names = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]["eventbus"]
    examples = ("examples.audit_plugin:Audit", "examples.error_reporting_plugin:ErrorReporting")
    settings = {"error_reporting": {"capture": "builtins:print"}}
    found = loaded(Settings(plugins=(*names, *examples), plugin_settings=settings))
    found.require_all()
    return found


def variable_of(field: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + ("SCHEMA" if field == "schema_name" else field.upper())


def names_a_command(words: list[str]) -> bool:
    """Whether words after ``eventbus`` begin with a command, or a command and its subcommand."""
    command: Any = application()
    for word in words:
        if not hasattr(command, "commands") or not re.fullmatch(r"[a-z][a-z-]*", word):
            break
        command = command.commands.get(word)
        if command is None:
            return False
    return True


@functools.cache
def application() -> Any:
    """The command ``eventbus``, with everything that is registered."""
    app = new_app()
    for group in GROUPS:
        import_module(f"eventbus.cli.{group}").register(app)
    our_plugins().ask("eventbus_commands", commands=Commands(app))
    return typer.main.get_command(app)


def exists(test: str) -> bool:
    """Whether ``file::function`` is a test."""
    file, _, function = test.partition("::")
    if not (ROOT / file).is_file():
        return False
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return function in found and function.startswith("test_")
