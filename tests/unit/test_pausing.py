"""The consumer and paused queues, on a scripted engine: nothing starts, nothing is lost, nobody asks in vain."""

from __future__ import annotations

import asyncio
import time

from eventbus.errors import Unavailable
from eventbus.transport import Pause
from tests.unit.consumer_line import OTHER, QUEUE, Gate, Line, fine, line
from tests.unit.scripted_engine import Waiting


async def pause(made: Line, seconds: float | None = None, probe_seconds: float | None = None) -> None:
    """Pause the queue, and tell the worker as NOTIFY does."""
    await made.engine.pause(QUEUE, "tests", "because", seconds, probe_seconds)
    made.consumer.wake()


async def resume(made: Line) -> None:
    """End the pause, and tell."""
    await made.engine.resume(QUEUE, "tests")
    made.consumer.wake()


async def asked_in_peace(made: Line) -> int:
    """How often the engine has been asked for events when the loops have nothing to do any more."""
    await made.still()
    return sum(made.engine.calls[call] for call in ("claim", "claim_due", "claim_alone"))


async def test_what_has_not_started_when_the_pause_comes_is_given_back_although_there_is_no_room_to_claim() -> None:
    gate = Gate()
    async with line(gate.wait, slots=2) as made:
        made.engine.fresh[QUEUE].extend("abc")  # two run, one waits, and there is no room for more
        made.start()
        await made.engine.until(lambda: len(gate.started) == 2)
        await made.still()
        await pause(made)
        await made.engine.until(lambda: made.consumer.queues[QUEUE].waiting == 0)
        gate.open("a", "b")
        await made.engine.until(lambda: len(made.engine.settled) == 3)
        assert sorted(made.engine.settled) == [("a", "done"), ("b", "done"), ("c", "released")]
        assert gate.started == ["a", "b"]


async def test_a_paused_queue_is_left_alone_until_there_is_news_and_then_goes_on() -> None:
    async with line() as made:
        made.add(OTHER, fine)
        await made.engine.pause(QUEUE, "tests", "because", None, None)
        made.engine.fresh[QUEUE].append("a")
        made.start()
        before = await asked_in_peace(made)
        made.consumer.wake([QUEUE])
        assert await asked_in_peace(made) == before, "each event that arrived in a paused queue cost a question"
        await resume(made)
        await made.engine.until(lambda: made.engine.settled == [("a", "done")])


async def test_a_paused_queue_is_asked_again_when_its_time_comes_without_news() -> None:
    async with line() as made:
        await made.engine.pause(QUEUE, "tests", "because", 0.2, None)
        made.engine.fresh[QUEUE].append("a")
        made.engine.exceptions[QUEUE].append(Waiting("b"))
        made.start()
        before = await asked_in_peace(made)
        assert await asked_in_peace(made) == before
        made.engine.pauses.pop(QUEUE)  # it ends by itself, and nobody says so
        await made.engine.until(lambda: len(made.engine.settled) == 2)


async def test_a_resume_that_is_announced_while_the_answer_is_on_its_way_is_not_lost() -> None:
    async with line() as made:
        await made.engine.pause(QUEUE, "tests", "because", None, None)
        made.engine.fresh[QUEUE].append("a")
        gate = made.engine.hold_reply("claim")
        made.start()
        await made.engine.called("claim")
        await made.engine.until(lambda: made.engine.order[-1] == "claim")
        await resume(made)
        gate.set()
        await made.engine.until(lambda: made.engine.settled == [("a", "done")])


async def test_what_is_fed_while_the_answer_is_on_its_way_is_not_left_to_the_next_poll() -> None:
    async with line() as made:
        queue = made.consumer.queues[QUEUE]
        nothing_waits = Pause(1.0, waiting=False)
        queue.fed = False  # the database is asked
        queue.pause(nothing_waits, 100.0)
        assert queue.dry
        queue.fed = False  # again, and this time the relay is quicker than the answer
        queue.feed()
        queue.pause(nothing_waits, 100.0)
        assert not queue.dry


async def test_the_probe_runs_and_all_others_wait_until_the_pause_is_over() -> None:
    gate = Gate()
    async with line(gate.wait) as made:
        made.engine.fresh[QUEUE].extend("abc")
        await made.engine.pause(QUEUE, "tests", "because", 0.0, 600.0)
        made.start()
        await made.engine.until(lambda: gate.started)
        [lease] = made.consumer.leases
        assert lease.probe
        made.consumer.wake()
        before = await asked_in_peace(made)
        gate.open(*"abc")
        await made.engine.until(lambda: made.engine.settled == [("a", "done")])
        made.consumer.wake([QUEUE])
        assert await asked_in_peace(made) == before
        await resume(made)
        await made.engine.until(lambda: len(made.engine.settled) == 3)
        assert gate.started == ["a", "b", "c"]


async def test_a_probe_that_waits_for_a_slot_is_not_given_back_by_its_own_pause() -> None:
    gate = Gate()
    async with line(gate.wait, slots=1) as made:
        made.engine.fresh[QUEUE].append("a")
        made.start()
        await made.engine.until(lambda: gate.started == ["a"])
        made.engine.fresh[QUEUE].append("p")
        await pause(made, 0.0, 600.0)
        await made.engine.until(lambda: made.consumer.queues[QUEUE].waiting == 1)
        made.consumer.wake()
        await made.still()
        gate.open("a", "p")
        await made.engine.until(lambda: made.engine.settled == [("a", "done"), ("p", "done")])


