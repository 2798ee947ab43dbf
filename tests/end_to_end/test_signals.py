"""Each signal is sent when the documentation says, with what it says, and no receiver disturbs the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eventbus import signals
from eventbus.event import Event, OutboxEvent, new_event_id
from eventbus.plugins import Failure, Postpone, hookimpl
from eventbus.retry import RetryPolicy
from eventbus.transport import Discard
from tests.end_to_end.stage import Stage, eventually, seen

pytestmark = [pytest.mark.usefixtures("major"), pytest.mark.parametrize("major", [18], indirect=True)]


class Ear:
    """Hears all signals of one bus."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self._receivers: list[tuple[signals.Signal, Callable[..., None]]] = []

    def listen(self, stage: Stage) -> None:
        """From now on."""
        for name, signal in signals.ALL.items():
            receiver = self._receiver(name)
            signal.connect(receiver, sender=stage.bus)
            self._receivers.append((signal, receiver))

    def _receiver(self, name: str) -> Callable[..., None]:
        def receive(bus: Any, **what: Any) -> None:
            self.heard.append((name, what))

        return receive

    def end(self) -> None:
        """Disconnect."""
        for signal, receiver in self._receivers:
            signal.disconnect(receiver)

    @property
    def names(self) -> list[str]:
        """What was heard, in its order."""
        return [name for name, _ in self.heard]

    def of(self, signal: signals.Signal) -> list[dict[str, Any]]:
        """What came with one signal, each time."""
        return [what for name, what in self.heard if name == signals.name_of(signal)]


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.end()


@pytest.fixture
def stage(dsn: str, ear: Ear) -> Stage:
    """A bus to which the ear listens."""
    stage = Stage(dsn, lease=1.0)
    ear.listen(stage)
    return stage


@pytest.mark.signal("worker_starting", "worker_ready", "worker_draining", "worker_stopped")
async def test_the_life_of_a_worker_is_told_in_its_order(stage: Stage, ear: Ear) -> None:
    stage.subscribe(seen)
    await stage.until_idle()
    assert [name for name in ear.names if name.startswith("worker_")] == [
        "worker_starting", "worker_ready", "worker_draining", "worker_stopped",
    ]  # fmt: skip
    [starting], [ready] = ear.of(signals.worker_starting), ear.of(signals.worker_ready)
    [draining], [stopped] = ear.of(signals.worker_draining), ear.of(signals.worker_stopped)
    assert list(starting["queues"]) == list(ready["queues"]) == ["ledger"]
    assert ready["worker_id"] == draining["worker_id"] == stopped["worker_id"]
    assert stopped["code"] == 0


@pytest.mark.signal("published", "relayed", "claimed", "handled")
async def test_the_way_of_an_event_is_told(stage: Stage, ear: Ear) -> None:
    stage.subscribe(seen)
    [event_id] = stage.publish("orders.created")
    await stage.until_idle()
    way = [name for name in ear.names if not name.startswith("worker_")]
    assert (way[0], sorted(way[1:3]), way[3:]) == ("published", ["claimed", "relayed"], ["handled"])
    [published], [relayed] = ear.of(signals.published), ear.of(signals.relayed)
    [claimed], [handled] = ear.of(signals.claimed), ear.of(signals.handled)
    assert [event.event_id for event in published["events"]] == [event_id]
    assert (relayed["deliveries"], claimed["queue"], claimed["count"]) == ({"ledger": 1}, "ledger", 1)
    assert (handled["queue"], handled["event"].event_id, handled["attempt"]) == ("ledger", event_id, 1)
    assert handled["seconds"] >= 0


@pytest.mark.signal("unrouted")
async def test_a_topic_that_no_queue_wants_is_told(stage: Stage, ear: Ear) -> None:
    stage.bus.subscribe("orders.#", name="ledger")(seen)
    await stage.until_idle()
    stage.publish("refunds.created")
    await stage.until_idle()
    assert [what["topic"] for what in ear.of(signals.unrouted)] == ["refunds.created"]


@pytest.mark.signal("discarded", "retried", "dead_lettered")
async def test_what_did_not_go_well_is_told_with_its_reason(stage: Stage, ear: Ear) -> None:
    async def handle(event: Event) -> Discard | None:
        if event.topic == "test":
            return Discard("a test")
        raise ValueError("no such order")

    stage.subscribe(handle)
    stage.publish("test", "bad")
    await stage.until_idle()
    [discarded], [retried] = ear.of(signals.discarded), ear.of(signals.retried)
    [dead] = ear.of(signals.dead_lettered)
    assert (discarded["queue"], discarded["event"].topic, discarded["reason"]) == ("ledger", "test", "a test")
    assert (retried["event"].topic, retried["attempt"], retried["error"]["message"]) == ("bad", 1, "no such order")
    assert 0 <= retried["delay"] < 1
    assert (dead["event"].topic, dead["attempt"], dead["error"]["type"]) == ("bad", 2, "ValueError")
    assert dead["reason"]


@pytest.mark.signal("skipped")
async def test_a_copy_that_was_not_handled_is_told(stage: Stage, ear: Ear) -> None:
    stage.subscribe(seen, idempotent=True)
    once = OutboxEvent("orders.created", event_id=new_event_id())
    stage.publish(once)
    stage.publish(once)
    await stage.until_idle()
    assert len(ear.of(signals.handled)) == 1
    [skipped] = ear.of(signals.skipped)
    assert (skipped["queue"], skipped["event"].event_id) == ("ledger", once.event_id)


