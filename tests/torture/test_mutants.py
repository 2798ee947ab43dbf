"""The checker goes red when the engine loses one of its fences: each is taken out once, and the loss has to be seen.

A scene is played by hand with the engine as it is, and must be found right; then with the engine broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest

from tests.torture.kinds import Kind, chosen
from tests.torture.puppets import Theatre

PLAIN, IDEMPOTENT, TRANSACTIONAL, PARKING, SKIPPING = (
    chosen(name)[0] for name in ("plain-async", "idempotent", "transactional-sync", "parking", "skipping")
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replacements in engine functions, (function, text, other text), and the guarantee that they break."""

    name: str
    guarantee: int
    kind: Kind
    scene: Callable[[Theatre], None]
    changes: tuple[tuple[str, str, str], ...]


def zombie_settles_a_retry_that_its_heir_runs(theatre: Theatre) -> None:
    theatre.publish(None, told="retry")
    theatre.relay()
    zombie, heir = theatre.puppet(), theatre.puppet()
    parts = zombie.claim()
    zombie.settle(parts, [zombie.run(parts[0], "retry")])
    held = zombie.claim_due()
    zombie.start(held[0])
    heir.take_over()
    inherited = heir.claim_due()
    heir.start(inherited[0])
    zombie.settle_due(held, [zombie.end(held[0], "dead")])
    heir.settle_due(inherited, [heir.end(inherited[0])])
    heir.finish()


def zombie_settles_a_claim_that_its_heir_has_done(theatre: Theatre) -> None:
    theatre.publish(None, told="done")
    theatre.relay()
    zombie, heir = theatre.puppet(), theatre.puppet()
    parts = zombie.claim()
    zombie.start(parts[0])
    zombie.beat(parts)
    heir.take_over()
    heir.finish()
    zombie.settle(parts, [zombie.end(parts[0], "dead")])


def stranger_settles_a_claim_of_the_same_number(theatre: Theatre) -> None:
    theatre.publish(None, told="retry")
    theatre.relay()
    worker, stranger = theatre.puppet(), theatre.puppet()
    parts = worker.claim()
    stranger.settle(parts, [], lease="00000000-0000-0000-0000-000000000001")
    worker.settle(parts, [worker.run(parts[0], "retry")])
    worker.finish()


def twin_after_its_completion(theatre: Theatre) -> None:
    [first, second] = twins(theatre)
    theatre.relay()
    worker = theatre.puppet()
    for _ in (first, second):
        parts = worker.claim(1)
        worker.settle(parts, [worker.run(parts[0])])
    worker.finish()


def twin_while_the_other_runs(theatre: Theatre) -> None:
    twins(theatre)
    theatre.relay()
    one, other = theatre.puppet(), theatre.puppet()
    mine = one.claim(1)
    one.start(mine[0])
    theirs = other.claim(1)
    other.settle(theirs, [other.run(theirs[0])])
    one.settle(mine, [one.end(mine[0])])
    other.finish()


def zombie_commits_what_its_heir_gave_up(theatre: Theatre) -> None:
    theatre.publish(None, told="dead")
    theatre.relay()
    zombie, heir = theatre.puppet(), theatre.puppet()
    parts = zombie.claim()
    zombie.start(parts[0])
    zombie.beat(parts)
    heir.take_over()
    heir.finish()
    zombie.end(parts[0])
    zombie.commit(parts[0])


def twins_commit(theatre: Theatre) -> None:
    twins(theatre)
    theatre.relay()
    one, other = theatre.puppet(), theatre.puppet()
    mine, theirs = one.claim(1), other.claim(1)
    for puppet, parts in ((one, mine), (other, theirs)):
        done = puppet.run(parts[0])
        puppet.settle(parts, [done if puppet.commit(parts[0]) else done | {"outcome": "deferred"}])
    other.finish()


def take_over_after_progress(theatre: Theatre) -> None:
    theatre.publish(None, told="retry")
    theatre.publish(None, None)
    theatre.relay()
    victim, heir = theatre.puppet(), theatre.puppet()
    parts = victim.claim()
    victim.record(parts, [victim.run(parts[0], "retry")])
    victim.beat(parts[:1])
    heir.take_over()
    heir.finish()


def take_over_of_what_never_started(theatre: Theatre) -> None:
    theatre.publish(None, None)
    theatre.relay()
    victim, heir = theatre.puppet(), theatre.puppet()
    parts = victim.claim()
    victim.start(parts[0])
    victim.beat(parts[:1])
    heir.take_over()
    heir.finish()


def zombie_claims(theatre: Theatre) -> None:
    theatre.publish(None)
    theatre.relay()
    zombie, heir = theatre.puppet(), theatre.puppet()
    heir.take_over()
    with suppress(psycopg.Error):  # EB001, from an engine that is whole
        zombie.claim()
    heir.take_over()
    heir.finish()


