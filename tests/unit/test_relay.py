"""The relay on a scripted engine: what it does after each kind of tick, and when it sleeps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from eventbus.errors import Unavailable
from eventbus.publishing.relay import Relay
from eventbus.publishing.ticks import Fill, Tick
from eventbus.transport import StatementCancelled

IDLE = Tick("idle", more=False, events=0, deliveries=0, fed=(), unknown=(), due_in=None)


def ticked(events: int, *fed: int, more: bool = False) -> Tick:
    """A tick that relayed something."""
    return Tick("ticked", more=more, events=events, deliveries=events, fed=fed, unknown=(), due_in=None)


def found(state: Any, *unknown: str, due_in: float | None = None) -> Tick:
    """A tick that relayed nothing."""
    return Tick(state, more=False, events=0, deliveries=0, fed=(), unknown=unknown, due_in=due_in)


class ScriptedRelayEngine:
    """Implements ``RelayEngine``: each tick takes the next of ``ticks``, and finds nothing when there is none."""

    def __init__(self) -> None:
        self.ticks: deque[Tick | BaseException] = deque()
        self.order: list[str] = []
        self.calls: Counter[str] = Counter()
        self.limits: list[int] = []
        self.bound = (7, [(1, "orders.*"), (2, "#"), (3, "orders.created")])
        self.resolutions: deque[bool] = deque()
        self.resolved: list[tuple[int, Mapping[str, Sequence[int]]]] = []
        self.sleeps: list[float] = []
        self.due: deque[int] = deque()
        """How many events each call of ``fire_due`` fires; 1 if nothing is said."""
        self.filling_queues: list[int] = []
        self.fills: deque[Fill] = deque()
        self.publishing = False
        """A publisher is in the middle of a transaction."""

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"never came true; the calls were {self.order[-20:]}"
            await asyncio.sleep(0.001)

    async def still(self) -> None:
        """Wait until it sleeps for good."""
        calls = -1
        while calls != len(self.order):
            calls = len(self.order)
            await asyncio.sleep(0.05)

    async def tick(self, limit: int) -> Tick:
        self.limits.append(limit)
        await self._enter("tick")
        result = self.ticks.popleft() if self.ticks else IDLE
        if isinstance(result, BaseException):
            raise result
        return result

    async def bindings(self) -> tuple[int, Sequence[tuple[int, str]]]:
        await self._enter("bindings")
        return self.bound

    async def resolve(self, version: int, routes: Mapping[str, Sequence[int]]) -> bool:
        await self._enter("resolve")
        self.resolved.append((version, routes))
        return self.resolutions.popleft() if self.resolutions else True

    async def fall_asleep(self, seconds: float) -> bool:
        self.sleeps.append(seconds)
        await self._enter("fall_asleep")
        return self.publishing

    async def filling(self) -> Mapping[int, str]:
        return {
            queue_id: f"q{queue_id}" for queue_id in self.filling_queues
        }  # not in the order of calls: every relay looks now and then

    async def fill(self, queue_id: int, limit: int) -> Fill:
        await self._enter(f"fill {queue_id}")
        fill = self.fills.popleft()
        if fill.state in ("filled", "active"):
            self.filling_queues.remove(queue_id)
        return fill

    async def fire_due(self, limit: int) -> int:
        await self._enter("fire_due")
        return self.due.popleft() if self.due else 1

    async def attach(self) -> str:
        await self._enter("attach")
        return "resumed"

    async def recover(self) -> None:
        await self._enter("recover")

    async def _enter(self, call: str) -> None:
        self.order.append(call)
        self.calls[call] += 1
        await asyncio.sleep(0)


class Scene:
    """A relay, its engine, and what it has fed."""

    def __init__(self, *, notify: bool = True) -> None:
        self.engine = ScriptedRelayEngine()
        self.fed: list[Sequence[int]] = []
        self.relay = Relay(self.engine, batch=1_000, notify=notify, fed=self.fed.append, random=lambda: 0.0)
        self.relay.poll_interval = 600

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the relay within the block, then stop it; it must end."""
        task = asyncio.create_task(self.relay.run())
        try:
            yield
            self.relay.stop()
            async with asyncio.timeout(5):
                await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_whoever_was_fed_is_told_and_what_is_left_follows_at_once() -> None:
    scene = Scene()
    scene.engine.ticks.extend([ticked(1_000, 1, 2, more=True), ticked(3, 2), ticked(2)])
    async with scene.running():
        await scene.engine.until(lambda: scene.relay.idle_ticks)
    assert scene.fed == [(1, 2), (2,)]
    assert scene.relay.delivered == 1_005


