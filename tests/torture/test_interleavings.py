"""The engine under workers that do the next thing at any moment, die and haunt, in several random orders of steps.

``TORTURE_ORDERS=100`` plays more of them.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.torture.actors import play
from tests.torture.kinds import chosen
from tests.torture.puppets import Theatre


@pytest.mark.slow
@pytest.mark.parametrize("major", [18], indirect=True)
@pytest.mark.parametrize("name", ["plain-async", "idempotent", "parking", "skipping", "parking-idempotent"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("TORTURE_ORDERS", "2"))))
def test_no_order_of_steps_of_workers_breaks_a_guarantee(dsn: str, tmp_path: Path, name: str, seed: int) -> None:
    theatre = Theatre(dsn, tmp_path, chosen(name)[0])
    try:
        play(theatre, random.Random(f"{name} {seed}"), 1_000)
        found = theatre.judge()
        assert not found, "\n".join(map(str, found[:20]))
    finally:
        theatre.close()