@pytest.mark.signal("released")
async def test_what_is_given_back_at_a_stop_is_told(dsn: str, ear: Ear) -> None:
    stage, begun = Stage(dsn, drain_timeout=0.0), asyncio.Event()
    ear.listen(stage)

    async def stuck(event: Event) -> None:
        begun.set()
        await asyncio.Event().wait()

    stage.subscribe(stuck)
    stage.publish("a")
    async with stage.working():
        await asyncio.wait_for(begun.wait(), 20)
    [released] = ear.of(signals.released)
    assert (released["queue"], released["event"].topic) == ("ledger", "a")


class Patient:
    """Postpones the first failure."""

    def __init__(self) -> None:
        self.times = 0

    @hookimpl
    def eventbus_handler_failed(self, failure: Failure) -> Postpone | None:
        self.times += 1
        return Postpone(0.01) if self.times == 1 else None


@pytest.mark.signal("deferred")
async def test_what_runs_later_without_an_attempt_is_told(dsn: str, ear: Ear) -> None:
    stage, attempts = Stage(dsn, Patient()), []
    ear.listen(stage)

    async def handle(event: Event) -> None:
        attempts.append(event.attempt)
        if len(attempts) == 1:
            raise ValueError("busy")

    stage.subscribe(handle)
    stage.publish("a")
    await stage.until_idle()
    [deferred] = ear.of(signals.deferred)
    assert (deferred["queue"], deferred["event"].topic, deferred["delay"]) == ("ledger", "a", pytest.approx(0.01))
    assert ear.of(signals.retried) == []


@pytest.mark.signal("parked")
async def test_what_waits_behind_an_earlier_event_of_its_key_is_told(stage: Stage, ear: Ear) -> None:
    attempts: list[str] = []

    async def handle(event: Event) -> None:
        attempts.append(event.topic)
        if len(attempts) == 1:
            raise ValueError("busy")

    stage.subscribe(handle, ordered=True, retry=RetryPolicy(max_attempts=2, first=0.2, jitter=False))
    stage.publish(OutboxEvent("first", key="k"), OutboxEvent("second", key="k"))
    await stage.until_idle()
    assert attempts == ["first", "first", "second"]
    assert [(what["queue"], what["event"].topic) for what in ear.of(signals.parked)] == [("ledger", "second")]


@pytest.mark.signal("queue_paused", "probing")
async def test_a_paused_queue_and_its_probe_are_told(stage: Stage, ear: Ear) -> None:
    stage.subscribe(seen)
    await stage.until_idle()
    [(number,)] = stage.query("SELECT id FROM eventbus.queues")
    stage.query("SELECT eventbus.pause_queue(%s, 'test', 'too hot', 0.5, 10)", number)
    stage.publish("a")
    async with stage.working():
        await eventually(lambda: ear.of(signals.probing))
    paused, [probing] = ear.of(signals.queue_paused), ear.of(signals.probing)
    assert (paused[0]["queue"], probing["queue"]) == ("ledger", "ledger")
    assert 0 <= paused[0]["seconds"] <= 0.5


@pytest.mark.signal("took_over", "lease_lost")
async def test_what_one_worker_loses_to_another_is_told_by_both(dsn: str, stage: Stage, ear: Ear) -> None:
    other, begun, go_on = Stage(dsn, lease=1.0), asyncio.Event(), asyncio.Event()
    ear.listen(other)

    async def stuck(event: Event) -> None:
        begun.set()
        await go_on.wait()

    stage.subscribe(stuck)
    other.subscribe(seen)
    stage.publish("a")
    async with stage.working():
        await asyncio.wait_for(begun.wait(), 20)
        silence = asyncio.create_task(stage.silence(lambda: ear.of(signals.took_over) and ear.of(signals.lease_lost)))
        async with other.working():
            await silence
        go_on.set()
    assert ear.of(signals.took_over)[0] == {"workers": 1, "deliveries": 1}
    assert ear.of(signals.lease_lost)[0] == {"queue": "ledger", "deliveries": 1}


@pytest.mark.signal("outage_began", "outage_ended")
async def test_an_outage_is_told_when_it_begins_and_when_it_is_over(stage: Stage, ear: Ear) -> None:
    stage.subscribe(seen)
    async with stage.working():
        await eventually(lambda: "worker_ready" in ear.names)
        with stage.away():
            await eventually(lambda: ear.of(signals.outage_began))
        await eventually(lambda: ear.of(signals.outage_ended))
    [began], [ended] = ear.of(signals.outage_began), ear.of(signals.outage_ended)
    assert began["reason"]
    assert ended["seconds"] >= 0


async def test_receivers_that_fail_disturb_nobody_and_async_ones_are_awaited_in_order(
    stage: Stage, ear: Ear, caplog: pytest.LogCaptureFixture
) -> None:
    topics: list[str] = []

    def broken(bus: Any, **_: Any) -> None:
        raise RuntimeError("no receiver")

    async def slow(bus: Any, *, event: Event, **_: Any) -> None:
        await asyncio.sleep(0.01 if event.topic == "a" else 0)
        topics.append(event.topic)

    signals.handled.connect(broken, sender=stage.bus)
    signals.handled.connect(slow, sender=stage.bus)
    stage.subscribe(seen, concurrency=1)
    stage.publish("a", "b")
    try:
        assert await stage.until_idle() == 0
    finally:
        signals.handled.disconnect(broken)
        signals.handled.disconnect(slow)
    assert topics == ["a", "b"]
    assert len(ear.of(signals.handled)) == 2
    assert "no receiver" in caplog.text