async def test_an_idle_relay_asks_to_be_woken_looks_once_more_and_sleeps() -> None:
    scene = Scene()
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["fall_asleep"])
        await scene.engine.still()
        assert scene.engine.order[-2:] == ["fall_asleep", "tick"], "what was published in between would wait"


async def test_a_sleeping_relay_wakes_when_something_is_published() -> None:
    scene = Scene()
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["fall_asleep"])
        await scene.engine.still()
        scene.engine.ticks.append(ticked(1, 5))
        scene.relay.wake()
        await scene.engine.until(lambda: scene.fed == [(5,)])


async def test_a_sleep_that_ends_by_itself_is_asked_for_again_before_it_looks() -> None:
    scene = Scene()
    scene.relay.poll_interval = 0.05
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["fall_asleep"] == 4)
    assert set(scene.engine.sleeps) == {0.05}, "publishers would notify a relay that is not asleep, or not notify it"
    after = scene.engine.order[scene.engine.order.index("fall_asleep") :]
    assert after[:6] == ["fall_asleep", "tick"] * 3


async def test_a_publisher_that_saw_the_relay_awake_is_waited_for_with_longer_and_longer_looks() -> None:
    scene = Scene()
    scene.engine.publishing = True
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["fall_asleep"] >= 5)
        scene.engine.ticks.append(ticked(1, 5))
        await scene.engine.until(lambda: scene.fed == [(5,)])
    assert scene.engine.calls["tick"] < 30


async def test_without_notifications_it_looks_again_and_again_and_never_sleeps() -> None:
    scene = Scene(notify=False)
    scene.relay.poll_interval = 0.02
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["tick"] > 10)
    assert not scene.engine.calls["fall_asleep"]


async def test_an_unknown_topic_is_routed_to_every_queue_whose_pattern_matches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    scene.engine.bound = (7, [(1, "orders.*"), (2, "#"), (3, "orders.created"), (1, "orders.created")])
    scene.engine.ticks.extend([found("unknown", "orders.created", "orders.eu.created"), ticked(2, 1, 2, 3)])
    with caplog.at_level(logging.WARNING, "eventbus"):
        async with scene.running():
            await scene.engine.until(lambda: scene.fed)
    assert scene.engine.resolved == [(7, {"orders.created": [1, 2, 3], "orders.eu.created": [2]})]
    assert not caplog.records


async def test_a_topic_that_no_queue_wants_is_told(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.engine.bound = (7, [(1, "orders.*")])
    scene.engine.ticks.append(found("unknown", "oders.created"))
    with caplog.at_level(logging.WARNING, "eventbus"):
        async with scene.running():
            await scene.engine.until(lambda: scene.engine.resolved)
    assert scene.engine.resolved == [(7, {"oders.created": []})]
    assert [record.__dict__["topic"] for record in caplog.records] == ["oders.created"]


async def test_routes_that_were_outdated_before_they_were_stored_are_computed_again() -> None:
    scene = Scene()
    scene.engine.resolutions.append(False)
    scene.engine.ticks.extend([found("unknown", "orders.created")] * 2)
    async with scene.running():
        await scene.engine.until(lambda: len(scene.engine.resolved) == 2)
    assert scene.engine.calls["bindings"] == 2


async def test_scheduled_events_are_fired_when_they_are_due_and_not_at_the_next_poll() -> None:
    scene = Scene()
    until = time.monotonic() + 0.3
    scene.engine.ticks.extend([found("idle", due_in=-1.0)])
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["fire_due"] == 1)
        await scene.engine.still()
        due = found("idle", due_in=0.3)
        scene.engine.ticks.extend([due] * 3)
        scene.relay.wake()
        await scene.engine.until(lambda: not scene.engine.ticks)
        scene.engine.ticks.append(found("idle", due_in=0.0))
        await scene.engine.until(lambda: scene.engine.calls["fire_due"] == 2)
    assert time.monotonic() >= until


