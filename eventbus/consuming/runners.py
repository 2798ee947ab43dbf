"""Chooses the slots in which the handlers of a queue run.

Before them: the consumer offers claimed deliveries. After them: ``finish`` gets each delivery with its verdict, on
the event loop.
"""

from __future__ import annotations

from eventbus.consuming.batching import BatchTaskRunner, BatchThreadRunner
from eventbus.consuming.execution import Execution
from eventbus.consuming.slots import Finish, Runner
from eventbus.consuming.subscriptions import Subscription
from eventbus.consuming.tasks import TaskRunner
from eventbus.consuming.threads import ThreadRunner

__all__ = ["Finish", "Runner", "TaskRunner", "ThreadRunner", "runner_for"]


def runner_for(subscription: Subscription, execution: Execution, slots: int, finish: Finish, name: str) -> Runner:
    """Tasks for async handlers, threads (named after ``name``) for plain ones, of single events or of batches."""
    if subscription.handler.is_async:
        kind = TaskRunner if subscription.batch is None else BatchTaskRunner
        return kind(execution, slots, finish)
    in_threads = ThreadRunner if subscription.batch is None else BatchThreadRunner
    return in_threads(execution, slots, finish, name)