async def test_retries_are_probes_only_when_nothing_fresh_is_there() -> None:
    gate = Gate()
    async with line(gate.wait) as made:
        await made.engine.pause(QUEUE, "tests", "because", None, 600.0)
        made.engine.exceptions[QUEUE].append(Waiting("retry"))
        made.engine.fresh[QUEUE].append("fresh")
        made.start()
        await made.still()
        made.engine.pauses[QUEUE] = 0.0
        made.consumer.wake()
        await made.engine.until(lambda: gate.started == ["fresh"])
        await made.engine.free_probe(QUEUE, "tests", next(iter(made.consumer.leases)).token)
        made.consumer.wake()
        await made.engine.until(lambda: gate.started == ["fresh", "retry"])
        gate.open("fresh", "retry")


async def test_where_there_is_nothing_to_probe_with_nobody_asks_until_something_arrives() -> None:
    async with line() as made:
        await made.engine.pause(QUEUE, "tests", "because", 0.0, 600.0)
        made.engine.exceptions[QUEUE].append(Waiting("later", asyncio.get_running_loop().time() + 600))
        made.start()
        before = await asked_in_peace(made)
        assert await asked_in_peace(made) == before
        made.engine.fresh[QUEUE].append("a")
        made.consumer.wake([QUEUE])
        await made.engine.until(lambda: made.engine.settled == [("a", "done")])


async def test_what_crashed_is_the_last_to_be_a_probe_and_is_not_forgotten() -> None:
    async with line() as made:
        await made.engine.pause(QUEUE, "tests", "because", 0.0, 600.0)
        made.engine.exceptions[QUEUE].append(Waiting("crashed", crashes=1))
        made.start()
        await made.engine.until(lambda: made.engine.settled == [("crashed", "done")])


async def test_the_next_event_of_a_key_does_not_start_in_a_paused_queue() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        made.engine.fresh[QUEUE].extend(["a1", "a2", "a3", "b1"])
        made.start()
        await made.engine.until(lambda: gate.started == ["a1", "b1"])
        await pause(made)
        await made.engine.until(lambda: made.consumer.queues[QUEUE].suspended)
        gate.open("a1", "a2", "a3", "b1")
        await made.engine.until(lambda: len(made.engine.settled) == 4)
        assert dict(made.engine.settled) == {"a1": "done", "a2": "parked", "a3": "parked", "b1": "done"}
        assert made.consumer.queues[QUEUE].waiting == 0


async def test_on_hold_nothing_starts_and_what_is_being_claimed_is_given_back() -> None:
    gate = Gate()
    async with line(gate.wait, slots=1) as made:
        made.engine.fresh[QUEUE].append("a")
        made.start()
        await made.engine.until(lambda: gate.started == ["a"])
        await made.still()
        reply = made.engine.hold_reply("claim")
        made.engine.fresh[QUEUE].append("b")
        made.consumer.wake([QUEUE])
        await made.engine.until(lambda: not made.engine.fresh[QUEUE])
        queue = made.consumer.queues[QUEUE]
        queue.hold(600)
        gate.open("a", "b", "c")
        reply.set()
        await made.engine.until(lambda: sorted(made.engine.settled) == [("a", "done"), ("b", "released")])
        made.engine.fresh[QUEUE].append("c")
        made.consumer.wake()
        before = await asked_in_peace(made)
        made.consumer.wake()
        assert await asked_in_peace(made) == before
        queue.hold(0)
        await made.engine.until(lambda: ("c", "done") in made.engine.settled)
        assert gate.started == ["a", "c"]


async def test_a_hold_gives_back_what_waits_here_and_ends_by_itself() -> None:
    gate = Gate()
    async with line(gate.wait, slots=1) as made:
        made.engine.fresh[QUEUE].extend("ab")
        made.start()
        await made.engine.until(lambda: gate.started == ["a"] and made.consumer.queues[QUEUE].waiting == 1)
        began = time.monotonic()
        made.consumer.queues[QUEUE].hold(0.1)
        assert made.consumer.queues[QUEUE].waiting == 0
        made.engine.fresh[QUEUE].append("c")
        gate.open("a", "b", "c")
        await made.engine.until(lambda: ("c", "done") in made.engine.settled)
        assert time.monotonic() - began >= 0.1
        assert ("b", "released") in made.engine.settled


async def test_a_question_that_failed_is_asked_again() -> None:
    gate = Gate()
    async with line(gate.wait, slots=1) as made:
        made.engine.fresh[QUEUE].extend("ab")
        made.start()
        await made.engine.until(lambda: gate.started == ["a"] and made.consumer.queues[QUEUE].waiting == 1)
        await made.still()
        made.engine.failures["claim"].append(Unavailable("away"))
        await pause(made)
        await made.engine.until(lambda: made.consumer.queues[QUEUE].waiting == 0)
        gate.open("a")


async def test_only_an_endless_pause_with_work_keeps_a_worker_from_ever_being_done() -> None:
    async with line() as made:
        await made.engine.pause(QUEUE, "tests", "because", None, None)
        made.start()
        await made.still()
        assert (made.consumer.quiet, [*made.consumer.halted]) == (True, [])
        made.engine.fresh[QUEUE].append("a")
        made.consumer.wake([QUEUE])
        assert (made.consumer.quiet, [*made.consumer.halted]) == (False, ["queue-1"])
        await made.engine.pause(QUEUE, "tests", "because", 600, None)
        made.consumer.wake()
        await made.still()
        assert (made.consumer.quiet, [*made.consumer.halted]) == (False, [])
        await resume(made)
        await made.engine.until(lambda: made.consumer.quiet)