async def test_a_due_event_that_somebody_is_cancelling_does_not_keep_the_database_busy_until_that_is_decided() -> None:
    scene = Scene()
    scene.engine.ticks.extend([found("idle", due_in=-1.0)] * 10_000)
    scene.engine.due.extend([0] * 10_000)
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["fire_due"] >= 2)
        before, began = scene.engine.calls["fire_due"], time.monotonic()
        await scene.engine.until(lambda: scene.engine.calls["fire_due"] > before + 4)
        assert time.monotonic() - began > 0.1
        scene.engine.due.clear()
        scene.engine.ticks.clear()
        await scene.engine.still()


async def test_a_tick_that_runs_into_a_timeout_is_repeated_with_smaller_steps_which_grow_again() -> None:
    scene = Scene()
    scene.engine.ticks.extend([StatementCancelled("too slow"), StatementCancelled("too slow")])
    scene.engine.ticks.extend([ticked(1, 1, more=True)] * 20)
    async with scene.running():
        await scene.engine.until(lambda: scene.relay.delivered == 20)
    assert scene.engine.limits[:3] == [1_000, 500, 250]
    assert scene.engine.limits[2:6] == [250, 312, 390, 487]
    assert max(scene.engine.limits) == 1_000
    assert scene.engine.calls["recover"] == 2


async def test_a_step_is_never_smaller_than_one_event() -> None:
    scene = Scene()
    scene.engine.ticks.extend([StatementCancelled("too slow")] * 15)
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["recover"] == 15)
    assert min(scene.engine.limits) == 1


@pytest.mark.parametrize("call", ["tick", "bindings", "fall_asleep"])
async def test_it_goes_on_after_an_outage_in_any_step(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    works, failed = getattr(scene.engine, call), list[str]()

    async def fail_once(*arguments: Any) -> Any:
        if not failed:
            failed.append(call)
            raise Unavailable("gone")
        return await works(*arguments)

    monkeypatch.setattr(scene.engine, call, fail_once)
    scene.engine.ticks.append(found("unknown", "orders.created"))
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["recover"] == 1)
        scene.engine.ticks.append(ticked(1, 1))
        scene.relay.wake()
        await scene.engine.until(lambda: scene.fed == [(1,)])


async def test_a_restored_database_is_attached_before_anything_is_relayed() -> None:
    scene = Scene()
    scene.engine.ticks.extend([found("foreign"), ticked(1, 1)])
    async with scene.running():
        await scene.engine.until(lambda: scene.fed)
    assert scene.engine.order[:3] == ["tick", "attach", "tick"]


async def test_a_paused_bus_is_told_once_and_looked_at_until_it_runs_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("eventbus.publishing.relay._PAUSED_POLL", 0.005)
    scene = Scene()
    scene.engine.ticks.extend([found("paused")] * 5 + [ticked(1, 1)] + [found("paused")] * 2)
    with caplog.at_level(logging.WARNING, "eventbus"):
        async with scene.running():
            await scene.engine.until(lambda: not scene.engine.ticks)
    assert scene.fed == [(1,)]
    assert [record.message for record in caplog.records] == ["the bus is paused; `eventbus resume` starts it again"] * 2


async def test_a_relay_that_finds_another_at_work_looks_again_soon() -> None:
    scene = Scene()
    scene.engine.ticks.extend([found("busy"), found("busy"), ticked(1, 1)])
    async with scene.running():
        await scene.engine.until(lambda: scene.fed == [(1,)])
    assert scene.engine.calls["tick"] < 10


async def test_a_relay_leaves_events_to_the_one_that_relayed_last() -> None:
    scene = Scene()
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["fall_asleep"])
        await scene.engine.still()
        before = scene.engine.calls["tick"]
        scene.relay.heard()
        for _ in range(5):
            scene.relay.wake()
            await asyncio.sleep(0.005)
            scene.relay.heard()
        await scene.engine.still()
        assert scene.engine.calls["tick"] == before, "it looked although another relay had relayed"


