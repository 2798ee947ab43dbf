"""The bench shows a plugin what a worker would show it, and hides no mistake from its author."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from eventbus.errors import ConfigurationError, Unavailable
from eventbus.hookspecs import Around
from eventbus.plugins import Call, QueueFacts, Settled, WorkerHandle, hookimpl
from eventbus.testing.plugins import PluginBench
from eventbus.testing.values import new_call, new_event, new_failure, new_queue, new_result, new_settled
from eventbus.testing.workers import BenchWorker


class Counter:
    """Counts."""

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

        step: int = 1

    def __init__(self, settings: Settings) -> None:
        self.step = settings.step
        self.total = 0
        self.told: list[str] = []

    @hookimpl
    def eventbus_settled(self, settled: Settled) -> None:
        self.total += self.step * len(settled.results)

    @hookimpl
    def eventbus_limit_claim(self, queue: str, room: int) -> int:
        return min(room, 3) if queue == "ledger" else room

    @hookimpl
    def eventbus_around_handler(self, queue: QueueFacts) -> Around:
        @contextmanager
        def told(call: Call) -> Iterator[None]:
            self.told.append(f"{queue.name} begins {call.event.topic}")
            try:
                yield
            finally:
                self.told.append("ends")

        return told

    @hookimpl
    async def eventbus_worker_ready(self, worker: WorkerHandle) -> None:
        await worker.rows("SELECT 1")


class Broken:
    @hookimpl
    def eventbus_claimed(self, count: int) -> None:
        raise ValueError("no such number")


def test_a_hook_gets_the_arguments_that_it_takes_and_answers() -> None:
    bench = PluginBench(Counter, {"step": 2})
    bench.call("eventbus_settled", queue="ledger", settled=new_settled("done", "retry"))
    assert bench.instance.total == 4
    assert bench.call("eventbus_limit_claim", queue="ledger", room=10, held=0) == 3
    assert bench.hooks == [
        "eventbus_around_handler", "eventbus_limit_claim", "eventbus_settled", "eventbus_worker_ready",
    ]  # fmt: skip


def test_queues_are_chosen_as_in_a_worker() -> None:
    bench = PluginBench(Counter, {"queues": ["led*"], "except_queues": ["ledger"]})
    assert bench.call("eventbus_limit_claim", queue="ledger", room=10, held=0) is None
    assert bench.call("eventbus_limit_claim", queue="leds", room=10, held=0) == 10
    assert bench.call("eventbus_around_handler", queue=new_queue("ledger")) is None


def test_a_hook_that_the_plugin_does_not_have_answers_nothing() -> None:
    assert PluginBench(Counter).call("eventbus_relayed", deliveries={}) is None


def test_what_a_hook_raises_fails_the_test() -> None:
    with pytest.raises(ValueError, match="no such number"):
        PluginBench(Broken).call("eventbus_claimed", queue="ledger", count=1)


@pytest.mark.parametrize(
    ("hook", "given", "reason"),
    [
        ("eventbus_setled", {}, "there is no hook eventbus_setled"),
        ("eventbus_claimed", {"number": 1}, "eventbus_claimed has no number; it has queue, count"),
        ("eventbus_claimed", {"queue": "a"}, "eventbus_claimed of broken takes count too"),
    ],
)
def test_a_test_that_calls_what_no_worker_calls_is_told(hook: str, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        PluginBench(Broken).call(hook, **given)


def test_a_setting_that_would_stop_a_worker_stops_the_test() -> None:
    with pytest.raises(ConfigurationError, match="unknown setting stepp of plugin counter; did you mean step"):
        PluginBench(Counter, {"stepp": 2})


def test_a_misspelt_hook_stops_the_test() -> None:
    class Misspelt:
        @hookimpl
        def eventbus_setled(self) -> None: ...

    with pytest.raises(ConfigurationError, match="there is no hook eventbus_setled; did you mean eventbus_settled"):
        PluginBench(Misspelt)


def test_what_surrounds_a_call_surrounds_the_block() -> None:
    bench = PluginBench(Counter)

    def handle(seen: list[str]) -> None:
        seen.append("runs")
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"), bench.around(new_call(new_event("orders.created"), queue="ledger")):
        handle(bench.instance.told)
    assert bench.instance.told == ["ledger begins orders.created", "runs", "ends"]


def test_a_plugin_without_surroundings_leaves_the_block_alone() -> None:
    with PluginBench(Broken).around(new_call()):
        pass


async def test_what_a_plugin_asks_of_a_worker_is_remembered_and_answered() -> None:
    worker = BenchWorker([new_queue("ledger")])
    worker.answers = [[(1,)], Unavailable("away")]
    await PluginBench(Counter).call("eventbus_worker_ready", worker=worker)
    with pytest.raises(Unavailable):
        await worker.rows("SELECT %s", (2,))
    assert await worker.rows("SELECT 3") == []
    assert worker.statements == [("SELECT 1", ()), ("SELECT %s", (2,)), ("SELECT 3", ())]
    assert list(worker.queues) == ["ledger"]


async def test_a_worker_on_the_bench_does_what_a_worker_can_be_asked_for() -> None:
    worker = BenchWorker()
    handle: WorkerHandle = worker
    await handle.pause("ledger", "mine", "too hot", 30.0)
    handle.hold("ledger", 1.0)
    handle.wake("ledger")
    assert await handle.resume("ledger", "mine") is True
    assert await handle.resume("ledger", "other") is False
    assert [request[0] for request in worker.requests] == ["pause", "hold", "wake", "resume", "resume"]


def test_values_are_what_a_worker_would_hand_over() -> None:
    event = new_event("orders.created", {"order": 17}, queue="ledger", headers={"tenant": "acme"}, attempt=2)
    assert (event.payload, event.headers["tenant"], event.queue, event.attempt) == ({"order": 17}, "acme", "ledger", 2)
    failure = new_failure(ValueError("no"), event=event, queue="ledger")
    assert (failure.event, failure.outcome, failure.probe) == (event, "retry", False)
    settled = new_settled("done", "duplicate", new_result("dead", event=event, reason="no"), queue="ledger")
    assert settled.counts == {"done": 1, "duplicate": 1, "dead": 1}
    assert settled.has_failures
    assert not new_settled("done", "duplicate").has_failures
    assert new_queue("ledger", ordered=True).ordered
