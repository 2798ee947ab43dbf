"""While the database is away one connection attempt is made at a time, whoever wants to connect, and wherever."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from eventbus.errors import Unavailable
from eventbus.postgres.breaker import Backoff, Breaker, Turn
from eventbus.postgres.outage import Outage


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Door:
    """A breaker with a scripted clock and no jitter."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.breaker = Breaker(Outage(), self.clock, lambda: 1.0)

    def turn(self, **options: Any) -> Turn:
        """A turn that may be had at once; raises Unavailable if there is none."""
        return self.breaker.turn_blocking(0.0, **options)

    def is_shut(self) -> bool:
        try:
            turn = self.turn()
        except Unavailable:
            return True
        self.breaker.abandoned(turn)
        return False

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds


@pytest.fixture
def door() -> Door:
    return Door()


def fail(turn: Turn) -> None:
    """Make an attempt that fails."""
    with pytest.raises(psycopg.OperationalError), turn:
        raise psycopg.OperationalError("refused")


def succeed(turn: Turn) -> None:
    """Make an attempt that ends in a connection."""
    with turn:
        pass


def test_while_all_is_well_everybody_connects_at_the_same_time(door: Door) -> None:
    turns = [door.turn() for _ in range(5)]
    for turn in turns:
        succeed(turn)
    assert not door.is_shut()


def test_after_a_failure_one_attempt_is_made_at_a_time_with_doubling_pauses_up_to_five_seconds(door: Door) -> None:
    fail(door.turn())
    waited = []
    for _ in range(9):
        began = door.clock.now
        while door.is_shut():
            door.pass_time(0.0125)
        waited.append(round(door.clock.now - began, 2))
        probe = door.turn()
        assert door.is_shut(), "a second attempt beside the probe"
        fail(probe)
    assert waited == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0], abs=0.03)


def test_a_back_off_is_shortened_by_up_to_a_half_so_that_workers_do_not_come_back_together() -> None:
    least, most = Backoff(lambda: 0.0), Backoff(lambda: 1.0)
    pauses = []
    for least.failures in range(8):
        most.failures = least.failures
        pauses.append((least.pause(), most.pause()))
    assert pauses[:3] == [(0.05, 0.1), (0.05, 0.1), (0.1, 0.2)]
    assert pauses[-1] == (2.5, 5.0)


def test_a_probe_that_succeeds_lets_everybody_connect_and_the_next_outage_begins_with_short_pauses(door: Door) -> None:
    fail(door.turn())
    for _ in range(5):
        door.pass_time(5)
        fail(door.turn())
    door.pass_time(5)
    succeed(door.turn())
    turns = [door.turn() for _ in range(3)]
    fail(turns[0])
    assert door.is_shut()
    door.pass_time(0.11)
    assert not door.is_shut()


def test_many_attempts_that_fail_together_at_the_beginning_count_as_one(door: Door) -> None:
    turns = [door.turn() for _ in range(5)]
    for turn in turns:
        fail(turn)
    door.pass_time(0.11)
    assert not door.is_shut()


def test_an_attempt_from_before_the_outage_that_succeeds_late_ends_no_outage(door: Door) -> None:
    straggler = door.turn()
    fail(door.turn())
    succeed(straggler)
    assert door.is_shut()


def test_an_attempt_from_before_the_end_of_an_outage_that_fails_late_begins_no_new_one(door: Door) -> None:
    straggler = door.turn()
    fail(door.turn())
    door.pass_time(0.11)
    succeed(door.turn())
    door.pass_time(1)
    fail(straggler)
    assert not door.is_shut()


def test_a_connection_that_breaks_begins_an_outage_and_is_tried_again_after_a_tenth_of_a_second(door: Door) -> None:
    door.breaker.broke(door.clock.now - 1)
    assert door.is_shut()
    door.pass_time(0.11)
    succeed(door.turn())
    assert not door.is_shut()


def test_a_connection_that_the_last_outage_cut_and_nobody_has_used_since_begins_no_new_one(door: Door) -> None:
    unused_since = door.clock.now
    door.pass_time(1)
    door.breaker.broke()
    door.pass_time(1)
    succeed(door.turn())
    door.pass_time(1)
    door.breaker.broke(unused_since)
    assert not door.is_shut()


def test_an_attempt_that_is_cancelled_leaves_its_turn_to_the_next(door: Door) -> None:
    fail(door.turn())
    door.pass_time(0.11)
    with pytest.raises(asyncio.CancelledError), door.turn():
        raise asyncio.CancelledError
    succeed(door.turn())
    assert not door.is_shut()


def test_a_probe_that_hangs_keeps_others_out_for_ten_seconds_and_the_heartbeat_for_one(door: Door) -> None:
    fail(door.turn())
    door.pass_time(0.11)
    hanging = door.turn()
    door.pass_time(0.9)
    with pytest.raises(Unavailable):
        door.turn(urgent=True)
    door.pass_time(0.2)
    heartbeat = door.turn(urgent=True)
    fail(hanging)  # not its turn any more: the back-off of the heartbeat's is not touched
    assert door.is_shut()
    door.pass_time(9.8)
    assert door.is_shut()
    door.pass_time(0.3)
    third = door.turn()
    fail(third)
    succeed(heartbeat)
    assert not door.is_shut()


