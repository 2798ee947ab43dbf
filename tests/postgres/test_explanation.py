"""`explain` says truthfully where each copy of an event is, and why it is not moving, at every station of the line."""

from __future__ import annotations

import json
from uuid import UUID, uuid4

import psycopg
import pytest

from eventbus.postgres.admin import NotFound
from eventbus.postgres.copies import Standing
from eventbus.postgres.explanation import Explanation, explain
from tests.postgres.line import DEAD, RETRY, SCHEMA, Line


@pytest.fixture
def line(conn: psycopg.Connection) -> Line:
    line = Line(conn)
    line.declare(ledger=["orders.#", "orders.*"], other=["users.*"])
    line.live()
    return line


def told(line: Line, event_id: UUID, lease: float = 30) -> Explanation:
    return explain(line.conn, SCHEMA, event_id, lease=lease)


def standing(line: Line, event_id: UUID, queue: str = "ledger", lease: float = 30) -> Standing:
    [copy] = [copy for copy in told(line, event_id, lease).copies if copy.queue == queue]
    return copy.standing


def silence(line: Line) -> None:
    line.conn.execute("UPDATE eventbus.workers SET heartbeat_at = heartbeat_at - interval '1 hour'")


def test_an_unknown_event_is_not_found(line: Line) -> None:
    with pytest.raises(NotFound, match="never published here, its transaction has not committed, or it was delayed"):
        told(line, uuid4())


def test_every_queue_that_matches_is_listed_with_its_patterns_and_the_others_by_name(line: Line) -> None:
    event_id = line.publish()
    line.relay()
    explanation = told(line, event_id)
    assert explanation.stage == "relayed"
    assert [(copy.queue, copy.patterns, copy.standing.stage) for copy in explanation.copies] == [
        ("ledger", ("orders.#", "orders.*"), "waiting"),
    ]
    assert explanation.unmatched == ("other",)


def test_an_event_whose_transaction_commits_late_is_not_relayed_yet(line: Line, dsn: str) -> None:
    line.conn.execute("SELECT eventbus.tick(100)")
    line.resolve(["orders.created"])
    with psycopg.connect(dsn) as slow:
        row = slow.execute("SELECT eventbus.publish('orders.created', '1')").fetchone()
        assert row
        before = [line.publish() for _ in range(3)]
        line.conn.execute("SELECT eventbus.tick(100)")
        with pytest.raises(NotFound):
            told(line, row[0])
        slow.commit()
    assert {told(line, event_id).stage for event_id in before} == {"relayed"}
    explanation = told(line, row[0])
    assert explanation.stage == "not relayed"
    assert [(copy.queue, copy.standing.stage) for copy in explanation.copies] == [("ledger", "not relayed")]
    assert explanation.unmatched == ("other",)
    line.relay()
    assert told(line, row[0]).stage == "relayed"


def test_what_a_bounded_tick_left_over_is_not_relayed_and_says_how_many_come_before_it(line: Line) -> None:
    events = [line.publish() for _ in range(5)]
    line.conn.execute("SELECT eventbus.tick(100)")
    line.resolve(["orders.created"])
    line.conn.execute("SELECT eventbus.tick(2)")
    assert [told(line, event_id).stage for event_id in events] == ["relayed"] * 2 + ["not relayed"] * 3
    assert "committed events before it that are not relayed either: 2" in told(line, events[4]).why
    assert not any("before it" in why for why in told(line, events[2]).why)


def test_an_event_that_nobody_relays_names_the_missing_workers(line: Line) -> None:
    event_id = line.publish()
    silence(line)
    assert "no worker is alive" in told(line, event_id).why[0]
    assert not any("no worker" in why for why in told(line, event_id, lease=7200).why)


def test_a_paused_bus_is_given_as_the_reason_before_and_after_the_relay(line: Line) -> None:
    relayed = line.publish()
    line.relay()
    fresh = line.publish()
    line.conn.execute("UPDATE eventbus.bus SET state = 'paused', reason = 'a copy'")
    reason = "the bus is paused (a copy); to go on: eventbus resume"
    assert told(line, fresh).why[0] == reason
    assert standing(line, relayed).why == (reason,)


def test_a_delayed_event_says_when_it_is_due(line: Line) -> None:
    event_id = line.one("SELECT eventbus.publish('orders.created', '1', delay => '1 hour')")
    explanation = told(line, event_id)
    assert (explanation.stage, explanation.why) == ("scheduled", ())
    assert explanation.what == "due in 1 h" or explanation.what.startswith("due in 60")
    assert explanation.due_at is not None
    line.conn.execute("UPDATE eventbus.scheduled SET due_at = clock_timestamp() - interval '10 s'")
    silence(line)
    assert told(line, event_id).what.startswith("scheduled, due since 10")
    assert "no worker is alive" in told(line, event_id).why[0]