def failure_and_its_followers(theatre: Theatre) -> None:
    theatre.publish("k", told="retry")
    theatre.relay()
    worker = theatre.puppet()
    parts = worker.claim()
    worker.settle(parts, [worker.run(parts[0], "retry")])
    theatre.publish("k", "k")
    theatre.relay()
    parts = worker.claim()
    if parts:
        worker.settle(parts, [worker.run(part) for part in parts])
    worker.finish()


def followers_one_by_one(theatre: Theatre) -> None:
    theatre.publish("k", told="retry")
    theatre.publish("k", "k")
    theatre.relay()
    worker = theatre.puppet()
    parts = worker.claim()
    failed = worker.run(parts[0], "retry")
    worker.settle(parts, [failed, *({"seq": part.seq, "outcome": "parked"} for part in parts[1:])])
    due = worker.claim_due()
    worker.settle_due(due, [worker.run(due[0]), *({"id": part.holder, "outcome": "parked"} for part in due[1:])])
    worker.finish()


def death_and_its_followers(theatre: Theatre) -> None:
    theatre.publish("k", told="dead")
    theatre.publish("k", "k")
    theatre.relay()
    theatre.puppet().finish()


def what_runs_while_its_claim_is_taken_apart(theatre: Theatre) -> None:
    theatre.publish("k", "l")
    theatre.relay()
    one, other = theatre.puppet(), theatre.puppet()
    parts = one.claim()
    one.start(parts[0])
    numbers = one.detach(parts, [one.run(parts[1])], parts[:1])
    other.finish()
    held = replace(parts[0], holder=numbers[parts[0].seq] or 0)
    one.settle_due([held], [one.end(held)])
    other.finish()


def redrive_while_a_later_event_runs(theatre: Theatre) -> None:
    theatre.publish("k", told="dead")
    theatre.relay()
    one, other = theatre.puppet(), theatre.puppet()
    one.finish()
    theatre.publish("k")
    theatre.relay()
    parts = one.claim()
    one.start(parts[0])
    theatre.redrive()
    if due := other.claim_due():
        other.settle_due(due, [other.run(part) for part in due])
    one.settle(parts, [one.end(parts[0])])
    other.finish()


def failures(theatre: Theatre) -> None:
    theatre.publish(None, None, told="retry")
    theatre.relay()
    theatre.puppet().finish()


def death(theatre: Theatre) -> None:
    theatre.publish(None, told="dead")
    theatre.relay()
    theatre.puppet().finish()


def event_for_nobody(theatre: Theatre) -> None:
    theatre.publish(None)
    with theatre.connection.transaction():
        theatre.connection.execute("SELECT eventbus.publish('torture.nobody', '{\"token\": \"stranger\"}')")
    theatre.relay()
    theatre.puppet().finish()


def twins(theatre: Theatre) -> list[str]:
    return theatre.publish(None, None, event_id="00000000-0000-0000-0000-000000000007")


