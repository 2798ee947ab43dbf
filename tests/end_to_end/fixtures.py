"""Fixtures of the scenarios that are played from the outside, with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.end_to_end.processes import Nursery
from tests.end_to_end.scene import NewScene, Scene, played


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where the processes of all scenarios are born."""
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def scene(dsn: str, tmp_path: Path, nursery: Nursery) -> Iterator[Scene]:
    """A scenario in a new database with the bus's schema."""
    with played(dsn, tmp_path, nursery) as scene:
        yield scene


@pytest.fixture
def new_scene(tmp_path: Path, nursery: Nursery) -> Iterator[NewScene]:
    """Make a scenario in a database that the test has prepared itself, or that is not there yet."""
    with ExitStack() as stack:
        yield lambda dsn: stack.enter_context(played(dsn, tmp_path, nursery))
