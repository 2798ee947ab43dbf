"""What handlers may do: raise anything, cancel themselves, leak context, return odd things. The consumer goes on."""

from __future__ import annotations

import asyncio
import contextvars
import decimal
import functools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg
import pydantic
import pytest

from eventbus import DeadLetter, Discard, Event, Retry, RetryPolicy
from eventbus.event import current_event
from tests.end_to_end.checker import Letter
from tests.end_to_end.scene import FAST_RETRY, Scene, one_server

TWICE = RetryPolicy(max_attempts=2, first=0.02, factor=1.0, jitter=False)


async def consume(scene: Scene) -> None:
    """Handle everything that is subscribed to the scene's bus until nothing is left."""
    async with asyncio.timeout(30):
        assert await scene.bus.worker(until_idle=True).run() == 0


def prepare(scene: Scene, *names: str) -> None:
    """Make the queues that the handlers of this test are going to be subscribed to, all with the pattern ``#``."""
    scene.prepare(*({"name": name, "pattern": "#"} for name in names))


def letters(scene: Scene, queue: str, ids: list[str]) -> list[Letter]:
    """The dead letters of these events, in their order; every one must be there."""
    dead = scene.check.dead(queue)
    return [dead[event_id] for event_id in ids]


class Unusual(BaseException):
    """Not an Exception."""


class Picky(Exception):
    """Cannot be made again from its ``args``, nor pickled."""

    def __init__(self, code: int, lock: Any) -> None:
        super().__init__(f"code {code}")
        self.lock = lock


FATAL: dict[str, Callable[[], BaseException]] = {
    "exit 0": lambda: SystemExit(0),
    "exit 1": lambda: SystemExit(1),
    "ctrl-c": KeyboardInterrupt,
    "generator exit": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "base exception": lambda: Unusual("odd"),
    "time-out": TimeoutError,
    "stop iteration": StopIteration,
    "stop async iteration": StopAsyncIteration,
}


@one_server
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_hnd_05_whatever_a_handler_raises_is_a_failed_attempt_and_ends_nothing_else(
    scene: Scene, kind: str
) -> None:
    prepare(scene, "fatal")
    finished: Counter[str] = Counter()
    everyone_failed = threading.Event()

    def begin(event: Event) -> None:
        if (wish := event.payload["raise"]) in FATAL:
            error = FATAL[wish]()
            raise error

    if kind == "async":

        @scene.bus.subscribe("#", name="fatal", retry=TWICE, concurrency=4)
        async def handle(event: Event) -> None:
            begin(event)
            if event.payload["raise"] == "good":
                assert await asyncio.to_thread(everyone_failed.wait, 20)
            finished[str(event.event_id)] += 1
    else:

        @scene.bus.subscribe("#", name="fatal", retry=TWICE, concurrency=4)
        def handle_in_thread(event: Event) -> None:
            begin(event)
            if event.payload["raise"] == "good":
                assert everyone_failed.wait(20)
            finished[str(event.event_id)] += 1

    good = scene.publish("a", *[{"raise": "good"}] * 3)
    bad = scene.publish("a", *[{"raise": wish} for wish in FATAL])
    worker = asyncio.create_task(consume(scene))
    while len(scene.check.dead("fatal")) < len(bad):
        await asyncio.sleep(0.02)
        assert not worker.done()
    assert not finished, "the three good ones were disturbed"
    later = scene.publish("a", {"raise": "nothing"})
    everyone_failed.set()
    await worker
    assert finished == dict.fromkeys(good + later, 1)
    for letter in letters(scene, "fatal", bad):
        assert (letter.attempts, letter.crashes, letter.reason) == (2, 0, "gave up after 2 attempts")


@one_server
def test_hnd_05_an_exit_in_a_task_that_a_handler_started_does_not_end_the_process(scene: Scene) -> None:
    queue = {"name": "all", "pattern": "#", "retry": FAST_RETRY | {"max_attempts": 2}}
    scene.prepare(queue)
    consumer = scene.consume(queue)
    awaited = scene.publish("a", {"exit_in": "group"})
    forgotten = scene.publish("a", {"exit_in": "task"})
    called = scene.publish("a", {"exit_in": "callback"})
    fine = scene.publish("a", {})
    scene.check.verify("all")
    assert set(scene.check.dead("all")) == set(awaited)
    assert set(scene.check.successes("all")) == {*forgotten, *called, *fine}
    assert consumer.terminate() == 0


