"""Slots for handlers of batches, and how single deliveries become batches.

Before it: the consumer offers deliveries as they are claimed. After it: ``batches`` handles them together. A batch
starts when it is full, or when its oldest delivery has waited long enough, and a slot is free.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eventbus.consuming.batches import Batches
from eventbus.consuming.execution import Execution
from eventbus.consuming.slots import Finish
from eventbus.consuming.tasks import TaskRunner, forget_cancellation, in_fresh_context
from eventbus.consuming.threads import ThreadRunner
from eventbus.event import Event, current_event
from eventbus.transport import DONE, RELEASED, Delivery, Verdict


class Collector:
    """Deliveries that wait for a batch. ``wait`` in seconds; ``clock`` is monotonic. Used on one event loop.

    ``wake`` is called when a batch that is not full has waited long enough.
    """

    def __init__(self, size: int, wait: float, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self.size = size
        self._wait = wait
        self._clock = clock
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        self._pending: deque[tuple[Delivery, float]] = deque()
        self._alone: deque[Delivery] = deque()

    def __len__(self) -> int:
        return len(self._pending) + len(self._alone)

    def add(self, deliveries: Iterable[Delivery]) -> None:
        """These wait from now on."""
        now = self._clock()
        self._pending.extend((delivery, now) for delivery in deliveries)

    def add_alone(self, deliveries: Iterable[Delivery]) -> None:
        """Each of these is a batch of its own."""
        self._alone.extend(deliveries)

    def ready(self) -> int:
        """How many batches can be taken now. If there is none, ``wake`` is called when there is one."""
        whole, rest = divmod(len(self._pending), self.size)
        late = rest > 0 and self._pending[-rest][1] + self._wait <= self._clock()
        batches = len(self._alone) + whole + late
        if not batches and self._pending:
            self._wake_at(self._pending[0][1] + self._wait)
        return batches

    def take(self) -> list[Delivery]:
        """The next batch; empty if there is none yet."""
        if not self.ready():
            return []
        if self._alone:
            return [self._alone.popleft()]
        return [self._pending.popleft()[0] for _ in range(min(self.size, len(self._pending)))]

    def withdraw(self) -> list[Delivery]:
        """Take back all."""
        taken = [*self._alone, *(delivery for delivery, _ in self._pending)]
        self._alone.clear()
        self._pending.clear()
        return taken

    def close(self) -> None:
        """Wake nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake_at(self, when: float) -> None:
        if self._timer is None:
            delay = max(0.0, when - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._woken)

    def _woken(self) -> None:
        self._timer = None
        self._wake()


def _collector(execution: Execution, wake: Callable[[], None]) -> Collector:
    subscription = execution.subscription
    assert subscription.batch is not None
    return Collector(subscription.batch, subscription.batch_wait, time.monotonic, wake)


def _only_event(batch: Sequence[Delivery]) -> Event | None:
    """The event of a batch of one; of several, none is the current one."""
    return batch[0].event if len(batch) == 1 else None


def _conclude(
    batch: Sequence[Delivery], verdicts: Sequence[Verdict | None], finish: Finish, collector: Collector
) -> None:
    """Tell what came of each delivery; those without a verdict run again by themselves."""
    collector.add_alone(delivery for delivery, verdict in zip(batch, verdicts, strict=True) if verdict is None)
    ended = [(delivery, verdict) for delivery, verdict in zip(batch, verdicts, strict=True) if verdict is not None]
    for delivery, verdict in sorted(ended, key=lambda pair: pair[1] is not DONE):  # what failed knows of what did not
        finish(delivery, verdict)


class BatchTaskRunner(TaskRunner):
    """Async handlers of batches. A slot is one task that handles one batch after the other."""

    def __init__(self, execution: Execution, slots: int, finish: Finish) -> None:
        super().__init__(execution, slots, finish)
        self._collector = _collector(execution, self._fill)
        self._batches = Batches(execution)

    @property
    def running(self) -> int:
        return self._running * self._collector.size

    @property
    def waiting(self) -> int:
        return len(self._collector)

    def offer(self, deliveries: Iterable[Delivery]) -> None:
        self._collector.add(deliveries)
        self._fill()

    def resume(self, delivery: Delivery) -> None:
        self.offer((delivery,))

    def _fill(self) -> None:
        self._open(self._collector.ready())

    def withdraw(self) -> list[Delivery]:
        return self._collector.withdraw()

    def close(self) -> None:
        self._collector.close()

    async def _slot(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        await self._execution.tenure.wait()
        while batch := self._collector.take():
            self._running += 1
            verdicts = await in_fresh_context(self._batches.handle(batch), _only_event(batch))
            overran = task in self._replaced
            if overran:
                self._overruns.ended()
            else:
                self._running -= 1
            _conclude(batch, verdicts, self._finish, self._collector)
            self._fill()
            if overran:
                return
            if task.cancelling():
                await forget_cancellation(task)
            await asyncio.sleep(0)
            await self._execution.tenure.wait()


class BatchThreadRunner(ThreadRunner):
    """Plain handlers of batches. A batch is put together when a thread is free for it."""

    def __init__(self, execution: Execution, slots: int, finish: Finish, name: str) -> None:
        super().__init__(execution, slots, finish, name)
        self._collector = _collector(execution, self._fill)
        self._batches = Batches(execution)

    @property
    def running(self) -> int:
        return super().running * self._collector.size

    @property
    def waiting(self) -> int:
        return len(self._collector) + super().waiting * self._collector.size

    def offer(self, deliveries: Iterable[Delivery]) -> None:
        self._collector.add(deliveries)
        self._fill()

    def _fill(self) -> None:
        while self._unfinished - self._overruns.replaced < self._slots and (batch := self._collector.take()):
            self._put(batch)
        super()._fill()

    def withdraw(self) -> list[Delivery]:
        batches: list[Any] = super().withdraw()
        return [delivery for batch in batches for delivery in batch] + self._collector.withdraw()

    def close(self) -> None:
        self._collector.close()
        super().close()

    def _handle(self, batch: Any) -> Any:
        self._execution.tenure.wait_blocking()
        context = contextvars.Context()
        context.run(current_event.set, _only_event(batch))
        return context.run(self._batches.handle_blocking, batch)

    def _event_of(self, batch: Any) -> Event | None:
        return _only_event(batch)

    async def _handle_returned(self, _batch: Any, unfinished: Any) -> Any:
        return await self._batches.handle_returned(unfinished)

    def _conclude(self, batch: Any, verdicts: Any) -> None:
        _conclude(batch, verdicts or [RELEASED] * len(batch), self._finish, self._collector)
        self._fill()