def test_a_waiting_copy_says_its_place_and_who_is_missing(line: Line) -> None:
    events = [line.publish() for _ in range(4)]
    line.relay()
    first = standing(line, events[0])
    assert (first.stage, first.what) == ("waiting", "waiting at position 1")
    assert "nobody has ever claimed from this queue; 1 worker is alive" in first.why[0]
    last = standing(line, events[3])
    assert last.what == "waiting at position 4, behind 3 others"
    assert (last.facts["position"], last.facts["ahead"]) == (4, 3)
    assert line.settle(line.claim("ledger", 1))
    moved = standing(line, events[3])
    assert (moved.what, moved.why) == ("waiting at position 3, behind 2 others", ()), "a worker is at it"
    silence(line)
    assert "no worker is alive" in standing(line, events[3]).why[0]
    line.live()
    assert "the last worker that claimed from this queue is gone; 1 worker is alive" in standing(line, events[3]).why[0]


def test_a_claimed_copy_names_its_worker_and_whether_it_has_started(line: Line) -> None:
    events = [line.publish() for _ in range(2)]
    line.relay()
    claim = line.claim("ledger")
    line.conn.execute("UPDATE eventbus.workers SET started = json_build_object(%s::text, 1)", [claim[0]])
    running, claimed = (standing(line, event_id) for event_id in events)
    assert running.what.startswith("running in worker box/42 since ")
    assert claimed.what.startswith("claimed, not started yet, by worker box/42 since ")
    assert (running.why, claimed.why) == ((), ())
    silence(line)
    assert "its worker has been silent for 1 h" in standing(line, events[0]).why[0]


def test_a_copy_that_was_recorded_before_its_claim_ended_is_done(line: Line) -> None:
    events = [line.publish() for _ in range(2)]
    line.relay()
    claim = line.claim("ledger")
    line.conn.execute("SELECT eventbus.record_progress(%s, %s, ARRAY[1::bigint], '[]')", claim[:2])
    assert [standing(line, event_id).stage for event_id in events] == ["done", "running"]


def test_a_settled_copy_is_done_and_its_neighbours_are_where_they_are(line: Line) -> None:
    done, retrying, dead, alone, first, last = events = [line.publish() for _ in range(6)]
    line.relay()
    outcomes = {"s2": RETRY, "s3": DEAD, "s4": {"outcome": "released"}, "s5": {"outcome": "released", "hi": 6}}
    assert line.settle(line.claim("ledger"), **outcomes)
    stages = [standing(line, event_id).stage for event_id in events]
    assert stages == ["done", "retrying", "dead", "waiting", "waiting", "waiting"]
    assert standing(line, done).facts["settled_at"] is not None
    assert standing(line, retrying).what.startswith("retrying after 1 attempt, due in ")
    assert standing(line, retrying).what.endswith(": ValueError: no such order")
    assert standing(line, retrying).why == (), "it only waits for its time"
    assert standing(line, dead).what == "dead letter 1 after 1 attempt: gave up"
    assert "eventbus dead-letters redrive 1" in standing(line, dead).why[0]
    for event_id in (alone, first, last):
        assert standing(line, event_id).what.startswith("back in the queue, due since ")


def test_a_retry_that_runs_names_its_worker_and_one_that_is_late_its_reason(line: Line) -> None:
    event_id = line.publish()
    line.relay()
    assert line.settle(line.claim("ledger"), s1=RETRY)
    line.conn.execute("UPDATE eventbus.exceptions SET due_at = clock_timestamp() - interval '1 min', crashes = 2")
    assert standing(line, event_id).what.startswith("retrying after 1 attempt and 2 crashes, due since 1 min")
    line.conn.execute("UPDATE eventbus.exceptions SET crashes = 0")
    silence(line)
    assert "no worker is alive" in standing(line, event_id).why[0]
    line.live(pid=43)
    [held] = line.claim_due("ledger")
    assert standing(line, event_id).what == "running in worker box/43"
    assert line.settle_exception(held, outcome="done")
    assert standing(line, event_id).stage == "done"


def test_a_redriven_copy_waits_again_and_is_done_once_it_is_done(line: Line) -> None:
    from eventbus.postgres.dead_letters import Selection, redrive

    event_id = line.publish()
    line.relay()
    assert line.settle(line.claim("ledger"), s1=DEAD)
    redrive(line.conn, SCHEMA, Selection())
    assert standing(line, event_id).stage == "waiting"
    [held] = line.claim_due("ledger")
    assert line.settle_exception(held, outcome="done")
    assert standing(line, event_id).stage == "done"