LOST_EXCEPTION = "(e.id, e.token) IN (SELECT u.id, u.token FROM unnest(p_ids, p_tokens) AS u (id, token))"
MUTANTS = (
    Mutant("a retry is settled whoever holds it", 6, PLAIN, zombie_settles_a_retry_that_its_heir_runs, (
        ("settle_exceptions", LOST_EXCEPTION, "true"),
    )),
    Mutant("a claim is settled twice", 6, PLAIN, zombie_settles_a_claim_that_its_heir_has_done, (
        ("settle", "ON CONFLICT DO NOTHING", "ON CONFLICT (claim_id) DO UPDATE SET kind = 'settled'"),
        ("record", "ON CONFLICT DO NOTHING", "ON CONFLICT (claim_id, seq) DO UPDATE SET outcome = excluded.outcome"),
    )),
    Mutant("a claim is settled by its number alone", 1, PLAIN, stranger_settles_a_claim_of_the_same_number, (
        ("settle", "c.id = u.id AND c.token = u.token", "c.id = u.id"),
    )),
    Mutant("a completed execution is not asked for", 4, IDEMPOTENT, twin_after_its_completion, (
        ("twin_of", "(p_completed_at IS NOT NULL)", "false"),
        ("twin_of", "(p_owner IS NULL)", "false"),
    )),
    Mutant("an execution that runs is not asked for", 4, IDEMPOTENT, twin_while_the_other_runs, (
        ("twin_of", "(p_owner <> p_outbox_id)", "false"),
    )),
    Mutant("a transaction commits without its claim", 5, TRANSACTIONAL, zombie_commits_what_its_heir_gave_up, (
        ("complete", "ORDER BY c.id, u.seq",
         "ORDER BY c.id, u.seq ON CONFLICT (claim_id, seq) DO UPDATE SET outcome = 'done'"),
    )),
    Mutant("two twins commit", 5, TRANSACTIONAL, twins_commit, (
        ("complete", "WHERE p.completed_at IS NULL", "WHERE true"),
    )),
    Mutant("take-over forgets what was recorded", 3, PLAIN, take_over_after_progress, (
        ("give_back", "ON CONFLICT DO NOTHING\n        RETURNING seq",
         "ON CONFLICT (claim_id, seq) DO UPDATE SET outcome = 'lost'\n        RETURNING seq"),
    )),
    Mutant("take-over forgets what never started", 1, PLAIN, take_over_of_what_never_started, (
        ("give_back", "l.seq > v_started", "false"),
    )),
    Mutant("a worker that is called dead may claim", 10, PLAIN, zombie_claims, (
        ("require_live_worker", "AND w.state = 'live'", ""),
    )),
    Mutant("followers are not parked when they are claimed", 7, PARKING, failure_and_its_followers, (
        ("park_blocked", "AND o.key IS NOT NULL", "AND false"),
    )),
    Mutant("the last follower goes first", 7, PARKING, followers_one_by_one, (
        ("advance_keys", "ORDER BY x.seq LIMIT 1", "ORDER BY x.seq DESC LIMIT 1"),
        ("lock_due", "e.seq > v_row.seq", "false"),
    )),
    Mutant("a dead letter lets its followers pass", 7, PARKING, death_and_its_followers, (
        ("bury", "e.key IS NOT NULL AND q.when_exhausted = 'park'", "false"),
    )),
    Mutant("what runs is given back with its claim", 7, PARKING, what_runs_while_its_claim_is_taken_apart, (
        ("detach", "CASE WHEN g.seq = ANY (p_held) THEN 'held' ELSE 'released' END", "'released'"),
    )),
    Mutant("a redriven event does not wait", 7, SKIPPING, redrive_while_a_later_event_runs, (
        ("lock_due", "v_row.redriven_from IS NOT NULL", "false"),
    )),
    Mutant("failures are not counted", 8, PLAIN, failures, (
        ("record", "THEN 1 ELSE 0 END", "THEN 0 ELSE 0 END"),
    )),
    Mutant("a dead letter loses its headers", 9, PLAIN, death, (
        ("bury", "o.payload, o.headers", "o.payload, NULL::json"),
    )),
    Mutant("a dead letter counts one attempt too many", 9, PLAIN, death, (
        ("bury", "e.replay_id, e.attempts,", "e.replay_id, e.attempts + 1,"),
    )),
    Mutant("every topic goes everywhere", 2, PLAIN, event_for_nobody, (
        ("resolve_topics", "SELECT t.id, q.queue_id::integer",
         "SELECT t.id, x.id FROM eventbus.topics t, eventbus.queues x UNION SELECT t.id, q.queue_id::integer"),
    )),
)  # fmt: skip
one_server = pytest.mark.parametrize("major", [18], indirect=True)
each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name.replace(" ", "-") for mutant in MUTANTS])


@contextmanager
def theatre_of(dsn: str, folder: Path, kind: Kind) -> Iterator[Theatre]:
    theatre = Theatre(dsn, folder, kind)
    try:
        yield theatre
    finally:
        theatre.close()


def break_engine(theatre: Theatre, function: str, text: str, other: str) -> None:
    [definition] = theatre.row(
        "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'eventbus'::regnamespace AND proname = %s",
        function,
    )
    assert text in definition, f"{function} does not have this text any more: {text}\n{definition}"
    theatre.connection.execute(definition.replace(text, other).encode())


@one_server
@each_mutant
def test_the_checker_sees_what_is_lost_with_a_fence(dsn: str, tmp_path: Path, mutant: Mutant) -> None:
    with theatre_of(dsn, tmp_path, mutant.kind) as theatre:
        for change in mutant.changes:
            break_engine(theatre, *change)
        mutant.scene(theatre)
        assert mutant.guarantee in {found.guarantee for found in theatre.judge()}


@one_server
@pytest.mark.parametrize("scene", sorted({mutant.scene.__name__ for mutant in MUTANTS}))
def test_the_engine_as_it_is_keeps_every_guarantee_in_the_same_scenes(dsn: str, tmp_path: Path, scene: str) -> None:
    kind, play = next((mutant.kind, mutant.scene) for mutant in MUTANTS if mutant.scene.__name__ == scene)
    with theatre_of(dsn, tmp_path, kind) as theatre:
        play(theatre)
        found = theatre.judge()
        assert not found, "\n".join(map(str, found))