@one_server
async def test_a_handler_that_cancels_its_own_task_disturbs_no_other_event(scene: Scene) -> None:
    prepare(scene, "cancels")
    seen: list[str] = []

    @scene.bus.subscribe("#", name="cancels", retry=TWICE, concurrency=1)
    async def handle(event: Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        if event.topic == "returns":
            task.cancel()
        if event.topic == "waits":
            task.cancel()
            await asyncio.sleep(10)
        if event.topic == "later":
            asyncio.get_running_loop().call_later(0.01, task.cancel)
        if event.topic == "sleeps":
            await asyncio.sleep(0.03)
        seen.append(event.topic)

    topics = ["returns", "fine", "waits", "fine", "later", "sleeps", "fine", "later", "fine"]
    for topic in topics:
        scene.publish(topic, {})
    await consume(scene)
    assert Counter(seen) == Counter(topics) - Counter(["waits"])
    assert [letter.attempts for letter in scene.check.dead("cancels").values()] == [2]


@one_server
async def test_time_outs_task_groups_and_generators_inside_a_handler_work_as_everywhere(scene: Scene) -> None:
    prepare(scene, "structured")
    seen: list[str] = []

    async def count() -> Any:
        for number in range(3):
            await asyncio.sleep(0)
            yield number

    @scene.bus.subscribe("#", name="structured", retry=RetryPolicy(max_attempts=1), concurrency=3)
    async def handle(event: Event) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(10)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asyncio.sleep(0.001, result=number)) for number in range(3)]
        assert [task.result() for task in tasks] == [0, 1, 2]
        assert [number async for number in count()] == [0, 1, 2]
        await asyncio.wait_for(asyncio.shield(asyncio.sleep(0.001)), 1)
        with pytest.raises(ExceptionGroup):
            await fail_in_a_group()
        seen.append(str(event.event_id))

    async def fail_in_a_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(10))
            group.create_task(fail())

    async def fail() -> None:
        raise ValueError("in a group")

    ids = scene.publish("a", *[{}] * 12)
    await consume(scene)
    assert sorted(seen) == sorted(ids)
    assert not scene.check.dead("structured")


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="fresh")


@one_server
async def test_hnd_09_every_event_gets_a_fresh_context_with_its_own_event_in_it(scene: Scene) -> None:
    prepare(scene, "tasks", "threads")
    found: dict[str, list[tuple[str, int, bool]]] = defaultdict(list)
    VARIABLE.set("of the code that started the worker")

    def look(event: Event) -> None:
        found[event.queue].append((VARIABLE.get(), decimal.getcontext().prec, current_event.get() is event))
        VARIABLE.set(f"left over from {event.event_id}")
        decimal.getcontext().prec = 3

    @scene.bus.subscribe("#", name="tasks", concurrency=2)
    async def in_task(event: Event) -> None:
        look(event)
        await asyncio.sleep(0.001)
        assert current_event.get() is event
        assert VARIABLE.get() == f"left over from {event.event_id}", "the context changed in the middle of a handler"
        async with asyncio.TaskGroup() as group:
            inner = group.create_task(see())
        assert inner.result() is event
        assert await asyncio.to_thread(current_event.get) is event

    async def see() -> Event | None:
        return current_event.get()

    @scene.bus.subscribe("#", name="threads", concurrency=2)
    def in_thread(event: Event) -> None:
        look(event)

    scene.publish("a", *[{}] * 20)
    await consume(scene)
    default = decimal.DefaultContext.prec
    assert found == {queue: [("fresh", default, True)] * 20 for queue in ("tasks", "threads")}
    assert not scene.check.dead("tasks")
    assert VARIABLE.get() == "of the code that started the worker"