# -- waiting -----------------------------------------------------------------------------------------------------------


def quick() -> Breaker:
    """A breaker with the real clock, so that waiting for it can be tested."""
    return Breaker(Outage(), random=lambda: 0.0)


def waiting(breaker: Breaker) -> int:
    return len(breaker._waiters)


async def until(predicate: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    async with asyncio.timeout(10):
        while not predicate():  # noqa: ASYNC110 - threads do not announce that they wait
            await asyncio.sleep(0.001)


async def test_tasks_and_threads_wait_for_one_probe_and_go_on_together_while_the_loop_runs() -> None:
    breaker = quick()
    breaker.broke()
    order: list[str] = []
    attempts = 0

    async def in_task(name: str) -> None:
        nonlocal attempts
        turn = await breaker.turn()
        attempts += turn.opening is not None
        with turn:
            await asyncio.sleep(0.05)
        order.append(name)

    def in_thread(name: str) -> None:
        nonlocal attempts
        turn = breaker.turn_blocking()
        attempts += turn.opening is not None
        with turn:
            order.append(name)

    with ThreadPoolExecutor(3) as pool:
        loop = asyncio.get_running_loop()
        threads = [loop.run_in_executor(pool, in_thread, f"thread {n}") for n in range(3)]
        await asyncio.gather(*[in_task(f"task {n}") for n in range(3)], *threads)
    assert len(order) == 6
    assert attempts == 1
    assert waiting(breaker) == 0


async def test_while_the_heartbeat_waits_it_alone_makes_the_next_probe(door: Door) -> None:
    breaker = door.breaker
    breaker.broke()
    breaker._not_before = door.clock.now + 9
    probes: list[Turn] = []
    thread = threading.Thread(target=lambda: probes.append(breaker.turn_blocking(urgent=True)), daemon=True)
    thread.start()
    await until(lambda: waiting(breaker) == 1)
    door.pass_time(10)  # the thread sleeps on: it waits for seconds that really pass
    with pytest.raises(Unavailable):
        door.turn()
    breaker.nudge()
    thread.join(5)
    assert door.is_shut(), "the heartbeat probes"
    succeed(probes[0])
    assert not door.is_shut()


async def test_a_heartbeat_that_stops_while_it_waits_ends_at_once_and_leaves_the_probe_to_others() -> None:
    breaker = quick()
    breaker.broke()
    breaker._not_before = math.inf
    stopping = threading.Event()
    ended: list[float] = []

    def beat() -> None:
        with pytest.raises(Unavailable):
            breaker.turn_blocking(urgent=True, given_up=stopping.is_set)
        ended.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    await until(lambda: waiting(breaker) == 1)
    [heartbeat] = breaker._waiters
    relay = asyncio.create_task(breaker.turn())
    await until(lambda: waiting(breaker) == 2)
    breaker._not_before = 0.0
    began = time.monotonic()
    stopping.set()
    heartbeat.wake()
    thread.join(5)
    assert ended[0] - began < 1
    async with asyncio.timeout(5):
        assert (await relay).opening is not None


async def test_a_task_that_is_cancelled_while_it_waits_leaves_nothing_behind() -> None:
    breaker = quick()
    breaker.broke()
    probe = await breaker.turn()
    waiters = [asyncio.create_task(breaker.turn()) for _ in range(3)]
    await until(lambda: waiting(breaker) == 3)
    waiters[0].cancel()
    await asyncio.wait({waiters[0]})
    assert waiting(breaker) == 2
    succeed(probe)
    async with asyncio.timeout(5):
        await asyncio.gather(*waiters[1:])
    assert waiting(breaker) == 0


async def test_who_has_no_time_is_told_at_once_that_the_database_is_away() -> None:
    breaker = quick()
    breaker.broke()
    with pytest.raises(Unavailable, match="away"):
        await breaker.turn(0.0)
    began = time.monotonic()
    probe = await breaker.turn()
    with pytest.raises(Unavailable, match="away"):
        await asyncio.to_thread(breaker.turn_blocking, 0.05)
    assert time.monotonic() - began < 5
    succeed(probe)


async def test_a_waiter_of_a_loop_that_is_closed_keeps_nobody_else_waiting() -> None:
    breaker = quick()
    breaker.broke()
    probe = await breaker.turn()
    loop = asyncio.new_event_loop()
    abandoned = breaker.turn()

    async def wait_a_little() -> None:
        abandoned.send(None)

    await asyncio.to_thread(loop.run_until_complete, wait_a_little())
    loop.close()
    other = asyncio.create_task(breaker.turn())
    await until(lambda: waiting(breaker) == 2)
    succeed(probe)
    async with asyncio.timeout(5):
        await other
    abandoned.close()
    assert waiting(breaker) == 0
