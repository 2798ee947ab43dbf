"""Every guarantee for handlers of every kind, while workers are killed, frozen and cut off from the database.

``TORTURE_EVENTS=300000`` makes the long form of it; ``TORTURE_KINDS`` chooses some queues.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.torture.kinds import chosen
from tests.torture.stage import Plan, Stage

EVENTS = int(os.environ.get("TORTURE_EVENTS", "4000"))
SECONDS = EVENTS / 250


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS + 500)
@pytest.mark.parametrize("major", [18], indirect=True)
def test_every_guarantee_holds_while_workers_are_killed_frozen_and_cut_off(dsn: str, tmp_path: Path) -> None:
    plan = Plan(chosen(os.environ.get("TORTURE_KINDS", "")), EVENTS, SECONDS, patience=SECONDS + 150)
    stage = Stage(dsn, tmp_path, plan)
    try:
        stage.play()
        found = stage.judge()
        sys.stdout.write(f"{stage.summary()}\n")
        assert not found, "\n".join(map(str, found[:20]))
        stage.redrive()
        found = stage.judge()
        sys.stdout.write(f"{stage.summary()}\n")
        assert not found, "\n".join(map(str, found[:20]))
        assert {"kill", "stop", "freeze", "cut", "redrive"} <= set(stage.history.faults), stage.summary()
    finally:
        stage.close()