async def test_an_event_is_not_left_lying_when_the_relay_that_relayed_last_is_gone() -> None:
    scene = Scene()
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["fall_asleep"])
        await scene.engine.still()
        scene.relay.heard()
        scene.engine.ticks.append(ticked(1, 1))
        began = time.monotonic()
        scene.relay.wake()
        await scene.engine.until(lambda: scene.fed == [(1,)])
        assert time.monotonic() - began < 0.5
        scene.engine.ticks.append(ticked(1, 2))
        scene.relay.wake()
        await scene.engine.until(lambda: len(scene.fed) == 2)


@pytest.mark.parametrize("others", [False, True])
async def test_a_stop_ends_it_whatever_it_waits_for(others: bool) -> None:
    scene = Scene()
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["fall_asleep"])
        await scene.engine.still()
        if others:
            scene.relay.heard()
            scene.relay.wake()


def filled(state: Any, deliveries: int = 0, *unknown: str) -> Fill:
    """A step of a queue that is filling."""
    return Fill(state, events=deliveries, deliveries=deliveries, unknown=unknown)


async def test_queues_that_begin_with_the_earliest_event_are_filled_in_turn_while_the_relay_is_busy() -> None:
    scene = Scene()
    scene.engine.filling_queues = [7, 8]
    scene.engine.ticks.extend([ticked(1_000, 1, more=True)] * 5)
    scene.engine.fills.extend([filled("more", 3), filled("more"), filled("filled", 2), filled("filled", 1)])
    async with scene.running():
        await scene.engine.until(lambda: scene.relay.idle_ticks and not scene.engine.filling_queues)
    assert scene.engine.order[:8] == ["tick", "fill 7", "tick", "fill 8", "tick", "fill 7", "tick", "fill 8"]
    assert [[*queues] for queues in scene.fed if 1 not in queues] == [[7], [7], [8]]


async def test_the_log_calls_a_queue_that_was_filled_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.engine.filling_queues = [257]
    scene.engine.fills.extend([filled("more", 3), filled("filled")])
    with caplog.at_level(logging.INFO, "eventbus"):
        async with scene.running():
            await scene.engine.until(lambda: caplog.records)
    assert caplog.messages == ["queue q257 has everything that was relayed before it began"]


async def test_a_relay_without_anything_fresh_does_not_sleep_while_a_queue_is_filled() -> None:
    scene = Scene()
    scene.engine.filling_queues = [7]
    scene.engine.fills.extend([filled("more")] * 100 + [filled("busy"), filled("active")])
    async with scene.running():
        await scene.engine.until(lambda: not scene.engine.filling_queues)
        await scene.engine.until(lambda: scene.engine.calls["fall_asleep"])
    assert scene.engine.order.index("fall_asleep") > 200, "it slept before the queue was filled"


async def test_topics_that_only_old_events_have_are_resolved_without_a_complaint_that_nobody_wants_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    scene.engine.filling_queues = [7]
    scene.engine.bound = (7, [(7, "orders.*")])
    scene.engine.fills.extend([filled("unknown", 0, "orders.old", "users.old"), filled("filled", 1)])
    with caplog.at_level(logging.WARNING, "eventbus"):
        async with scene.running():
            await scene.engine.until(lambda: scene.fed)
    assert scene.engine.resolved == [(7, {"orders.old": [7], "users.old": []})]
    assert not caplog.records


async def test_a_queue_whose_filler_died_is_found_and_filled_by_a_relay_that_already_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eventbus.publishing.filling._LOOK_SECONDS", 0.01)
    scene = Scene()
    scene.relay.poll_interval = 0.02
    async with scene.running():
        await scene.engine.until(lambda: scene.engine.calls["fall_asleep"] >= 2)
        scene.engine.fills.append(filled("filled", 1))
        scene.engine.filling_queues = [9]
        await scene.engine.until(lambda: scene.fed == [[9]])