def test_a_dead_letter_is_explained_when_retention_has_removed_its_event(line: Line) -> None:
    event_id = line.publish()
    line.relay()
    assert line.settle(line.claim("ledger"), s1=DEAD)
    line.conn.execute("DELETE FROM eventbus.outbox; DELETE FROM eventbus.deliveries")
    assert standing(line, event_id).stage == "dead"


def test_a_queue_that_came_later_has_no_copy_and_says_so(line: Line) -> None:
    event_id = line.publish()
    line.relay()
    line.declare(late=["#"])
    late = standing(line, event_id, queue="late")
    assert late.stage == "no copy"
    assert "after the event was relayed" in late.why[0]


def test_an_event_id_that_was_published_twice_shows_both_copies(line: Line) -> None:
    event_id = line.publish()
    line.conn.execute("SELECT eventbus.publish('orders.created', '2', event_id => %s)", [event_id])
    line.relay()
    copies = [copy for copy in told(line, event_id).copies if copy.queue == "ledger"]
    assert [copy.standing.facts["position"] for copy in copies] == [1, 2]


def test_a_restored_copy_that_nobody_has_attached_is_the_reason(line: Line) -> None:
    event_id = line.publish()
    line.conn.execute("UPDATE eventbus.ticks SET system_identifier = 1")
    assert "restored from another one" in told(line, event_id).why[0]


def test_one_event_among_many_is_found_without_reading_all_deliveries(line: Line) -> None:
    line.publish()
    line.relay()
    line.conn.execute(
        "INSERT INTO eventbus.deliveries (queue_id, lane, seq, outbox_id, size)"
        " SELECT %s, 0, g, 100 + g, 2 FROM generate_series(2, 100000) g",
        [line.numbers["ledger"]],
    )
    line.conn.execute("SELECT brin_summarize_new_values('eventbus.deliveries_outbox')")
    event_id = line.publish()
    line.relay()
    before = line.rows_read("deliveries")
    assert standing(line, event_id).stage == "waiting"
    assert line.rows_read("deliveries") - before < 20_000


def keyed(line: Line, **options: object) -> None:
    """Make the queue ``keyed``, ordered with one lane; it gets users' events."""
    wanted = {"name": "keyed", "patterns": ["users.#"], "kind": "ordered", "lanes": 1, **options}
    rows = line.conn.execute("SELECT name, id FROM eventbus.declare_queues(%s)", [json.dumps([wanted])])
    line.numbers |= dict(rows.fetchall())


PARKED = {"outcome": "parked"}


def test_a_parked_copy_names_the_event_that_it_waits_for_and_what_that_one_does(line: Line) -> None:
    keyed(line)
    first, second = (line.publish("users.seen", key="a") for _ in range(2))
    line.relay()
    assert line.settle(line.claim("keyed"), s1=RETRY, s2=PARKED)
    parked = standing(line, second, "keyed")
    assert parked.stage == "parked"
    assert parked.what.startswith(f"parked behind event {first} of its key, which is retried after 1 attempt, due in ")
    assert parked.facts["behind"] == first
    line.conn.execute("UPDATE eventbus.exceptions SET due_at = clock_timestamp() WHERE state = 'waiting'")
    [held] = line.claim_due("keyed", 1)
    assert standing(line, second, "keyed").what == f"parked behind event {first} of its key, which is running"
    assert line.settle_exception(held, outcome="released")
    assert standing(line, second, "keyed").what.startswith(f"parked behind event {first} of its key, which is retried")


def test_a_copy_behind_a_dead_letter_names_it_and_says_how_to_go_on(line: Line) -> None:
    keyed(line)
    first, second = (line.publish("users.seen", key="a") for _ in range(2))
    line.relay()
    assert line.settle(line.claim("keyed"), s1=DEAD, s2=PARKED)
    parked = standing(line, second, "keyed")
    assert parked.what == "parked behind dead letter 1 of its key: gave up"
    assert parked.why == ("to go on: eventbus dead-letters redrive 1, or discard 1",)
    assert (parked.facts["behind"], parked.facts["behind_dead_letter"]) == (first, 1)
    assert "later events of its key wait until it is redriven or discarded" in standing(line, first, "keyed").why