@one_server
async def test_hnd_11_a_coroutine_is_awaited_however_the_handler_comes_to_return_it(scene: Scene) -> None:
    ran: Counter[str] = Counter()

    async def work(name: str, event: Event) -> None:
        await asyncio.sleep(0.001)
        assert current_event.get() is event
        ran[name] += 1

    class Worker:
        async def __call__(self, event: Event) -> None:
            await work("object", event)

    class Namespace:
        @staticmethod
        async def static(event: Event) -> None:
            await work("static method", event)

        async def method(self, event: Event) -> None:
            await work("method", event)

    def wrapper(event: Event) -> Awaitable[None]:
        return work("wrapper", event)

    handlers: dict[str, Callable[..., Any]] = {
        "partial": functools.partial(work, "partial"),
        "object": Worker(),
        "static method": Namespace.static,
        "method": Namespace().method,
        "wrapper": wrapper,
        "lambda": lambda event: work("lambda", event),
    }
    for name, handler in handlers.items():
        queue = name.replace(" ", "-")
        prepare(scene, queue)
        scene.bus.subscribe("#", name=queue)(handler)
    scene.publish("a", *[{}] * 5)
    await consume(scene)
    assert ran == dict.fromkeys(handlers, 5)


class Order(pydantic.BaseModel):
    """What the typed handler wants."""

    number: int


@one_server
async def test_a_payload_that_does_not_fit_is_a_dead_letter_at_once_with_the_reason(scene: Scene) -> None:
    prepare(scene, "typed")
    seen: list[int] = []

    @scene.bus.subscribe("#", name="typed", retry=RetryPolicy(max_attempts=5, first=60))
    async def handle(order: Order) -> None:
        seen.append(order.number)

    good = scene.publish("a", {"number": 7})
    bad = scene.publish("a", {"number": "seven"}, {}, ["number"])
    await consume(scene)
    assert seen == [7]
    assert set(scene.check.dead("typed")) == set(bad)
    for letter in letters(scene, "typed", bad):
        assert (letter.attempts, letter.reason) == (1, "payload mismatch")
        assert letter.error
    assert good[0] not in scene.check.dead("typed")


@one_server
@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_outcomes_that_a_handler_returns_are_obeyed(scene: Scene, kind: str) -> None:
    prepare(scene, "returns")
    attempts: dict[str, list[tuple[int, float]]] = defaultdict(list)

    def decide(event: Event) -> Any:
        attempts[event.topic].append((event.attempt, time.monotonic()))
        match event.topic:
            case "retry":
                return Retry(after=0.3) if event.attempt == 1 else None
            case "always":
                return Retry(after=0, reason="not yet")
            case "discard":
                return Discard("not ours")
            case "give-up":
                return DeadLetter("no such customer")
            case _:
                return "whatever"

    if kind == "sync":
        scene.bus.subscribe("#", name="returns", retry=RetryPolicy(max_attempts=3))(decide)
    else:

        @scene.bus.subscribe("#", name="returns", retry=RetryPolicy(max_attempts=3))
        async def handle(event: Event) -> Any:
            return decide(event)

    ids = {topic: scene.publish(topic, {})[0] for topic in ("retry", "always", "discard", "give-up", "else")}
    await consume(scene)
    dead = scene.check.dead("returns")
    assert set(dead) == {ids["always"], ids["give-up"]}
    assert (dead[ids["give-up"]].reason, dead[ids["give-up"]].attempts) == ("no such customer", 1)
    assert (dead[ids["always"]].error, dead[ids["always"]].attempts) == ("not yet", 3)
    assert {topic: [number for number, _ in runs] for topic, runs in attempts.items()} == {
        "retry": [1, 2], "always": [1, 2, 3], "discard": [1], "give-up": [1], "else": [1],
    }  # fmt: skip
    first, second = (at for _, at in attempts["retry"])
    assert 0.3 <= second - first < 5


@one_server
async def test_an_event_gets_exactly_the_attempts_of_its_policy_at_its_policys_times(scene: Scene) -> None:
    prepare(scene, "tries", "once")
    tried: dict[str, list[tuple[int, float]]] = defaultdict(list)

    policy = RetryPolicy(max_attempts=4, first=0.1, factor=3, cap=0.4, jitter=False)

    @scene.bus.subscribe("#", name="tries", retry=policy)
    async def handle(event: Event) -> None:
        tried[str(event.event_id)].append((event.attempt, time.monotonic()))
        raise ValueError(f"attempt {event.attempt}")

    @scene.bus.subscribe("#", name="once", retry=RetryPolicy(max_attempts=1))
    def handle_once(event: Event) -> None:
        raise ValueError("never again")

    ids = scene.publish("a", *[{}] * 10)
    await consume(scene)
    for event_id in ids:
        numbers, times = zip(*tried[event_id], strict=True)
        assert numbers == (1, 2, 3, 4)
        for earlier, later, wait in zip(times, times[1:], (0.1, 0.3, 0.4), strict=False):
            assert wait <= later - earlier < wait + 3
    for letter in letters(scene, "tries", ids):
        assert (letter.attempts, letter.error) == (4, "attempt 4")
    assert {letter.attempts for letter in letters(scene, "once", ids)} == {1}


