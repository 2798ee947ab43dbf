"""``eventbus torture`` as a user runs it: with faults, without, and on a bus that breaks its promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("TORTURE_SECONDS", "8"))
BROKEN = """
from eventbus.consuming.execution import DONE, Execution

def broken(real):
    async def handle(self, delivery):
        if delivery.seq % 10 == 0:
            {crime}
        return await real(self, delivery)
    return handle

Execution._handle = broken(Execution._handle)
Execution._handle_guarded = broken(Execution._handle_guarded)
"""
"""Loaded by every Python process of a run that finds it as ``sitecustomize``."""


def torture(
    folder: Path, dsn: str, faults: str, *, path: str = "", seconds: float = SECONDS
) -> tuple[int, dict[str, Any], str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, str(ROOT), str(ROOT / "plugins")])}
    options = ["--dsn", dsn, "--minutes", str(seconds / 60), "--faults", faults, "--seed", "7", "--json"]
    command = [sys.executable, "-m", "eventbus", "torture", *options]
    done = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("major", [18], indirect=True)
def test_without_faults_nothing_is_repeated(dsn: str, tmp_path: Path) -> None:
    code, said, _ = torture(tmp_path, dsn, "none")
    assert (code, said["violations"], said["counts"]["repeats"]) == (0, [], 0)
    assert said["counts"]["deliveries"] == 8 * said["counts"]["events"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("major", [18], indirect=True)
@pytest.mark.parametrize(
    ("crime", "name"),
    [("return DONE", "lost"), ("await real(self, delivery)", "repeated")],
    ids=["done before the handler ran", "handled twice"],
)
def test_a_bus_that_breaks_its_promises_is_found_out(dsn: str, tmp_path: Path, crime: str, name: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(crime=crime))
    code, said, complaint = torture(tmp_path, dsn, "none", path=str(tmp_path))
    assert code == 1
    assert any(each.startswith(f"{name} in plain: ") for each in said["violations"]), said["violations"][:5]
    assert "kept to look at" in complaint


@pytest.mark.slow
@pytest.mark.parametrize("major", [18], indirect=True)
def test_every_promise_is_kept_while_processes_are_killed_frozen_stopped_and_cut_off(dsn: str, tmp_path: Path) -> None:
    code, said, _ = torture(tmp_path, dsn, "all", seconds=2 * SECONDS)
    assert (code, said["violations"]) == (0, [])
    faults = {"fault kill", "fault stop", "fault term", "fault terminate"}
    assert len(faults & set(said["counts"])) >= 2, "a busy machine has time for some of them"
