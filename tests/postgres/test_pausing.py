"""What operators see of pauses, and change: by hand, whatever plugins have paused."""

from __future__ import annotations

import psycopg
import pytest

from eventbus.postgres.admin import NotFound
from eventbus.postgres.explanation import explain
from eventbus.postgres.pausing import pause, pauses, resume
from tests.postgres.line import SCHEMA, Line

BREAKER = "SELECT eventbus.pause_queue(1, 'breaker', 'five failures', 600, 30)"


@pytest.fixture
def line(conn: psycopg.Connection) -> Line:
    line = Line(conn)
    line.declare(ledger=["orders.#"])
    line.live()
    return line


def test_a_queue_is_paused_by_hand_until_somebody_resumes_it(line: Line) -> None:
    paused = pause(line.conn, SCHEMA, "ledger", "the bank is closed", None)
    assert pauses(line.conn, SCHEMA) == [paused]
    assert (paused.source, paused.until, paused.probed, paused.probing) == ("manual", None, False, False)
    assert paused.words().startswith("paused since ")
    assert paused.words().endswith(": the bank is closed; to go on: eventbus queues resume ledger")
    assert resume(line.conn, SCHEMA, "ledger") == [paused]
    assert pauses(line.conn, SCHEMA) == resume(line.conn, SCHEMA, "ledger") == []


def test_a_pause_by_hand_can_end_by_itself_and_a_second_one_replaces_it(line: Line) -> None:
    first = pause(line.conn, SCHEMA, "ledger", "lunch", 600)
    assert first.ends_in is not None
    assert 590 < first.ends_in <= 600
    assert first.words().endswith("lunch; it goes on in 10 min") or "in 9.9" in first.words()
    second = pause(line.conn, SCHEMA, "ledger", "long lunch", None)
    assert pauses(line.conn, SCHEMA) == [second]
    assert (second.since, second.until) == (first.since, None)
    assert pause(line.conn, SCHEMA, "ledger", "a moment", 0.0).reason == "a moment"
    assert pauses(line.conn, SCHEMA) == [], "a pause that is over is shown"


def test_resuming_by_hand_leaves_what_a_plugin_has_paused_and_all_ends_that_too(line: Line) -> None:
    line.one(BREAKER)
    pause(line.conn, SCHEMA, "ledger", "inspection", None)
    assert [item.source for item in pauses(line.conn, SCHEMA)] == ["breaker", "manual"]
    assert [item.source for item in resume(line.conn, SCHEMA, "ledger")] == ["manual"]
    [left] = pauses(line.conn, SCHEMA)
    assert "paused by breaker since" in left.words()
    assert "five failures; one event is let through to see in" in left.words()
    assert [item.source for item in resume(line.conn, SCHEMA, "ledger", every=True)] == ["breaker"]


def test_a_probe_that_is_out_is_shown(line: Line) -> None:
    line.publish()
    line.relay()
    line.one("SELECT eventbus.pause_queue(1, 'breaker', 'x', 0, 30)")
    [open_for_probes] = pauses(line.conn, SCHEMA)
    assert (open_for_probes.probed, open_for_probes.probing) == (True, False)
    line.claim("ledger")
    [probing] = pauses(line.conn, SCHEMA)
    assert probing.probing
    assert probing.words().endswith("one event is let through now to see")


def test_a_queue_that_is_not_there_is_named_and_the_others_are_listed(line: Line) -> None:
    with pytest.raises(NotFound, match="no queue 'leger'; known queues: ledger"):
        pause(line.conn, SCHEMA, "leger", "x", None)
    with pytest.raises(NotFound, match="no queue 'leger'"):
        resume(line.conn, SCHEMA, "leger")


def test_an_event_that_does_not_move_because_its_queue_is_paused_is_explained(line: Line) -> None:
    event = line.publish()
    line.relay()
    pause(line.conn, SCHEMA, "ledger", "the bank is closed", None)
    [copy] = explain(line.conn, SCHEMA, event, lease=30).copies
    [why] = copy.standing.why
    assert why.startswith("the queue is paused since ")
    assert why.endswith(": the bank is closed; to go on: eventbus queues resume ledger")
    resume(line.conn, SCHEMA, "ledger")
    [copy] = explain(line.conn, SCHEMA, event, lease=30).copies
    assert "paused" not in " ".join(copy.standing.why)
