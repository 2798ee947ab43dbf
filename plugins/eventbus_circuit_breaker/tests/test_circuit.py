from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import pytest

from eventbus_circuit_breaker.circuit import NOTHING, Circuit, Load, Reaction
from eventbus_circuit_breaker.options import Options
from eventbus_circuit_breaker.tests.failing import failure

OPTIONS = Options(failures=5, first_pause=30, longest_pause=600, patience=10)


def new_circuit(options: Options = OPTIONS, random: float = 0.0) -> Circuit:
    return Circuit(options, lambda: random, 0, 0.0)


def opened(now: float = 10.0, seconds: float = 30.0, trips: int = 1) -> Circuit:
    circuit = new_circuit()
    circuit.open(seconds, trips, now)
    return circuit


def fail(circuit: Circuit, times: int, finished: int = 0, now: float = 1.0, running: int = 0) -> Reaction:
    reaction = NOTHING
    for _ in range(times):
        finished += 1
        reaction = circuit.failed(failure(began=now), Load(finished, running), now, counts=True)
    return reaction


class Slots:
    """Some slots of one process, in which event after event is handled, and time passes as fast as it can."""

    def __init__(self, options: Options, slots: int, call: Callable[[int], tuple[float, bool]]) -> None:
        self.circuit = Circuit(options, lambda: 0.5, 0, 0.0)
        self.calls = 0
        self._call = call
        self._slots = slots
        self._running: list[tuple[float, int, float, bool]] = []
        self._finished = 0

    def run(self, events: int) -> str:
        """Handle so many, or until it opens; the state at the end."""
        now = 0.0
        while self.circuit.state != "open":
            while self.circuit.state == "closed" and len(self._running) < self._slots and self.calls < events:
                seconds, ok = self._call(self.calls)
                heapq.heappush(self._running, (now + seconds, self.calls, now, ok))
                self.calls += 1
            if self._running:
                now, _, began, ok = heapq.heappop(self._running)
                self._finished += 1
                if not ok:
                    load = Load(self._finished, len(self._running))
                    self.circuit.failed(failure(began=began), load, now, counts=True)
            elif self.calls >= events and self.circuit.state == "closed":
                break
            if self.circuit.state == "doubtful":
                self.circuit.doubt(Load(self._finished, len(self._running)), now)
        return self.circuit.state


def test_a_handler_that_always_fails_is_called_little_more_often_than_there_are_slots() -> None:
    for seconds in (0.0, 0.01, 5.0):
        slots = Slots(OPTIONS, 10, lambda _, seconds=seconds: (seconds, False))  # type: ignore[misc]
        assert slots.run(10_000) == "open"
        assert slots.calls <= 14


@pytest.mark.parametrize("success", [0.0, 0.05, 5.0, 60.0])
@pytest.mark.parametrize("broken", [0.0, 0.05, 5.0])
def test_a_queue_of_which_every_third_event_fails_stays_closed_however_long_calls_take(
    success: float, broken: float
) -> None:
    def call(number: int) -> tuple[float, bool]:
        return (success, True) if number % 3 else (broken, False)

    slots = Slots(Options(failures=5, patience=100), 10, call)
    assert slots.run(3_000) == "closed"
    assert slots.calls == 3_000


def test_a_call_that_hangs_keeps_a_broken_queue_from_opening_only_for_as_long_as_is_set() -> None:
    slots = Slots(OPTIONS, 10, lambda number: (3_600.0 if number == 3 else 0.01, False))
    assert slots.run(10_000) == "open"
    circuit = new_circuit()
    assert fail(circuit, 5).step == "doubt"
    assert circuit.doubt(Load(5, 1), 10.9) == "wait"
    assert circuit.doubt(Load(5, 1), 11.0) == "open"


def test_the_last_failure_of_a_row_asks_whether_the_calls_that_still_run_fail_too() -> None:
    circuit = new_circuit()
    assert fail(circuit, 4) == NOTHING
    assert fail(circuit, 1, finished=4) == Reaction(step="doubt")
    assert circuit.doubt(Load(5, 3), 1.1) == "wait"
    assert circuit.doubt(Load(6, 2), 1.2) == "close"
    assert circuit.state == "closed"


def test_a_success_before_a_late_failure_is_not_forgotten_while_it_is_doubtful() -> None:
    circuit = new_circuit()
    fail(circuit, 5)
    fail(circuit, 1, finished=6)
    assert circuit.doubt(Load(7, 1), 1.2) == "close"


def test_what_fails_while_it_is_doubtful_or_open_loses_no_attempt() -> None:
    circuit = new_circuit(random=0.5)
    fail(circuit, 5)
    assert fail(circuit, 1, finished=5) == Reaction(postpone=31.5)
    circuit.open(30, 1, 2.0)
    late = circuit.failed(failure(began=1.0), Load(6, 0), 12.0, counts=True)
    assert late == Reaction(postpone=20 + 1.5)


def test_stragglers_are_no_reason_to_open_it_again() -> None:
    circuit = opened(now=10.0)
    for number in range(20):
        assert circuit.failed(failure(began=9.0), Load(number, 0), 60.0, counts=True).step is None


def test_failures_that_began_after_another_process_has_closed_it_are_counted() -> None:
    circuit = opened(now=10.0)
    assert fail(circuit, 4, now=50.0) == NOTHING
    assert circuit.state == "closed"
    assert fail(circuit, 1, finished=4, now=50.0).step == "doubt"


def test_a_bad_payload_is_dealt_with_as_ever_whatever_the_state() -> None:
    circuit = opened()
    assert circuit.failed(failure(ValueError(), began=1.0), Load(0, 0), 12.0, counts=False) == NOTHING
    assert circuit.failed(failure(began=41.0, probe=True), Load(0, 0), 42.0, counts=False) == NOTHING


def test_a_failed_probe_opens_it_longer_and_comes_back_after_that() -> None:
    circuit = opened(now=10.0, trips=1)
    reaction = circuit.failed(failure(began=40.0, probe=True), Load(0, 0), 41.0, counts=True)
    assert reaction == Reaction(postpone=60.0, step="reopen")
    assert (circuit.state, circuit.trips, circuit.until) == ("open", 2, 101.0)


def test_a_process_that_knew_nothing_of_the_opening_judges_its_probe_all_the_same() -> None:
    reaction = new_circuit().failed(failure(began=40.0, probe=True), Load(0, 0), 41.0, counts=True)
    assert reaction == Reaction(postpone=30.0, step="reopen")


def test_a_share_opens_it_at_once() -> None:
    circuit = new_circuit(Options(failures=100, ratio=0.5, least_calls=10))
    reactions = [fail(circuit, 1, finished=2 * number + 1) for number in range(5)]
    assert [each.step for each in reactions] == [None] * 4 + ["open"]
    assert circuit.reason == "5 of 10 calls failed within 60 s"


def test_closing_counts_anew() -> None:
    circuit = new_circuit()
    fail(circuit, 4)
    circuit.close(4, 2.0)
    assert fail(circuit, 4, finished=4) == NOTHING


def pauses() -> Iterator[float]:
    return (Options(first_pause=30, factor=2, longest_pause=600).pause(trips) for trips in range(1, 8))


def test_pauses_double_up_to_the_longest() -> None:
    assert list(pauses()) == [30, 60, 120, 240, 480, 600, 600]
    assert Options(factor=100).pause(10**9) == 600
