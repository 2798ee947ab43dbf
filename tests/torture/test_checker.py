"""The judge of ``eventbus torture`` is shown each kind of crime, and one innocent history."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from eventbus.testing.torture import checker, facts
from eventbus.testing.torture.checker import violations
from eventbus.testing.torture.facts import FOREVER, Call, Fault, History, Promise, Published, Tables

SECOND = 1_000_000_000
PLAIN = Promise("q")
IDEMPOTENT = Promise("q", by_event_id=True)
TRANSACTIONAL = Promise("q", by_event_id=True, effects=True)
PARKING = Promise("q", ordered=True, parks=True)
SKIPPING = Promise("q", ordered=True)


def event(token: str, *, key: str | None = "k", sequence: int = 1, due: float = 0, event_id: str = "") -> Published:
    return Published(token, event_id or f"id-{token}", key, sequence, int(due * SECOND))


def call(token: str, start: float, end: float | None, told: str | None = "done", **more: object) -> Call:
    facts = {"queue": "q", "event_id": f"id-{token}", "attempt": 1, "pid": 1, "name": f"{token}-{start}"} | more
    ended = FOREVER if end is None else int(end * SECOND)
    return Call(token=token, started=int(start * SECOND), ended=ended, told=told, **facts)  # type: ignore[arg-type]


def fault(kind: str, at: float, until: float | None = None, pid: int | None = 1) -> Fault:
    return Fault(kind, int(at * SECOND), int((until or at) * SECOND), pid)


def tables(*events: Published, **more: object) -> Tables:
    facts = {"delivered": Counter({("q", each.token): 1 for each in events})} | more
    return Tables(published={each.token: each for each in events}, **facts)  # type: ignore[arg-type]


def found(
    promise: Promise, calls: Sequence[Call], said: Tables, faults: Sequence[Fault] = (), lease: float = 1
) -> list[str]:
    return [each.promise for each in violations([promise], History(calls, faults, lease=int(lease * SECOND)), said)]


A, B = event("a"), event("b", sequence=2)
GOOD = [call("a", 1, 2), call("b", 3, 4)]


@pytest.mark.parametrize("promise", [PLAIN, IDEMPOTENT, PARKING, SKIPPING])
def test_an_innocent_history_is_not_accused(promise: Promise) -> None:
    assert found(promise, GOOD, tables(A, B)) == []


def test_an_innocent_transactional_history_is_not_accused() -> None:
    said = tables(A, B, effects=[("q", "id-a", "a-1"), ("q", "id-b", "b-3")])
    assert found(TRANSACTIONAL, GOOD, said) == []


@pytest.mark.parametrize("promise", [PLAIN, IDEMPOTENT, TRANSACTIONAL, PARKING, SKIPPING])
def test_an_event_that_no_handler_finished_is_lost(promise: Promise) -> None:
    said = tables(A, B, effects=[("q", "id-a", "a-1")])
    assert found(promise, [call("a", 1, 2), call("b", 3, None, None)], said) == ["lost"]


def test_an_event_that_was_never_delivered_is_lost() -> None:
    assert found(PLAIN, [call("a", 1, 2)], tables(A, B, delivered=Counter({("q", "a"): 1}))) == ["lost"]


def test_an_event_that_was_delivered_twice_is_named() -> None:
    assert found(PLAIN, GOOD, tables(A, B, delivered=Counter({("q", "a"): 2, ("q", "b"): 1}))) == ["lost"]


def test_a_handler_that_saw_what_was_rolled_back_saw_a_phantom() -> None:
    assert found(PLAIN, GOOD, tables(A)) == ["phantom"]


def test_a_dead_letter_and_a_delivery_of_what_was_rolled_back_are_phantoms() -> None:
    said = tables(A, letters=[("q", "x", 3)], delivered=Counter({("q", "a"): 1, ("q", "y"): 1}))
    assert found(PLAIN, [call("a", 1, 2)], said) == ["phantom", "phantom"]


@pytest.mark.parametrize("promise", [PLAIN, IDEMPOTENT, SKIPPING])
def test_an_effect_that_is_repeated_without_a_fault_is_named(promise: Promise) -> None:
    assert found(promise, [call("a", 1, 2), call("a", 5, 6, pid=2)], tables(A)) == ["repeated"]


def test_a_repeat_is_excused_by_a_fault_of_its_own_process_at_that_time_only() -> None:
    calls = [call("a", 1, 2), call("a", 20, 21, pid=2)]
    assert found(PLAIN, calls, tables(A), [fault("kill", 2.1)]) == []
    assert found(PLAIN, calls, tables(A), [fault("terminate", 1.5, pid=None)]) == []
    for other in (fault("kill", 2.1, pid=3), fault("kill", 10), fault("kill", 22), fault("terminate", -1, pid=None)):
        assert found(PLAIN, calls, tables(A), [other]) == ["repeated"], other


def test_an_event_id_that_is_published_twice_is_done_once_by_idempotent_handlers() -> None:
    twin = event("b", event_id="id-a", key=None)
    calls = [call("a", 1, 2), call("b", 3, 4, event_id="id-a")]
    assert found(PLAIN, calls, tables(A, twin)) == []
    assert found(IDEMPOTENT, calls, tables(A, twin)) == ["repeated"]
    assert found(IDEMPOTENT, calls[:1], tables(A, twin)) == []


def test_a_transactional_effect_that_is_there_twice_or_out_of_nowhere_is_named() -> None:
    calls = [call("a", 1, 2), call("a", 3, 4)]
    assert found(TRANSACTIONAL, calls, tables(A, effects=[("q", "id-a", "a-1"), ("q", "id-a", "a-3")])) == ["effect"]
    assert found(TRANSACTIONAL, calls, tables(A, effects=[("q", "id-a", "a-1"), ("q", "?", "z")])) == ["effect"]


@pytest.mark.parametrize("promise", [PARKING, SKIPPING])
def test_events_of_one_key_in_the_wrong_order_are_named(promise: Promise) -> None:
    calls = [call("b", 1, 2), call("a", 3, 4)]
    assert found(promise, calls, tables(A, B)) == ["order"]
    assert found(PLAIN, calls, tables(A, B)) == []
    assert found(promise, calls, tables(A, replace(B, key="other"))) == []


def test_an_event_that_runs_between_the_attempts_of_the_one_before_is_named() -> None:
    calls = [call("a", 1, 2, "raise"), call("b", 3, 4), call("a", 5, 6, attempt=2)]
    assert found(PARKING, calls, tables(A, B)) == ["order"]


def test_an_event_that_passes_a_dead_letter_of_its_key_is_named_unless_it_may() -> None:
    calls = [call("a", 1, 2, "dead"), call("b", 3, 4)]
    said = tables(A, B, letters=[("q", "a", 1)])
    assert found(PARKING, calls, said) == ["order"]
    assert found(SKIPPING, calls, said) == []


def test_two_events_of_one_key_at_once_are_named() -> None:
    assert "overlap" in found(PARKING, [call("a", 1, 3), call("b", 2, 4)], tables(A, B))
    assert found(PARKING, [call("a", 1, 3), call("a", 2, 4, "raise")], tables(A))[-1:] == ["overlap"]
    assert found(PLAIN, [call("a", 1, 3), call("b", 2, 4)], tables(A, B)) == []


def test_what_a_frozen_worker_goes_on_with_is_no_overlap_once_its_lease_may_have_ended() -> None:
    frozen = call("a", 1, 9)
    other = [call("a", 4, 5, pid=2), call("b", 6, 7, pid=2)]
    assert found(PARKING, [frozen, *other], tables(A, B), [fault("stop", 1.5, 8)], lease=2) == []
    assert "overlap" in found(PARKING, [frozen, *other], tables(A, B))
    assert "overlap" in found(PARKING, [frozen, *other], tables(A, B), [fault("stop", 3.5, 8)], lease=2)


def test_a_delayed_event_that_comes_early_is_named() -> None:
    assert found(PLAIN, [call("a", 1, 2)], tables(event("a", due=1.5))) == ["early"]


def test_attempts_beyond_the_policy_and_letters_before_it_are_named() -> None:
    assert found(PLAIN, [call("a", 1, 2, attempt=4)], tables(A)) == ["attempts"]
    said = tables(A, letters=[("q", "a", 1)])
    assert found(PLAIN, [call("a", 1, 2, "raise")], said) == ["attempts"]
    assert found(PLAIN, [call("a", 1, 2, "dead")], said) == []


def test_what_is_left_in_the_tables_is_stuck_unless_a_dead_letter_keeps_it_waiting() -> None:
    first = call("a", 1, 2, "dead")
    letters = [("q", "a", 1)]
    parked = tables(A, B, letters=letters, undone=[("q", "b", "parked")])
    assert found(PARKING, [first], parked) == []
    assert found(SKIPPING, [first], parked) == ["stuck"]
    assert found(PARKING, [first], replace(parked, undone=[("q", "b", "held")])) == ["stuck"]
    assert found(PARKING, [call("a", 1, 2)], tables(A, B, undone=[("q", "b", "parked")])) == ["stuck"]


def test_a_graceful_stop_that_does_not_end_well_is_named() -> None:
    history = History(GOOD, exits=[(1, 0), (2, -9)])
    assert [each.promise for each in violations([PLAIN], history, tables(A, B))] == ["exit"]


@pytest.mark.parametrize("module", [checker, facts], ids=["checker", "facts"])
def test_the_judge_shares_no_code_with_the_bus(module: ModuleType) -> None:
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    imported = [each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
    imported += [name.name for each in ast.walk(tree) if isinstance(each, ast.Import) for name in each.names]
    assert {name for name in imported if name.startswith("eventbus")} <= {facts.__name__}
