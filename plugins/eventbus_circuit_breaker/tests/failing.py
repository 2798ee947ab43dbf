"""Failures as the worker reports them."""

from __future__ import annotations

from eventbus.plugins import Failure
from eventbus.testing.values import new_failure


def failure(error: BaseException | None = None, *, began: float = 0.0, probe: bool = False) -> Failure:
    """A failure of the queue ``q`` whose call began at that monotonic second."""
    return new_failure(error or OSError("no route"), queue="q", probe=probe, started_at=began)
