"""What this process remembers of completed executions: only what is committed, and not for ever."""

from __future__ import annotations

from uuid import UUID, uuid4

from eventbus.consuming.idempotency import Completions
from eventbus.errors import Unavailable
from eventbus.event import Event
from tests.unit.consumer_line import QUEUE, Gate, Line, line
from tests.unit.scripted_engine import Waiting

ONE, TWO, THREE = ((str(UUID(int=number)), 0) for number in (1, 2, 3))


def test_a_completed_execution_is_known_for_as_long_as_it_was_promised() -> None:
    completions = Completions(seconds=10)
    completions.add([ONE], 100)
    assert completions.has(ONE, 110)
    assert not completions.has(ONE, 110.1)


def test_an_execution_of_a_replay_is_another_one() -> None:
    completions = Completions()
    completions.add([ONE], 0)
    assert not completions.has((ONE[0], 1), 0)


def test_the_oldest_are_forgotten_so_that_memory_stays_bounded() -> None:
    completions = Completions(most=2)
    completions.add([ONE, TWO], 0)
    completions.add([ONE], 1)
    completions.add([THREE], 2)
    assert len(completions) == 2
    assert [completions.has(each, 2) for each in (ONE, TWO, THREE)] == [True, False, True]


def test_what_is_too_old_does_not_stay_in_memory() -> None:
    completions = Completions(seconds=10)
    completions.add([ONE], 0)
    completions.add([TWO], 11)
    assert len(completions) == 1


def test_after_a_reconnect_nothing_is_known() -> None:
    completions = Completions()
    completions.add([ONE], 0)
    completions.clear()
    assert not completions.has(ONE, 0)


def test_how_often_it_helped_can_be_seen() -> None:
    completions = Completions()
    completions.add([ONE], 0)
    assert (completions.has(ONE, 0), completions.has(TWO, 0)) == (True, False)
    assert (completions.lookups, completions.hits) == (2, 1)


class Twins:
    """``first`` and ``second`` are the same event."""

    def __init__(self, made: Line) -> None:
        self.engine = made.engine
        event_id = uuid4()
        made.engine.events.update(first=event_id, second=event_id)

    def add_second(self, twin: str) -> None:
        """Let the second be claimed; ``twin``: what the engine says of the first."""
        self.engine.twins["second"] = "pending" if twin == "pending" else "completed"
        self.engine.exceptions[QUEUE].append(Waiting("second"))


async def test_an_event_whose_twin_is_completed_is_not_handled_and_settled_as_done() -> None:
    gate = Gate()
    async with line(gate.wait, idempotent=True) as made:
        Twins(made).add_second("completed")
        made.start()
        await made.engine.until(lambda: made.engine.settled == [("second", "done")])
        assert not gate.started


async def test_an_event_whose_twin_runs_elsewhere_is_not_handled_and_comes_again_later() -> None:
    gate = Gate()
    async with line(gate.wait, idempotent=True) as made:
        Twins(made).add_second("pending")
        made.start()
        await made.engine.until(lambda: made.engine.settled == [("second", "deferred")])
        assert not gate.started


async def test_a_twin_that_this_process_has_completed_meanwhile_is_not_waited_for() -> None:
    async with line(idempotent=True) as made:
        twins = Twins(made)
        made.engine.fresh[QUEUE].append("first")
        made.start()
        await made.engine.until(lambda: made.engine.settled == [("first", "done")])
        await made.still()
        twins.add_second("pending")
        made.consumer.wake()
        await made.engine.until(lambda: made.engine.settled[1:] == [("second", "done")])


async def test_a_completion_is_not_known_before_it_is_settled() -> None:
    gate = Gate()
    async with line(gate.wait, idempotent=True) as made:
        twins, settling = Twins(made), made.engine.hold("settle")
        made.engine.fresh[QUEUE].append("first")
        gate.open("first")
        made.start()
        await made.engine.called("settle")
        twins.add_second("pending")
        made.consumer.wake()
        await made.engine.until(lambda: not made.engine.exceptions[QUEUE])
        await made.still()
        settling.set()
        await made.engine.until(lambda: len(made.engine.settled) == 2)
        assert made.engine.settled == [("first", "done"), ("second", "deferred")]


async def test_a_completion_whose_lease_was_lost_is_not_known() -> None:
    gate = Gate()
    async with line(gate.wait, idempotent=True) as made:
        made.engine.fresh[QUEUE].append("first")
        made.start()
        await made.engine.until(lambda: gate.started)
        made.engine.lost.extend(made.consumer.leases)
        gate.open("first")
        await made.engine.called("settle")
        await made.still()
        completions = made.consumer.queues[QUEUE].completions
        assert completions is not None
        assert len(completions) == 0


async def test_a_failed_event_is_not_completed() -> None:
    async def fail(event: Event) -> None:
        raise ValueError("no")

    async with line(fail, idempotent=True) as made:
        made.engine.fresh[QUEUE].append("first")
        made.start()
        await made.engine.until(lambda: made.engine.settled)
        await made.still()
        completions = made.consumer.queues[QUEUE].completions
        assert completions is not None
        assert len(completions) == 0


async def test_a_lost_connection_makes_this_process_forget_what_it_knew() -> None:
    async with line(idempotent=True) as made:
        made.engine.fresh[QUEUE].append("first")
        made.start()
        completions = made.consumer.queues[QUEUE].completions
        assert completions is not None
        await made.engine.until(lambda: len(completions) == 1)
        made.engine.failures["claim"].append(Unavailable("gone"))
        made.consumer.wake([QUEUE])
        await made.engine.called("recover")
        assert len(completions) == 0
