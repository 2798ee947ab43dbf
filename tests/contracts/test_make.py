"""What a newcomer types first, and what CI runs: a failure is never reported as a success."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
TOOLS: Final = ("ruff", "mypy", "lint-imports", "eventbus", "python")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The Makefile with a virtual environment of stand-ins that say their name and arguments."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for tool in TOOLS:
        stand_in(tmp_path, tool, "exit 0")
    (tmp_path / ".venv" / ".installed").touch()
    return tmp_path


def stand_in(project: Path, tool: str, then: str) -> None:
    path = project / ".venv" / "bin" / tool
    path.write_text(f'#!/bin/sh\necho "ran {tool} $*"\n{then}\n')
    path.chmod(0o755)


def run(project: Path, *command: str) -> tuple[int, list[str]]:
    """Exit code, and what the stand-ins said."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, check=False, cwd=project, env=clean, capture_output=True, text=True)
    return done.returncode, [
        line.removeprefix("ran ").strip() for line in done.stdout.splitlines() if line.startswith("ran ")
    ]


def test_make_test_checks_everything_and_pytest_speaks_last(project: Path) -> None:
    code, ran = run(project, "make", "test", "ARGS=-k topics")
    assert code == 0
    assert ran == [
        "ruff format --check",
        "ruff check",
        "mypy",
        "lint-imports --no-logo",
        "python -m pytest -n 4 --dist worksteal -k topics",
    ]


def test_how_many_tests_run_at_once_can_be_chosen(project: Path) -> None:
    _, ran = run(project, "make", "test", "WORKERS=0")
    assert ran[-1].startswith("python -m pytest -n 0 ")


def test_ci_runs_make_test_from_wherever_it_is_called(project: Path) -> None:
    code, ran = run(project.parent, str(project / ".ci" / "run"))
    assert code == 0
    assert ran[-1].startswith("python -m pytest")


@pytest.mark.parametrize("tool", ["ruff", "mypy", "lint-imports", "python"])
def test_one_failing_tool_fails_the_whole_and_hides_no_other(project: Path, tool: str) -> None:
    stand_in(project, tool, "exit 1")
    code, ran = run(project, "make", "test")
    assert code != 0
    assert [line.split()[0] for line in ran] == ["ruff", "ruff", "mypy", "lint-imports", "python"]


@pytest.mark.parametrize("target", ["demo", "bench"])
def test_a_failed_demo_or_benchmark_is_not_a_success(project: Path, target: str) -> None:
    stand_in(project, "eventbus", "exit 1")
    stand_in(project, "python", "exit 1")
    code, ran = run(project, "make", target)
    assert code != 0
    assert ran == [{"demo": "eventbus demo", "bench": "python -m bench"}[target]]


def test_a_fresh_machine_is_set_up_by_any_target(project: Path) -> None:
    shutil.rmtree(project / ".venv")
    interpreter = project / "interpreter"
    interpreter.write_text('#!/bin/sh\necho "ran interpreter $*"\nmkdir -p .venv/bin\ncp tools/* .venv/bin/\n')
    interpreter.chmod(0o755)
    (project / "tools").mkdir()
    for tool in TOOLS:
        (project / "tools" / tool).write_text(f'#!/bin/sh\necho "ran {tool} $*"\n')
        (project / "tools" / tool).chmod(0o755)
    code, ran = run(project, "make", "demo", f"PYTHON={interpreter}")
    assert code == 0
    assert ran[0] == "interpreter -m venv .venv"
    assert ran[1].startswith("python -m pip install")
    assert ran[2] == "eventbus demo"
    assert run(project, "make", "demo") == (0, ["eventbus demo"]), "the second time nothing is installed again"


def test_new_requirements_are_installed_before_anything_runs(project: Path) -> None:
    newer = (project / ".venv" / ".installed").stat().st_mtime + 10
    os.utime(project / "pyproject.toml", (newer, newer))
    _, ran = run(project, "make", "check")
    assert ran[0].startswith("python -m pip install")


def test_an_interrupted_installation_is_done_again(project: Path) -> None:
    (project / ".venv" / ".installed").unlink()
    stand_in(project, "python", "exit 1")
    code, _ = run(project, "make", "check")
    assert code != 0
    assert not (project / ".venv" / ".installed").exists()


def test_without_a_python_that_is_new_enough_the_message_says_so(project: Path) -> None:
    (project / ".venv" / ".installed").unlink()
    done = subprocess.run(["make", "check", "PYTHON="], check=False, cwd=project, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stderr
