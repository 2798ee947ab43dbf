"""The model keeps the promises of the engine, whatever happens in whatever order; broken models do not.

With ``HYPOTHESIS_PROFILE=long`` in the environment the run is long, and another one each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from eventbus.testing.model import Model
from eventbus.testing.model.values import Claim, Event, Execution, Range
from tests.model.machine import Machine

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
DEFAULT = settings(
    max_examples=20_000 if LONG else 100,
    stateful_step_count=100 if LONG else 40,
    derandomize=not LONG,
    database=None,
    deadline=None,
)
HUNT = settings(
    max_examples=20_000 if LONG else 1_000,
    stateful_step_count=60,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
)


def test_nothing_is_lost_repeated_overtaken_or_stuck() -> None:
    run_state_machine_as_test(Machine, settings=DEFAULT)


class ForgetsRollbacks(Model):
    def rollback(self, tx: int) -> None:
        self.commit(tx)


class RelaysById(Model):
    """The position is the newest id: what commits late is skipped."""

    def commit(self, tx: int) -> None:
        before = set(self.fresh)
        super().commit(tx)
        newest = max((one.event.id for line in self.lines.values() for one in line), default=0)
        self.fresh = before | {number for number in self.fresh if number > newest}


class ParksNothing(Model):
    def park_blocked(self, claim: Range, now: float) -> None:
        pass


class AdvancesNothing(Model):
    def advance_keys(self, places: Iterable[tuple[int, int, str | None]], now: float) -> None:
        pass


class HasNoFence(Model):
    """A claim belongs to whoever knows its id, also after it was taken over."""

    def settle(self, *claims: Claim, outcomes: Any = None, now: float) -> set[int]:
        for claim in claims:
            found = self.claims[claim.id]
            if found.settled == "lost":
                found.settled = None
                found.progress = {seq: said for seq, said in found.progress.items() if said != "lost"}
        return super().settle(*claims, outcomes=outcomes, now=now)


class HasNoFenceForExceptions(Model):
    def settle_each(self, held: Sequence[Any], *, now: float, **fields: Any) -> set[int]:
        for one, _ in held:
            if one.id in self.exceptions and self.exceptions[one.id].state == "claimed":
                self.exceptions[one.id].token = one.token
        return super().settle_each(held, now=now, **fields)


class ForgetsCompleted(Model):
    def twin(self, queue_id: int, event: Event) -> str | None:
        return None


class ForgetsTheOwner(Model):
    """Whoever claims an event that is not completed may run it."""

    def begin_executions(self, queue_id: int, events: Sequence[Event]) -> None:
        for event in events:
            if self.executions.get((queue_id, event.event_id), Execution(None)).completed_at is None:
                self.executions[queue_id, event.event_id] = Execution(event.id)


class SettlesWithoutOutcomes(Model):
    def settle(self, *claims: Claim, outcomes: Any = None, now: float) -> set[int]:
        return super().settle(*claims, now=now)


class TakesOverAllButTheLast(Model):
    def open_claims(self, worker: UUID) -> list[Range]:
        return super().open_claims(worker)[:-1]


class OpensLanesTooEarly(Model):
    """A lane is claimed from although a claim of it is open."""

    def claim_and_hear(self, *args: Any, **options: Any) -> Any:
        still_open = [claim for claim in self.positions.values() if claim.settled is None]
        for claim in still_open:
            claim.settled = "settled"
        answer = super().claim_and_hear(*args, **options)
        for claim in still_open:
            claim.settled = None
        return answer


SOON = (
    ForgetsRollbacks,
    ParksNothing,
    AdvancesNothing,
    ForgetsCompleted,
    ForgetsTheOwner,
    SettlesWithoutOutcomes,
    TakesOverAllButTheLast,
)
LATE = (RelaysById, HasNoFence, HasNoFenceForExceptions, OpensLanesTooEarly)
"""Found by chance within a minute or so: only long runs look for them."""


@pytest.mark.parametrize("broken", SOON + (LATE if LONG else ()), ids=lambda broken: broken.__name__)
def test_a_broken_model_is_found(broken: type[Model]) -> None:
    machine = type("Broken", (Machine,), {"model": broken})
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=HUNT)