async def test_hnd_01_and_03_failures_that_cannot_be_stored_as_they_are_take_nothing_down(scene: Scene) -> None:
    prepare(scene, "awkward")

    class Local(Exception):
        pass

    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    awkward: list[Callable[[], BaseException]] = [
        lambda: ValueError("a\0b"),
        lambda: ValueError("half \ud83d of an emoji"),
        lambda: ValueError(b"\xff\0"),
        lambda: Picky(7, threading.Lock()),
        lambda: Local("of a function"),
        lambda: ExceptionGroup("several\0", [ValueError("\ud83d")]),
        Silent,
        lambda: ValueError("long " * 1_000_000),
    ]

    @scene.bus.subscribe("#", name="awkward", retry=TWICE)
    async def handle(event: Event) -> None:
        if event.payload < len(awkward):
            error = awkward[event.payload]()
            raise error

    ids = scene.publish("a", *range(len(awkward) + 1))
    await consume(scene)
    assert set(scene.check.dead("awkward")) == set(ids[:-1])
    found = letters(scene, "awkward", ids[:-1])
    assert {letter.attempts for letter in found} == {2}
    assert found[0].error == "a\\x00b"
    assert found[1].error == "half \\ud83d of an emoji"
    assert found[3].error == "code 7"
    assert len(found[-1].error or "") < 20_000


@one_server
async def test_an_event_that_the_outbox_no_longer_has_is_a_dead_letter_and_not_silence(scene: Scene) -> None:
    prepare(scene, "gone")
    seen: list[Any] = []

    @scene.bus.subscribe("#", name="gone", retry=TWICE)
    async def handle(event: Event) -> Retry | None:
        seen.append(event.payload)
        if event.payload == "retried":
            with psycopg.connect(scene.dsn) as connection:
                connection.execute("DELETE FROM eventbus.outbox WHERE event_id = %s", (event.event_id,))
            return Retry(after=0)
        return None

    missing, _ = scene.publish("a", "missing", "here")
    scene.publish("a", "retried")
    relay = scene.start("relay", settings=scene.settings())
    while scene.check.standing("gone").waiting < 3:  # noqa: ASYNC110 - another program's tables
        await asyncio.sleep(0.01)
    relay.kill()
    with psycopg.connect(scene.dsn) as connection:
        connection.execute("DELETE FROM eventbus.outbox WHERE event_id = %s", (missing,))
    await consume(scene)
    assert sorted(seen) == ["here", "retried"]
    rows = scene.query("SELECT reason FROM eventbus.dead_letters ORDER BY seq")
    assert rows == [("event missing: the outbox no longer has it",)] * 2


@one_server
async def test_no_more_handlers_run_at_once_than_the_subscription_allows(scene: Scene) -> None:
    prepare(scene, "tasks", "threads")
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    lock = threading.Lock()

    def count(queue: str, change: int) -> None:
        with lock:
            now[queue] += change
            most[queue] = max(most[queue], now[queue])

    @scene.bus.subscribe("#", name="tasks", concurrency=3)
    async def in_task(event: Event) -> None:
        count("tasks", 1)
        await asyncio.sleep(0.005)
        count("tasks", -1)

    @scene.bus.subscribe("#", name="threads", concurrency=4)
    def in_thread(event: Event) -> None:
        count("threads", 1)
        time.sleep(0.005)
        count("threads", -1)

    scene.publish("a", *[{}] * 100)
    await consume(scene)
    assert most == {"tasks": 3, "threads": 4}


@one_server
async def test_a_handler_that_runs_for_long_holds_up_neither_its_neighbours_nor_other_queues(scene: Scene) -> None:
    prepare(scene, "slow", "quick")
    done: Counter[str] = Counter()
    free = threading.Event()

    @scene.bus.subscribe("#", name="slow", concurrency=2)
    def slow(event: Event) -> None:
        if event.payload == "slow":
            assert free.wait(20)
        done["slow"] += 1

    @scene.bus.subscribe("#", name="quick")
    async def quick(event: Event) -> None:
        done["quick"] += 1
        if done["quick"] == 51:
            await asyncio.to_thread(wait_for_neighbours)
            free.set()

    def wait_for_neighbours() -> None:
        for _ in until(lambda: done["slow"] == 50):
            time.sleep(0.005)

    scene.publish("a", "slow", *["quick"] * 50)
    await consume(scene)
    assert done == {"slow": 51, "quick": 51}


