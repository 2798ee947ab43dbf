"""A claim of an ordered queue that lasts is taken apart: what runs is held, the rest goes back, and nothing is lost."""

from __future__ import annotations

import logging
import time

import pytest

from eventbus.consuming.pace import Pace
from eventbus.errors import Unavailable
from tests.unit.consumer_line import QUEUE, Gate, Line, line
from tests.unit.scripted_engine import Waiting


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim lasts too long after a moment."""
    monkeypatch.setattr("eventbus.consuming.settling._PROGRESS_AFTER", 0.05)


async def taken_apart(made: Line, gate: Gate, *payloads: str, running: set[str]) -> None:
    """Claim these, and wait until the claim is taken apart while ``running`` runs."""
    made.engine.fresh[QUEUE].extend(payloads)
    made.start()
    await made.engine.until(lambda: made.engine.detached)
    assert made.engine.detached == [running]
    assert set(gate.started) >= running


async def test_what_runs_is_held_and_the_rest_goes_back_to_others() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True, slots=2) as made:
        made.consumer.queues[QUEUE].pace = Pace(4, 1_000, time.monotonic())
        await taken_apart(made, gate, "a1", "a2", "b1", "c1", running={"a1", "b1"})
        assert made.engine.returned == ["a2", "c1"]
        queue = made.consumer.queues[QUEUE]
        assert (queue.waiting, queue.behind) == (0, 0)
        assert all(lease.exception_id and not lease.claim_id for lease in made.consumer.leases)
        gate.open("a1", "a2", "b1", "c1")
        await made.engine.until(lambda: len(made.engine.settled) == 2)
        await made.still()
        assert sorted(made.engine.settled) == [("a1", "done"), ("b1", "done")]
        assert sorted(gate.started) == ["a1", "b1"], "what had gone back ran here too"
        assert not made.consumer.leases


async def test_what_is_finished_by_then_is_told_with_it() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        gate.open("b1")
        await taken_apart(made, gate, "a1", "b1", running={"a1"})
        assert made.engine.settled == [("b1", "done")]
        gate.open("a1")
        await made.engine.until(lambda: made.engine.settled == [("b1", "done"), ("a1", "done")])


async def test_the_lane_is_looked_at_again_at_once() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        gate.open("z1")
        await taken_apart(made, gate, "a1", running={"a1"})
        await made.still()
        after = made.engine.order[made.engine.order.index("detach") :]
        assert after == ["detach", "claim_due", "claim"]
        gate.open("a1")


async def test_a_claim_of_which_nothing_runs_yet_goes_back_whole_and_is_not_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True, slots=1) as made:
        made.engine.exceptions[QUEUE].append(Waiting("x1"))
        made.engine.fresh[QUEUE].extend(["a1", "a2"])
        with caplog.at_level(logging.WARNING, "eventbus"):
            made.start()
            await made.engine.until(lambda: made.engine.detached)
            await made.still()
        assert gate.started == ["x1"]
        assert made.engine.detached == [set()]
        assert made.engine.returned == ["a1", "a2"]
        assert not caplog.records
        gate.open("x1")
        await made.engine.until(lambda: made.engine.settled == [("x1", "done")])


async def test_what_ends_while_the_claim_is_taken_apart_is_settled_once() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        telling = made.engine.hold("detach")
        made.engine.fresh[QUEUE].extend(["a1", "a2", "b1"])
        made.start()
        await made.engine.called("detach")
        gate.open("a1")
        await made.engine.until(lambda: gate.ended == ["a1"])
        telling.set()
        await made.engine.until(lambda: made.engine.settled)
        assert made.engine.settled == [("a1", "done")]
        assert made.engine.returned == ["a2"]
        gate.open("b1")
        await made.engine.until(lambda: made.engine.settled == [("a1", "done"), ("b1", "done")])
        assert gate.started == ["a1", "b1"]


@pytest.mark.parametrize("happened", [False, True], ids=["without effect", "with a lost reply"])
@pytest.mark.parametrize("others", [[], ["a2"]], ids=["all running", "some waiting"])
async def test_what_ends_while_the_database_is_away_is_settled_and_its_lane_goes_on(
    happened: bool, others: list[str]
) -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        failures = made.engine.lost_replies if happened else made.engine.failures
        failures["detach"].append(Unavailable("gone"))
        back, telling = made.engine.hold("recover_settling"), made.engine.hold("detach")
        made.engine.fresh[QUEUE].extend(["a1", "b1", *others])
        made.start()
        await made.engine.called("detach")
        gate.open("a1")
        await made.engine.until(lambda: gate.ended == ["a1"])
        telling.set()
        await made.engine.called("recover_settling")
        gate.open("b1")
        await made.engine.until(lambda: gate.ended == ["a1", "b1"])
        back.set()
        await made.engine.until(lambda: len(made.engine.settled) == 2)
        await made.still()
        assert sorted(made.engine.settled) == [("a1", "done"), ("b1", "done")]
        assert made.engine.returned == others
        assert gate.started == ["a1", "b1"]
        assert not made.consumer.leases


async def test_a_lane_goes_on_when_all_that_ran_has_ended_before_the_failure_was_known() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        made.engine.failures["detach"].append(Unavailable("gone"))
        telling = made.engine.hold("detach")
        made.engine.fresh[QUEUE].append("a1")
        made.start()
        await made.engine.called("detach")
        gate.open("a1")
        await made.engine.until(lambda: gate.ended == ["a1"])
        telling.set()
        await made.engine.until(lambda: made.engine.settled == [("a1", "done")])
        await made.engine.until(lambda: not made.consumer.leases)


async def test_a_claim_that_was_lost_meanwhile_is_told_and_what_it_runs_has_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        telling = made.engine.hold("detach")
        made.engine.fresh[QUEUE].extend(["a1", "a2"])
        made.start()
        await made.engine.called("detach")
        made.engine.lost.extend(made.consumer.leases)
        with caplog.at_level(logging.WARNING, "eventbus"):
            telling.set()
            await made.engine.until(lambda: not made.consumer.leases)
            await made.still()
        gate.open("a1", "a2")
        await made.engine.until(lambda: gate.ended == ["a1"])
        await made.still()
        assert (made.engine.settled, gate.started) == ([], ["a1"])
        assert [record.message for record in caplog.records] == [
            "lost a lease while its events ran; they run again elsewhere"
        ]


async def test_a_failure_of_what_is_held_is_settled_as_a_retry() -> None:
    gate = Gate()

    async with line(gate.wait, ordered=True) as made:
        await taken_apart(made, gate, "a1", "b1", running={"a1", "b1"})
        made.consumer.queues[QUEUE].runner.abort()
        await made.engine.until(lambda: len(made.engine.settled) == 2)
        assert {outcome for _, outcome in made.engine.settled} == {"released"}


async def test_a_completion_of_what_still_runs_is_not_remembered_before_it_is_settled() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True, idempotent=True) as made:
        telling, settling = made.engine.hold("detach"), made.engine.hold("settle")
        made.engine.fresh[QUEUE].extend(["a1", "b1"])
        made.start()
        await made.engine.called("detach")
        gate.open("a1")
        await made.engine.until(lambda: gate.ended == ["a1"])
        telling.set()
        await made.engine.called("settle")
        completions = made.consumer.queues[QUEUE].completions
        assert completions is not None
        assert len(completions) == 0
        settling.set()
        await made.engine.until(lambda: len(completions) == 1)
        gate.open("b1")


async def test_a_worker_that_is_taken_over_while_it_takes_a_claim_apart_settles_nothing_of_it() -> None:
    gate = Gate()
    async with line(gate.wait, ordered=True) as made:
        telling = made.engine.hold("detach")
        made.engine.fresh[QUEUE].extend(["a1", "a2"])
        made.start()
        await made.engine.called("detach")
        made.engine.lost.extend(made.consumer.leases)
        made.consumer.orphan()
        telling.set()
        gate.open("a1")
        await made.engine.until(lambda: gate.ended == ["a1"])
        await made.still()
        assert made.engine.settled == []
        assert not made.consumer.leases
