"""Plugins: what extends one bus. ``hookspecs`` lists the extension points, ``values`` what crosses the border.

A plugin imports from here and from :mod:`eventbus.hookspecs`; the rest of this package is how the bus calls it.
"""

from eventbus.plugins.clock import DatabaseClock
from eventbus.plugins.marks import hookimpl
from eventbus.plugins.values import (
    Answer,
    Call,
    Counted,
    Duty,
    Failure,
    Finding,
    Migration,
    OutcomeName,
    Page,
    Postpone,
    QueueFacts,
    Result,
    Settled,
    Timing,
    WorkerHandle,
    by_calls,
)

__all__ = [
    "Answer",
    "Call",
    "Counted",
    "DatabaseClock",
    "Duty",
    "Failure",
    "Finding",
    "Migration",
    "OutcomeName",
    "Page",
    "Postpone",
    "QueueFacts",
    "Result",
    "Settled",
    "Timing",
    "WorkerHandle",
    "by_calls",
    "hookimpl",
]
