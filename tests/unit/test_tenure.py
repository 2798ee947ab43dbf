"""A worker that cannot know whether it still holds its events starts no handler."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from eventbus.consuming.runners import Runner, runner_for
from eventbus.consuming.tenure import Tenure
from eventbus.event import Event
from tests.unit.offered import Finished, deliveries, execution, until

OVER, VALID = -1.0, 60.0


async def on_the_loop(_: Event) -> None:
    """An async handler."""


def in_a_thread(_: Event) -> None:
    """A plain handler."""


async def batch_on_the_loop(_: list[Event]) -> None:
    """An async handler of batches."""


def batch_in_a_thread(_: list[Event]) -> None:
    """A plain handler of batches."""


KINDS = [(on_the_loop, {}), (in_a_thread, {}), (batch_on_the_loop, {"batch": 2}), (batch_in_a_thread, {"batch": 2})]
each_kind = pytest.mark.parametrize(("handler", "options"), KINDS)


def slots(handler: Callable[..., Any], options: dict[str, Any], tenure: Tenure, finish: Finished) -> Runner:
    """Slots of a worker whose tenure is over."""
    tenure.renew(time.monotonic() + OVER)
    made = execution(handler, **options)
    made.tenure = tenure
    return runner_for(made.subscription, made, 2, finish, "tests")


@each_kind
async def test_nothing_starts_after_a_lease_without_an_answered_heartbeat_until_one_is_answered(
    handler: Callable[..., Any], options: dict[str, Any]
) -> None:
    finish, tenure = Finished(), Tenure()
    runner = slots(handler, options, tenure, finish)
    runner.offer(deliveries(4))
    for _ in range(20):
        await asyncio.sleep(0.01)
        assert finish.verdicts == []
    tenure.renew(time.monotonic() + VALID)
    await finish.wait_for(4)
    runner.close()


@each_kind
async def test_what_went_to_others_meanwhile_does_not_start_at_all(
    handler: Callable[..., Any], options: dict[str, Any]
) -> None:
    called: list[Any] = []
    finish, tenure = Finished(), Tenure()
    runner = slots(_watched(handler, called), options, tenure, finish)
    offered = deliveries(4)
    runner.offer(offered)
    offered[0].lease.dropped = True
    tenure.renew(time.monotonic() + VALID)
    await until(lambda: runner.waiting == 0 and runner.running == 0)
    assert called == []
    runner.close()


def _watched(handler: Callable[..., Any], called: list[Any]) -> Callable[..., Any]:
    """The same handler, which notes that it was called."""
    if asyncio.iscoroutinefunction(handler):

        @functools.wraps(handler)
        async def watched(given: Any) -> None:
            called.append(given)

        return watched

    @functools.wraps(handler)
    def watched_in_a_thread(given: Any) -> None:
        called.append(given)

    return watched_in_a_thread
