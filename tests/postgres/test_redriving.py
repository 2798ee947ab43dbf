"""Redrive and discard keep the promises of the queue: the order of its keys, one execution per event, its lanes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from eventbus.errors import InvalidTopic
from eventbus.postgres import dead_letters
from eventbus.postgres.admin import NotFound
from eventbus.postgres.choosing import InvalidChoice, Period
from eventbus.postgres.dead_letters import Selection
from eventbus.postgres.pacing import Pace
from tests.postgres.line import DEAD, RETRY, SCHEMA, Line
from tests.waiting import wait_until

ALL = Selection()
PARKED = {"outcome": "parked"}


@pytest.fixture
def line(conn: psycopg.Connection) -> Line:
    line = Line(conn)
    line.live()
    return line


def declare(line: Line, name: str = "book", **rules: Any) -> None:
    wanted = json.dumps([{"name": name, "patterns": ["orders.#"], **rules}])
    [(found, number)] = line.conn.execute("SELECT name, id FROM eventbus.declare_queues(%s)", [wanted]).fetchall()
    line.numbers[found] = number


def ordered(line: Line, when_exhausted: str = "park") -> None:
    declare(line, kind="ordered", lanes=1, when_exhausted=when_exhausted)


def publish(line: Line, keys: str) -> None:
    """One event per letter of ``keys``, which is its key."""
    for key in keys:
        line.publish(key=key)
    line.relay()


def redrive(line: Line, selection: Selection = ALL, batch: int = 500) -> list[int]:
    return dead_letters.redrive(line.conn, SCHEMA, selection, Pace(batch=batch))


def discard(line: Line, selection: Selection = ALL) -> list[int]:
    return dead_letters.discard(line.conn, SCHEMA, selection)


def letters(line: Line) -> dict[int, int]:
    """Numbers of the dead letters by where they are in the queue."""
    return dict(line.conn.execute("SELECT seq, id FROM eventbus.dead_letters ORDER BY seq").fetchall())


def due(line: Line, most: int = 1) -> list[tuple[int, tuple[int, Any]]]:
    """What may run now: where it is in the queue, and how it is settled."""
    seqs = "SELECT seq FROM eventbus.exceptions WHERE id = %s"
    return [(line.one(seqs, held[0]), held) for held in line.claim_due("book", most)]


def run_all(line: Line, **outcomes: Any) -> list[int]:
    """Let everything run that may, one after the other; ``s3`` says how 3 ends the first time."""
    order: list[int] = []
    while found := due(line):
        for seq, held in found:
            order.append(seq)
            assert line.settle_exception(held, **outcomes.pop(f"s{seq}", {"outcome": "done"}))
    return order


def park(line: Line) -> None:
    """Let a worker look for what is new; all of it has to wait."""
    assert not line.claim("book")[0]


def states(line: Line) -> dict[int, str]:
    return dict(line.conn.execute("SELECT seq, state FROM eventbus.exceptions ORDER BY seq").fetchall())


# The order of keys


def test_a_redriven_letter_runs_before_the_events_that_were_parked_behind_it(line: Line) -> None:
    ordered(line)
    publish(line, "kkjk")
    assert line.settle(line.claim("book"), s1=DEAD, s2=PARKED, s4=PARKED)
    assert run_all(line) == [], "blocked"
    publish(line, "k")
    park(line)
    redrive(line)
    assert states(line) == {1: "waiting", 2: "parked", 4: "parked", 5: "parked"}
    [(seq, held)] = due(line)
    assert (seq, due(line)) == (1, []), "one at a time"
    assert line.settle_exception(held, outcome="done")
    assert run_all(line) == [2, 4, 5]


def test_a_redriven_letter_that_dies_again_blocks_again(line: Line) -> None:
    ordered(line)
    publish(line, "kk")
    assert line.settle(line.claim("book"), s1=DEAD, s2=PARKED)
    redrive(line)
    assert run_all(line, s1=DEAD) == [1]
    [letter] = dead_letters.letters(line.conn, SCHEMA, ALL, limit=9)
    assert (letter.blocks, letter.attempts, letter.redriven_from) == (True, 1, 1)
    redrive(line)
    assert run_all(line) == [1, 2]


def test_a_discarded_letter_lets_the_next_event_of_its_key_go_on(line: Line) -> None:
    ordered(line)
    publish(line, "kkjjk")
    assert line.settle(line.claim("book"), s1=DEAD, s2=PARKED, s3=DEAD, s4=PARKED, s5=PARKED)
    assert discard(line, Selection(ids=(letters(line)[1],))) == [1]
    assert run_all(line) == [2, 5]
    discard(line)
    assert run_all(line) == [4]


def test_workers_that_wait_are_told_when_a_discard_lets_something_go_on(line: Line, dsn: str) -> None:
    ordered(line)
    publish(line, "kk")
    assert line.settle(line.claim("book"), s1=DEAD, s2=PARKED)
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute('LISTEN "eventbus.work"')
        discard(line)
        assert [notice.payload for notice in listener.notifies(timeout=5, stop_after=1)] == ["*"]


@pytest.mark.parametrize("batch", [1, 2, 500])
def test_several_letters_of_a_key_run_in_the_order_in_which_they_were_published(line: Line, batch: int) -> None:
    ordered(line, "skip")
    publish(line, "kjkkjk")
    assert line.settle(line.claim("book"), s1=DEAD, s2=DEAD, s3=DEAD, s4=DEAD, s5=DEAD, s6=DEAD)
    for again in (3, 1):
        redrive(line, Selection(ids=(letters(line)[again],)))
        assert run_all(line, **{f"s{again}": DEAD}) == [again]
    assert list(letters(line).values()) == [8, 2, 7, 4, 5, 6], "younger letters of older events"
    assert sorted(redrive(line, batch=batch)) == [2, 4, 5, 6, 7, 8]
    order = run_all(line)
    assert [seq for seq in order if seq in (1, 3, 4, 6)] == [1, 3, 4, 6]
    assert [seq for seq in order if seq in (2, 5)] == [2, 5]


def test_a_selection_takes_no_earlier_letter_that_it_does_not_fit(line: Line) -> None:
    ordered(line, "skip")
    publish(line, "kk")
    assert line.settle(line.claim("book"), s1=DEAD | {"reason": "other"}, s2=DEAD)
    assert redrive(line, Selection(error="gave up")) == [2]
    assert run_all(line) == [2]


def test_a_redriven_letter_waits_for_what_of_its_key_is_under_way(line: Line) -> None:
    ordered(line, "skip")
    publish(line, "kkk")
    assert line.settle(line.claim("book"), s1=DEAD, s2=RETRY, s3=PARKED)
    redrive(line)
    assert states(line) == {1: "parked", 2: "waiting", 3: "parked"}
    line.conn.execute("UPDATE eventbus.exceptions SET due_at = clock_timestamp()")
    [(seq, held)] = due(line)
    assert (seq, due(line)) == (2, [])
    assert line.settle_exception(held, outcome="done")
    assert run_all(line) == [1, 3]


@pytest.fixture
def mixed(line: Line) -> Line:
    """Of one key the first event is dead and blocks nothing, the second blocks the third."""
    ordered(line, "skip")
    publish(line, "k")
    assert line.settle(line.claim("book"), s1=DEAD)
    ordered(line, "park")
    publish(line, "kk")
    assert line.settle(line.claim("book"), s2=DEAD, s3=PARKED)
    return line


def test_an_earlier_letter_runs_although_a_later_one_blocks_and_takes_nothing_along_that_this_blocks(
    mixed: Line,
) -> None:
    redrive(mixed, Selection(ids=(letters(mixed)[1],)))
    [(seq, held)] = due(mixed, most=100)
    assert seq == 1
    assert mixed.settle_exception(held, outcome="done")
    assert states(mixed) == {3: "parked"}
    redrive(mixed)
    assert run_all(mixed) == [2, 3]


def test_a_later_letter_that_is_redriven_waits_for_an_earlier_one_that_blocks(mixed: Line) -> None:
    redrive(mixed, Selection(ids=(letters(mixed)[1],)))
    assert run_all(mixed, s1=DEAD) == [1], "and blocks from now on"
    redrive(mixed, Selection(ids=(letters(mixed)[2],)))
    assert run_all(mixed) == []
    redrive(mixed)
    assert run_all(mixed) == [1, 2, 3]


def test_what_came_to_wait_behind_a_later_letter_that_blocks_goes_on_once_that_is_redriven(line: Line) -> None:
    ordered(line, "skip")
    publish(line, "kk")
    assert line.settle(line.claim("book"), s1=DEAD, s2=DEAD)
    ordered(line, "park")
    publish(line, "kk")
    assert line.settle(line.claim("book"), s3=DEAD, s4=PARKED)
    redrive(line, Selection(ids=(1, 2)))
    order = run_all(line)
    redrive(line)
    assert order + run_all(line) == [1, 2, 3, 4]


def test_a_letter_without_a_key_waits_for_nobody(line: Line) -> None:
    ordered(line)
    line.publish()
    line.publish()
    line.relay()
    assert line.settle(line.claim("book"), s1=DEAD, s2=DEAD)
    redrive(line)
    assert [seq for seq, _ in due(line, most=10)] == [1, 2]


# Executions, marks, lanes


def test_a_redriven_event_is_marked_for_its_handler_and_in_its_next_dead_letter(line: Line) -> None:
    declare(line)
    publish(line, "k")
    assert line.settle(line.claim("book"), s1=DEAD)
    redrive(line)
    [(retrying,)] = line.conn.execute("SELECT redriven_from FROM eventbus.exceptions").fetchall()
    assert retrying == 1
    token = line.worker
    claimed = line.conn.execute(
        "SELECT redriven, attempts FROM eventbus.claim_due(%s, %s, %s, ARRAY[9], ARRAY['-infinity'::timestamptz],"
        " 100000, false) WHERE exception_id IS NOT NULL",
        [line.worker, token, [line.numbers["book"]]],
    ).fetchall()
    assert claimed == [(True, 0)]


def test_an_event_that_a_twin_completed_meanwhile_is_not_run_again(line: Line) -> None:
    declare(line, tracking="idempotent")
    event_id = line.publish()
    line.relay()
    assert line.settle(line.claim("book"), s1=DEAD)
    redrive(line)
    assert twins(line) == [None], "not completed: it runs"
    line.conn.execute(
        "SELECT eventbus.release_unknown(%s, '{}', ARRAY(SELECT id FROM eventbus.exceptions))", [line.worker]
    )
    assert run_all(line, s1=DEAD) == [1]
    line.one("SELECT eventbus.publish('orders.created', '1', event_id => %s)", event_id)
    line.relay()
    assert line.settle(line.claim("book"))
    redrive(line)
    assert twins(line) == ["completed"]


def twins(line: Line) -> list[str | None]:
    rows = line.conn.execute(
        "SELECT twin FROM eventbus.claim_due(%s, gen_random_uuid(), %s, ARRAY[9], ARRAY['-infinity'::timestamptz],"
        " 100000, false) WHERE exception_id IS NOT NULL",
        [line.worker, [line.numbers["book"]]],
    )
    return [twin for (twin,) in rows]


def test_a_letter_whose_lane_is_gone_returns_to_the_lane_of_its_key(line: Line) -> None:
    declare(line, kind="ordered", lanes=2)
    publish(line, "abcdefgh")
    while (claim := line.claim("book"))[2]:
        for claim_id, token, seqs in by_claim(line, claim):
            assert line.settle((claim_id, token, seqs), **{f"s{seq}": DEAD for seq in seqs})
    declare(line, kind="ordered", lanes=5)
    line.claim("book")
    assert len(redrive(line)) == 8
    wrong = line.one(
        "SELECT count(*) FROM eventbus.exceptions e WHERE e.lane <> 2 + eventbus.lane_of('ordered', 5, e.key, 0, 0)"
    )
    assert wrong == 0
    assert sorted(seq for seq, _ in due(line, most=20)) == sorted(
        seq for (seq,) in line.conn.execute("SELECT seq FROM eventbus.exceptions")
    )


def by_claim(line: Line, claim: tuple[int, Any, list[int]]) -> list[tuple[int, Any, list[int]]]:
    """A claim of several lanes is several ranges."""
    rows = line.conn.execute(
        "SELECT c.id, c.lo, c.hi FROM eventbus.claims c WHERE c.token = %s ORDER BY c.id", [claim[1]]
    )
    return [(claim_id, claim[1], list(range(lo, hi + 1))) for claim_id, lo, hi in rows]


@pytest.mark.parametrize("change", [redrive, discard])
def test_a_letter_whose_lane_changes_at_this_very_moment_is_changed_under_the_lock_of_the_new_one(
    line: Line, dsn: str, change: Any
) -> None:
    declare(line)
    publish(line, "k")
    assert line.settle(line.claim("book"), s1=DEAD)
    lock = "SELECT eventbus.lock_lanes(%s, %s)"
    with (
        psycopg.connect(dsn) as retiring,
        psycopg.connect(dsn) as claiming,
        psycopg.connect(dsn, autocommit=True) as other,
        ThreadPoolExecutor(1) as thread,
    ):
        mine = Line.__new__(Line)
        mine.conn = other

        def waits_for(holder: psycopg.Connection) -> bool:
            blocking = line.one("SELECT pg_blocking_pids(%s)", other.info.backend_pid)
            return bool(blocking == [holder.info.backend_pid])

        retiring.execute(lock, [[line.numbers["book"]], [0]])
        claiming.execute(lock, [[line.numbers["book"]], [1]])
        moved = thread.submit(change, mine)
        wait_until(lambda: waits_for(retiring), 30)
        retiring.execute("UPDATE eventbus.dead_letters SET lane = 1")
        retiring.commit()
        wait_until(lambda: waits_for(claiming), 30)
        claiming.commit()
        assert moved.result(30) == [1]
    assert letters(line) == {}
    lanes = [lane for (lane,) in line.conn.execute("SELECT lane FROM eventbus.exceptions")]
    assert lanes == ([1] if change is redrive else [])


# Choosing


def test_letters_are_found_by_a_part_of_their_reason_or_error_whatever_its_case(line: Line) -> None:
    declare(line)
    publish(line, "abcd")
    errors = [
        DEAD | {"reason": "Attempts used up", "error": {"type": "builtins.KeyError", "message": "50%_off"}},
        DEAD | {"reason": "discarded", "error": {"type": "TimeoutError", "message": "Straße"}},
        DEAD | {"reason": "worker died", "error": None},
        DEAD | {"reason": "a", "error": {"type": "b", "message": None}},
    ]
    assert line.settle(line.claim("book"), **{f"s{n + 1}": error for n, error in enumerate(errors)})

    def found(text: str) -> list[int]:
        return sorted(letter.id for letter in dead_letters.letters(line.conn, SCHEMA, Selection(error=text), limit=9))

    assert found("USED UP") == [1]
    assert found("keyerror") == [1]
    assert found("50%_OFF") == [1], "no wildcard"
    assert found("5%f") == []
    assert found("straße") == [2]
    assert found("D") == [1, 2, 3]
    assert found("a\nb") == [4] or found("a") == [1, 2, 4]
    assert found("'; DROP TABLE x --") == []


def test_letters_are_found_by_when_they_died(line: Line) -> None:
    declare(line)
    publish(line, "abcd")
    assert line.settle(line.claim("book"), s1=DEAD, s2=DEAD, s3=DEAD, s4=DEAD)
    line.conn.execute("UPDATE eventbus.dead_letters SET died_at = clock_timestamp() - id * interval '1 hour'")

    def found(since: Any = None, until: Any = None) -> list[int]:
        selection = Selection(died=Period(since, until))
        return sorted(letter.id for letter in dead_letters.letters(line.conn, SCHEMA, selection, limit=9))

    hour = timedelta(hours=1)
    now = line.one("SELECT clock_timestamp()")
    assert found(2.5 * hour) == [1, 2]
    assert found(None, 2.5 * hour) == [3, 4]
    assert found(3.5 * hour, 1.5 * hour) == [2, 3]
    assert found(now - 2.5 * hour, 1.5 * hour) == [2]
    assert found(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)) == [1, 2, 3, 4]
    died = line.one("SELECT died_at FROM eventbus.dead_letters WHERE id = 2")
    assert (found(died), found(None, died)) == ([1, 2], [3, 4]), "from since on, before until"
    assert redrive(line, Selection(queue="book", error="gave", died=Period(2.5 * hour))) == [1, 2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ids": (2**63,)}, "9223372036854775808 is no number of a dead letter; they go from 1 to 9223372036854775807"),
        ({"ids": (1, 0)}, "0 is no number"),
        ({"ids": (10**400,)}, "0… is no number"),
        ({"error": ""}, "error ''"),
        ({"error": "a\0b"}, "stored"),
        ({"error": "\ud800"}, "stored"),
        ({"queue": "\udcff"}, "stored"),
    ],
)
def test_what_can_fit_no_letter_is_refused_in_words(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidChoice, match=message):
        Selection(**wrong)


def test_unknown_names_and_bad_patterns_are_refused_in_words(line: Line) -> None:
    declare(line)
    with pytest.raises(NotFound, match="known queues: book"):
        redrive(line, Selection(queue="nope"))
    with pytest.raises(InvalidTopic, match="wildcard"):
        Selection(topic="a.b*")


def test_a_preview_counts_by_queue_topic_and_reason_and_changes_nothing(line: Line) -> None:
    declare(line)
    declare(line, "audit")
    for topic in ("orders.created", "orders.created", "orders.paid"):
        line.publish(topic)
    line.relay()
    line.conn.execute("DELETE FROM eventbus.outbox WHERE topic = 'orders.paid'")
    assert line.settle(line.claim("book"), s1=DEAD, s2=DEAD | {"reason": "other"}, s3=DEAD)
    assert line.settle(line.claim("audit"), s1=DEAD, s2=DEAD)
    before = line.conn.execute("SELECT l::text FROM eventbus.dead_letters l ORDER BY 1").fetchall()
    found = [
        (item.queue, item.topic, item.reason, item.letters, item.without_event)
        for item in dead_letters.groups(line.conn, SCHEMA, ALL)
    ]
    assert found == [
        ("audit", "orders.created", "gave up", 2, 0),
        ("book", "orders.created", "gave up", 1, 0),
        ("book", "orders.created", "other", 1, 0),
        ("book", None, "gave up", 1, 1),
    ]
    assert dead_letters.missing(line.conn, SCHEMA, Selection(ids=(1, 2, 77), queue="book")) == [77]
    assert line.conn.execute("SELECT l::text FROM eventbus.dead_letters l ORDER BY 1").fetchall() == before
    assert states(line) == {}


def test_moments_that_programs_cannot_hold_do_not_break_a_list(line: Line) -> None:
    declare(line)
    publish(line, "ab")
    assert line.settle(line.claim("book"), s1=DEAD, s2=RETRY)
    line.conn.execute("UPDATE eventbus.dead_letters SET died_at = 'infinity', published_at = '4000-01-01 BC'")
    line.conn.execute("UPDATE eventbus.exceptions SET due_at = '20000-01-01'")
    line.conn.execute("SET TimeZone = 'Pacific/Kiritimati'")
    [letter] = dead_letters.letters(line.conn, SCHEMA, ALL, limit=9)
    assert letter.published_at
    assert (letter.died_at.year, letter.published_at.year) == (9999, 1)
    [retrying] = dead_letters.retries(line.conn, SCHEMA, queue=None, limit=9)
    assert retrying.due_at.year == 9999
    assert retrying.due_in > 9e9