def test_a_copy_says_what_is_recorded_of_its_execution(line: Line) -> None:
    keyed(line, kind="plain", lanes=None, tracking="idempotent")
    events = [line.publish("users.seen") for _ in range(2)]
    line.relay()
    claim = line.claim("keyed")
    events.append(line.publish("users.seen"))
    line.relay()
    assert standing(line, events[0], "keyed").facts["execution"] == "pending"
    assert line.settle(claim, s2=RETRY)
    done, retrying, waiting = (standing(line, event, "keyed") for event in events)
    assert done.notes[0].startswith("its execution was completed at 20")
    assert not done.notes[0].endswith("again")
    assert retrying.notes[0].startswith("its execution is pending since 20")
    assert (waiting.notes, "execution" in waiting.facts) == ((), False)
    line.conn.execute("SELECT eventbus.publish('users.seen', '1', event_id => %s)", [events[0]])
    line.relay()
    _, twin = (copy.standing for copy in told(line, events[0]).copies if copy.queue == "keyed")
    assert (twin.stage, twin.facts["execution"]) == ("waiting", "completed")
    assert twin.notes[0].endswith("the handler does not run for it again")


def test_a_pending_execution_of_another_delivery_is_told_apart(line: Line) -> None:
    keyed(line, kind="plain", lanes=None, tracking="idempotent")
    event_id = line.publish("users.seen")
    line.conn.execute("SELECT eventbus.publish('users.seen', '1', event_id => %s)", [event_id])
    line.relay()
    line.claim("keyed", 1)
    mine, other = (copy.standing for copy in told(line, event_id).copies if copy.queue == "keyed")
    assert not mine.notes[0].endswith("by another delivery of the same event id")
    assert other.notes[0].endswith("by another delivery of the same event id")


def test_a_replayed_copy_is_an_execution_of_its_own(line: Line) -> None:
    keyed(line, kind="plain", lanes=None, tracking="idempotent")
    event_id = line.publish("users.seen")
    line.relay()
    assert line.settle(line.claim("keyed"))
    replay = line.one("SELECT eventbus.begin_replay(%s, NULL, NULL, ARRAY['users.seen'])", line.numbers["keyed"])
    line.conn.execute("SELECT eventbus.replay_step(%s, 100, 100)", [replay])
    first, again = (copy.standing for copy in told(line, event_id).copies if copy.queue == "keyed")
    assert (first.stage, first.facts["execution"]) == ("done", "completed")
    assert (again.stage, "execution" in again.facts) == ("waiting", False)


def test_a_redriven_copy_and_a_replayed_one_say_where_they_come_from(line: Line) -> None:
    from eventbus.postgres.dead_letters import Selection, redrive

    event_id = line.publish()
    line.relay()
    assert line.settle(line.claim("ledger"), s1=DEAD)
    redrive(line.conn, SCHEMA, Selection())
    assert standing(line, event_id).notes == ("redriven: it was dead letter 1",)
    replay = line.one("SELECT eventbus.begin_replay(%s, NULL, NULL, ARRAY['orders.created'])", line.numbers["ledger"])
    line.conn.execute("SELECT eventbus.replay_step(%s, 100, 100)", [replay])
    copies = [copy.standing for copy in told(line, event_id).copies if copy.queue == "ledger"]
    assert [copy.notes for copy in copies] == [
        ("redriven: it was dead letter 1",),
        (f"played once more by replay {replay}",),
    ]
    assert copies[1].facts["replay"] == replay


def test_an_event_that_a_filling_queue_does_not_have_yet_is_told_to_come(line: Line) -> None:
    event_id = line.publish()
    line.relay()
    keyed(line, kind="plain", lanes=None, patterns=["orders.*"], start="earliest")
    filling = standing(line, event_id, "keyed")
    assert filling.stage == "filling"
    assert filling.what == "the queue still gets what was relayed before it began: 0%; this event in its turn"


def test_a_copy_whose_lanes_have_changed_is_shown_once_where_it_is_now(line: Line) -> None:
    keyed(line)
    events = [line.publish("users.seen", key="a") for _ in range(2)]
    line.relay()
    assert line.settle(line.claim("keyed"), s1=RETRY, s2=PARKED)
    keyed(line, lanes=4)
    line.claim("keyed")
    for event_id, stage in zip(events, ("retrying", "parked"), strict=True):
        mine = [copy for copy in told(line, event_id).copies if copy.queue == "keyed"]
        assert [copy.standing.stage for copy in mine] == [stage]


def test_the_worker_that_claimed_last_is_found_in_any_lane(line: Line) -> None:
    keyed(line, lanes=64)
    events = [line.publish("users.seen", key=f"key{number}") for number in range(20)]
    line.relay()
    line.claim("keyed", 3)
    late = [standing(line, event_id, "keyed") for event_id in events]
    waiting = [one for one in late if one.stage == "waiting"]
    assert waiting
    assert all(one.why == () for one in waiting), "a worker is at it"