@one_server
async def test_hnd_07_handlers_that_outlast_their_timeout_give_their_slots_back(scene: Scene) -> None:
    prepare(scene, "limited")
    seen: list[str] = []

    @scene.bus.subscribe("#", name="limited", timeout=0.2, retry=RetryPolicy(max_attempts=1), concurrency=4)
    async def handle(event: Event) -> None:
        if event.payload == "for ever":
            await asyncio.Event().wait()
        seen.append(event.payload)

    stuck = scene.publish("a", *["for ever"] * 8)
    scene.publish("a", *["good"] * 10)
    await consume(scene)
    assert seen == ["good"] * 10
    assert set(scene.check.dead("limited")) == set(stuck)
    assert {letter.attempts for letter in letters(scene, "limited", stuck)} == {1}


@one_server
@pytest.mark.parametrize("kind", ["thread", "task"])
async def test_hnd_07_handlers_that_cannot_be_stopped_cost_no_capacity_and_run_no_event_twice(
    scene: Scene, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(scene, "hangs")
    runs: Counter[str] = Counter()
    free = threading.Event()

    def in_a_thread(event: Event) -> None:
        runs[event.payload] += 1
        if event.payload.startswith("bad"):
            assert free.wait(30)

    async def on_the_loop(event: Event) -> None:
        runs[event.payload] += 1
        while event.payload.startswith("bad") and not free.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    handler: Callable[..., Any] = in_a_thread if kind == "thread" else on_the_loop
    once = RetryPolicy(max_attempts=1)
    scene.bus.subscribe("#", name="hangs", timeout=0.2, retry=once, concurrency=4)(handler)
    bad = [f"bad {number}" for number in range(30 if kind == "thread" else 10)]
    good = [f"good {number}" for number in range(10)]
    stuck = scene.publish("a", *bad)
    scene.publish("a", *good)
    running = asyncio.create_task(consume(scene))

    def wait_for_the_good() -> None:
        for _ in until(lambda: all(runs[name] for name in good) and reports(caplog) == len(bad), timeout=25):
            time.sleep(0.005)

    await asyncio.to_thread(wait_for_the_good)
    assert scene.check.dead("hangs") == {}, "a handler that goes on keeps its event"
    free.set()
    await running
    assert set(scene.check.dead("hangs")) == set(stuck)
    assert runs == dict.fromkeys([*bad, *good], 1)


def reports(caplog: pytest.LogCaptureFixture) -> int:
    """How many handlers were reported to go on after their timeout."""
    return sum("goes on after its timeout" in record.getMessage() for record in list(caplog.records))


@one_server
@pytest.mark.parametrize("kind", ["thread", "task"])
async def test_a_handler_of_batches_handles_every_event_and_a_bad_one_fails_alone(scene: Scene, kind: str) -> None:
    prepare(scene, "batches")
    sizes: list[int] = []
    handled: Counter[int] = Counter()

    def in_a_thread(numbers: list[int], events: list[Event]) -> None:
        sizes.append(len(numbers))
        assert [event.payload for event in events] == numbers
        if 7 in numbers:
            raise ValueError("bad")
        handled.update(numbers)

    async def on_the_loop(numbers: list[int], events: list[Event]) -> None:
        in_a_thread(numbers, events)

    handler: Callable[..., Any] = in_a_thread if kind == "thread" else on_the_loop
    once = RetryPolicy(max_attempts=1)
    scene.bus.subscribe("#", name="batches", batch=20, batch_wait=0.05, retry=once, concurrency=2)(handler)
    ids = scene.publish("a", *range(95), "no number")
    await consume(scene)
    assert handled == Counter({number: 1 for number in range(95) if number != 7})
    assert max(sizes) == 20
    [bad, mismatch] = letters(scene, "batches", [ids[7], ids[95]])
    assert (bad.attempts, bad.reason) == (1, "gave up after 1 attempt")
    assert mismatch.reason == "payload mismatch"


def until(condition: Callable[[], bool], timeout: float = 15.0) -> Iterator[None]:
    """Go round until the condition holds; fail after the time-out."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        yield
