"""Ordered queues: of one key one event after the other, whatever becomes of each; see "Lanes" in the engine's SQL.

An event is named by its payload: ``a2`` is the second one with the key ``a``, ``7`` has no key.
"""

from __future__ import annotations

import pytest

from tests.postgres.engine.driver import Claim, Engine, Held
from tests.postgres.engine.sessions import Background, NewSession, open_transaction


@pytest.fixture
def queue(bus: Engine) -> int:
    """An ordered queue with one lane."""
    return bus.declare_queue("keys", kind="ordered", lanes=1)


def waiting(bus: Engine, queue: int) -> dict[str, str]:
    """State of each exception by what its event says, in the order of the queue."""
    return dict(
        bus.rows(
            "SELECT o.payload #>> '{}', e.state FROM {bus}.exceptions e JOIN {bus}.outbox o ON o.id = e.outbox_id"
            " WHERE e.queue_id = %s ORDER BY e.seq",
            queue,
        )
    )


def dead(bus: Engine, queue: int) -> dict[str, bool]:
    """Whether each dead letter blocks its key."""
    return dict(bus.rows("SELECT payload #>> '{}', blocks FROM {bus}.dead_letters WHERE queue_id = %s", queue))


def redrive(bus: Engine) -> None:
    bus.rows("SELECT {bus}.redrive(ARRAY(SELECT id FROM {bus}.dead_letters))")


def claimed(bus: Engine, queue: int, *labels: str) -> Claim:
    """A claim of a new worker with these new events."""
    bus.publish_keyed(*labels)
    bus.relay()
    claim = bus.claimed(bus.register(), queue)
    assert claim.payloads == list(labels)
    return claim


def settle(bus: Engine, claim: Claim, **outcomes: str) -> None:
    """Settle the claim; the outcome of each event that is not done."""
    said = [
        {"seq": claim.seq(label), "outcome": outcome, "reason": "x", "delay": 60 if outcome in DELAYED else 0}
        for label, outcome in outcomes.items()
    ]
    assert bus.settle(claim, outcomes={claim.id: said}) == {claim.id}


DELAYED = ("retry", "deferred")


def due(bus: Engine, queue: int, limit: int = 100) -> list[str]:
    """What a new worker gets of the exceptions that are due."""
    return [one.payload for one in bus.claim_due(bus.register(), queue, limit)]


def make_due(bus: Engine, queue: int) -> None:
    bus.rows("UPDATE {bus}.exceptions SET due_at = clock_timestamp() WHERE queue_id = %s", queue)


def test_a_lane_is_claimed_by_one_at_a_time_and_says_that_it_waits(bus: Engine, queue: int) -> None:
    bus.publish_keyed("a1", "b1", "a2")
    bus.relay()
    first, second = bus.register(), bus.register()
    claim = bus.claimed(first, queue, 1)
    assert bus.claim_any(second, {queue: 10}) == ([], {queue: 0})
    assert bus.claim_any(first, {queue: 10}) == ([], {queue: 0})
    bus.settle(claim)
    assert bus.claimed(second, queue).payloads == ["b1", "a2"]


def test_two_who_claim_a_lane_at_once_do_not_both_get_it(bus: Engine, queue: int, session: NewSession) -> None:
    bus.publish_keyed("a1", "a2")
    bus.relay()
    worker, other = bus.register(), session()
    with open_transaction(other):
        assert other.claimed(worker, queue, 1).payloads == ["a1"]
        assert bus.claim_any(worker, {queue: 1}) == ([], {queue: None})
    assert bus.claim_any(worker, {queue: 1}) == ([], {queue: 0})


def test_work_on_one_lane_keeps_no_other_lane_waiting(bus: Engine) -> None:
    queue = bus.declare_queue("keys", kind="ordered", lanes=4)
    labels = [f"{letter}{number}" for number in range(5) for letter in "abcdefghij"]
    bus.publish_keyed(*labels)
    bus.relay()
    first = bus.claimed(bus.register(), queue, 1)
    rest, more = bus.claim_any(bus.register(), {queue: 1000})
    assert (len(rest), more) == (3, {queue: 0})
    assert first.lane not in {claim.lane for claim in rest}
    for claim in rest:
        by_key = sorted(claim.payloads, key=lambda label: label[0])
        assert by_key == sorted(claim.payloads), "a key has events in two lanes, or out of order"


def test_each_claim_of_a_worker_starts_with_another_lane_so_that_none_starves(bus: Engine) -> None:
    queue = bus.declare_queue("keys", kind="ordered", lanes=4)
    bus.publish_keyed(*(f"{letter}{number}" for number in range(5) for letter in "abcdefghij"))
    bus.relay()
    worker = bus.register()
    first_lanes = []
    for turn in range(4):
        claim = bus.claimed(worker, queue, 1, turn)
        first_lanes.append(claim.lane)
        bus.settle(claim)
    assert sorted(first_lanes) == [0, 1, 2, 3]


def test_a_later_event_of_a_key_waits_while_an_earlier_one_waits_for_its_retry(bus: Engine, queue: int) -> None:
    settle(bus, claimed(bus, queue, "a1", "b1", "a2"), a1="retry", a2="parked")
    bus.publish_keyed("a3", "b2")
    bus.relay()
    assert bus.claimed(bus.register(), queue).payloads == ["b2"]
    assert waiting(bus, queue) == {"a1": "waiting", "a2": "parked", "a3": "parked"}
    assert due(bus, queue) == []


def test_a_claim_of_which_everything_is_parked_does_not_close_the_lane(bus: Engine, queue: int) -> None:
    settle(bus, claimed(bus, queue, "a1"), a1="retry")
    bus.publish_keyed("a2", "a3", "b1")
    bus.relay()
    worker = bus.register()
    assert bus.claim_any(worker, {queue: 2}) == ([], {queue: 4})
    assert bus.claimed(worker, queue).payloads == ["b1"]
    assert waiting(bus, queue) == {"a1": "waiting", "a2": "parked", "a3": "parked"}


def test_events_without_a_key_wait_for_nobody(bus: Engine, queue: int) -> None:
    settle(bus, claimed(bus, queue, "1", "2", "3"), **{"1": "retry", "2": "parked", "3": "released"})
    assert waiting(bus, queue) == {"1": "waiting", "2": "waiting", "3": "waiting"}
    bus.publish_keyed("4")
    bus.relay()
    assert bus.claimed(bus.register(), queue).payloads == ["4"]
    assert sorted(due(bus, queue)) == ["2", "3"]


AFTERWARDS = {
    "retry": {"a1": "waiting", "a2": "parked"},
    "deferred": {"a1": "waiting", "a2": "parked"},
    "released": {"a1": "waiting", "a2": "parked"},
    "parked": {"a1": "waiting", "a2": "parked"},
    "dead": {"a2": "parked"},
    "done": {"a2": "waiting"},
}
"""What becomes of the next event of a key, by what became of the one before."""


@pytest.mark.parametrize("outcome", AFTERWARDS)
@pytest.mark.parametrize("follower", ["parked", "released"])
def test_whatever_becomes_of_an_event_the_next_of_its_key_does_not_run_before_it(
    bus: Engine, queue: int, outcome: str, follower: str
) -> None:
    claim = claimed(bus, queue, "a1", "a2")
    settle(bus, claim, **({"a2": follower} if outcome == "done" else {"a1": outcome, "a2": follower}))
    assert waiting(bus, queue) == AFTERWARDS[outcome]
    assert dead(bus, queue) == ({"a1": True} if outcome == "dead" else {})
    assert due(bus, queue) == {"released": ["a1", "a2"], "parked": ["a1", "a2"], "done": ["a2"]}.get(outcome, [])


@pytest.mark.parametrize("outcome", AFTERWARDS)
@pytest.mark.parametrize("follower", ["parked", "released"])
def test_the_same_holds_for_what_runs_again(bus: Engine, queue: int, outcome: str, follower: str) -> None:
    settle(bus, claimed(bus, queue, "a1", "a2"), a1="released", a2="released")
    head, second = bus.claim_due(bus.register(), queue)
    delay = 60 if outcome in DELAYED else 0
    assert bus.settle_each([(head, outcome), (second, follower)], reason="x", delay=delay) == {head.id, second.id}
    assert waiting(bus, queue) == AFTERWARDS[outcome]
    assert dead(bus, queue) == ({"a1": True} if outcome == "dead" else {})
    assert due(bus, queue) == {"released": ["a1", "a2"], "parked": ["a1", "a2"], "done": ["a2"]}.get(outcome, [])


def test_where_a_dead_letter_is_skipped_the_next_event_of_its_key_runs(bus: Engine) -> None:
    queue = bus.declare_queue("keys", kind="ordered", lanes=1, when_exhausted="skip")
    settle(bus, claimed(bus, queue, "a1", "a2", "a3"), a1="dead", a2="parked", a3="parked")
    assert (waiting(bus, queue), dead(bus, queue)) == ({"a2": "waiting", "a3": "parked"}, {"a1": False})
    [head, follower] = bus.claim_due(bus.register(), queue)
    bus.settle_each([(head, "dead"), (follower, "parked")], reason="x")
    assert waiting(bus, queue) == {"a3": "waiting"}


def test_a_dead_letter_keeps_later_events_of_its_key_waiting_until_it_is_redriven(bus: Engine, queue: int) -> None:
    settle(bus, claimed(bus, queue, "a1", "a2", "b1"), a1="dead", a2="parked")
    bus.publish_keyed("a3", "b2")
    bus.relay()
    assert bus.claimed(bus.register(), queue).payloads == ["b2"]
    assert due(bus, queue) == []
    redrive(bus)
    assert due(bus, queue) == ["a1", "a2", "a3"]


def test_when_the_first_of_a_key_is_done_the_next_is_due_at_once(bus: Engine, queue: int) -> None:
    settle(bus, claimed(bus, queue, "a1", "a2", "a3"), a1="retry", a2="parked", a3="parked")
    make_due(bus, queue)
    worker = bus.register()
    [head] = bus.claim_due(worker, queue, 1)
    assert (head.payload, head.attempts) == ("a1", 1)
    assert due(bus, queue) == [], "the next one ran while the one before it was running"
    bus.settle_due([head], "done")
    assert due(bus, queue) == ["a2", "a3"]


def test_the_first_of_a_key_comes_with_those_that_wait_behind_it_as_far_as_there_is_room(
    bus: Engine, queue: int
) -> None:
    claim = claimed(bus, queue, "a1", "b1", "a2", "a3", "b2")
    settle(bus, claim, a1="released", a2="released", a3="released", b1="released", b2="released")
    assert due(bus, queue, 2) == ["a1", "a2"]
    assert due(bus, queue) == ["b1", "b2"]
    assert waiting(bus, queue)["a3"] == "parked"


def test_nothing_of_a_lane_runs_again_while_somebody_is_changing_what_waits_there(
    bus: Engine, queue: int, session: NewSession
) -> None:
    settle(bus, claimed(bus, queue, "a1", "a2", "1"), a1="released", a2="released", **{"1": "released"})
    bus.publish_keyed("b1")
    bus.relay()
    worker, other = bus.register(), session()
    with open_transaction(other):
        other.claimed(worker, queue)
        assert due(bus, queue) == ["1"]
    assert due(bus, queue) == ["a1", "a2"]


def test_the_bytes_granted_cut_a_chain_at_its_end_and_lose_nothing_of_it(bus: Engine, queue: int) -> None:
    claim = claimed(bus, queue, "a1", "a2", "a3")
    settle(bus, claim, a1="released", a2="released", a3="released")
    held = bus.claim_due(bus.register(), queue, max_bytes=5)  # each has two
    assert [one.payload for one in held] == ["a1", "a2"]
    assert waiting(bus, queue) == {"a1": "claimed", "a2": "claimed", "a3": "parked"}
    bus.settle_due(held, "done")
    assert due(bus, queue) == ["a3"]


def crash(bus: Engine, *workers_of: Claim) -> None:
    """Whoever holds these claims dies."""
    bus.fall_silent(*bus.column("SELECT worker_id FROM {bus}.claims WHERE id = ANY (%s)", [c.id for c in workers_of]))
    assert bus.take_over(bus.register())[0] == 1


def crashes(bus: Engine, queue: int) -> dict[str, int]:
    return dict(
        bus.rows(
            "SELECT o.payload #>> '{}', e.crashes FROM {bus}.exceptions e JOIN {bus}.outbox o ON o.id = e.outbox_id"
            " WHERE e.queue_id = %s",
            queue,
        )
    )


def test_after_a_crash_any_of_a_key_that_had_started_may_have_been_running(bus: Engine, queue: int) -> None:
    claim = claimed(bus, queue, "a1", "b1", "a2", "1", "c1", "a3")
    [worker] = bus.column("SELECT worker_id FROM {bus}.claims WHERE id = %s", claim.id)
    bus.beat(worker, {claim.id: claim.seq("1")})
    crash(bus, claim)
    assert waiting(bus, queue) == {
        "a1": "waiting", "b1": "waiting", "a2": "parked", "1": "waiting", "c1": "waiting", "a3": "parked",
    }  # fmt: skip
    assert crashes(bus, queue) == {"a1": 1, "b1": 1, "a2": 1, "1": 1, "c1": 0, "a3": 0}


def test_after_a_crash_the_first_that_was_not_told_to_be_done_comes_first(bus: Engine, queue: int) -> None:
    claim = claimed(bus, queue, "a1", "a2", "a3")
    assert bus.record(claim, done=[claim.seq("a1")])
    crash(bus, claim)
    assert waiting(bus, queue) == {"a2": "waiting", "a3": "parked"}
    assert crashes(bus, queue) == {"a2": 1, "a3": 1}


def test_a_chain_that_runs_again_comes_back_from_a_crash_as_a_chain(bus: Engine, queue: int) -> None:
    settle(bus, claimed(bus, queue, "a1", "a2"), a1="released", a2="released")
    worker = bus.register()
    assert len(bus.claim_due(worker, queue)) == 2
    bus.fall_silent(worker)
    bus.take_over(bus.register())
    assert waiting(bus, queue) == {"a1": "waiting", "a2": "parked"}
    assert crashes(bus, queue) == {"a1": 1, "a2": 1}


def test_what_dies_by_crashes_blocks_its_key_like_any_dead_letter(bus: Engine, queue: int) -> None:
    claim = claimed(bus, queue, "a1", "a2", "b1")
    bus.rows("UPDATE {bus}.workers SET heartbeat_at = '-infinity'")
    bus.take_over(bus.register(), max_crashes=1)
    assert (waiting(bus, queue), dead(bus, queue)) == ({"a2": "parked"}, {"a1": True, "b1": True})
    assert bus.settle(claim) == set()


def test_a_suspect_runs_alone_and_those_behind_it_stay_behind(bus: Engine, queue: int) -> None:
    settle(bus, claimed(bus, queue, "a1", "a2"), a1="released", a2="released")
    for _ in range(2):
        worker = bus.register()
        assert bus.claim_due(worker, queue)
        bus.fall_silent(worker)
        bus.take_over(bus.register())
    assert due(bus, queue) == []
    [suspect] = bus.claim_due(bus.register(), queue, alone=True)
    assert (suspect.payload, suspect.crashes) == ("a1", 2)
    assert bus.claim_due(bus.register(), queue, alone=True) == []
    bus.settle_due([suspect], "done")
    assert due(bus, queue) == []
    [suspect] = bus.claim_due(bus.register(), queue, alone=True)
    assert (suspect.payload, suspect.crashes) == ("a2", 2)


def test_only_the_first_of_a_key_dies_of_a_crash(bus: Engine, queue: int) -> None:
    settle(bus, claimed(bus, queue, "a1", "a2", "b1"), a1="released", a2="released", b1="released")
    for _ in range(2):
        worker = bus.register()
        assert bus.claim_due(worker, queue)
        bus.fall_silent(worker)
        bus.take_over(bus.register(), max_crashes=2)
        bus.rows("UPDATE {bus}.exceptions SET alone = false")  # as if a worker of old had them all
    assert (waiting(bus, queue), dead(bus, queue)) == ({"a2": "parked"}, {"a1": True, "b1": True})
    assert crashes(bus, queue) == {"a2": 1}


def test_what_is_taken_along_ends_at_an_event_that_must_run_alone(bus: Engine, queue: int) -> None:
    labels = ("a1", "a2", "a3", "a4")
    settle(bus, claimed(bus, queue, *labels), **dict.fromkeys(labels, "released"))
    bus.rows("UPDATE {bus}.exceptions SET crashes = 2, alone = true WHERE seq = 3")
    held = bus.claim_due(bus.register(), queue)
    assert [one.payload for one in held] == ["a1", "a2"]
    bus.settle_due(held, "done")
    assert due(bus, queue) == []
    [suspect] = bus.claim_due(bus.register(), queue, alone=True)
    bus.settle_due([suspect], "done")
    assert (suspect.payload, due(bus, queue)) == ("a3", ["a4"])


def test_a_claim_that_lasts_is_taken_apart_so_that_its_lane_goes_on(bus: Engine, queue: int) -> None:
    claim = claimed(bus, queue, "a1", "a2", "b1", "b2", "c1", "1", "2")
    seqs = {label: claim.seq(label) for label in claim.payloads}
    held = bus.detach(claim, held=[seqs["a1"], seqs["1"]], done=[seqs["b1"]])
    assert held is not None
    assert list(held) == [seqs["a1"], seqs["1"]]
    assert waiting(bus, queue) == {
        "a1": "claimed", "a2": "parked", "b2": "waiting", "c1": "waiting", "1": "claimed", "2": "waiting",
    }  # fmt: skip
    bus.publish_keyed("a3", "d1")
    bus.relay()
    assert bus.claimed(bus.register(), queue).payloads == ["d1"]
    assert sorted(due(bus, queue)) == ["2", "b2", "c1"]
    running = [one for one in held.values() if one]
    assert len(bus.settle_due(running, "done")) == 2
    assert due(bus, queue) == ["a2", "a3"]


def test_what_is_said_with_the_taking_apart_counts(bus: Engine, queue: int) -> None:
    claim = claimed(bus, queue, "a1", "a2", "b1")
    said = [
        {"seq": claim.seq("a1"), "outcome": "dead", "reason": "x"},
        {"seq": claim.seq("a2"), "outcome": "parked"},
    ]
    assert bus.detach(claim, held=[claim.seq("b1")], outcomes=said)
    assert waiting(bus, queue) == {"a2": "parked", "b1": "claimed"}
    assert dead(bus, queue) == {"a1": True}


def test_a_taking_apart_whose_reply_was_lost_may_be_asked_for_again(bus: Engine, queue: int) -> None:
    claim = claimed(bus, queue, "a1", "a2")
    first = bus.detach(claim, held=[1])
    assert bus.detach(claim, held=[1], done=[2]) == first
    assert waiting(bus, queue) == {"a1": "claimed", "a2": "parked"}


def test_a_claim_of_which_nothing_runs_is_taken_apart_and_not_taken_for_lost(bus: Engine, queue: int) -> None:
    claim = claimed(bus, queue, "a1", "a2")
    assert bus.detach(claim, held=[]) == {}
    assert waiting(bus, queue) == {"a1": "waiting", "a2": "parked"}
    assert bus.detach(claim, held=[]) == {}


def test_a_claim_that_was_taken_over_cannot_be_taken_apart(bus: Engine, queue: int) -> None:
    claim = claimed(bus, queue, "a1", "a2")
    crash(bus, claim)
    assert bus.detach(claim, held=[1], done=[2]) is None
    assert waiting(bus, queue) == {"a1": "waiting", "a2": "parked"}


def test_a_claim_is_not_taken_apart_by_the_one_who_was_just_taken_over(
    bus: Engine, queue: int, session: NewSession, background: Background
) -> None:
    claim = claimed(bus, queue, "a1", "a2")
    [worker] = bus.column("SELECT worker_id FROM {bus}.claims WHERE id = %s", claim.id)
    bus.fall_silent(worker)
    takes, detaches = session(), session()
    with open_transaction(takes):
        assert takes.take_over(takes.register()) == (1, 2)
        detaching = background.blocked(detaches, lambda: detaches.detach(claim, held=[1]))
    assert detaching.result() is None
    assert waiting(bus, queue) == {"a1": "waiting", "a2": "parked"}


def test_nobody_takes_apart_a_claim_with_the_token_of_another(bus: Engine, queue: int) -> None:
    claim = claimed(bus, queue, "a1")
    stranger = Claim(claim.id, bus.register(), queue, claim.seqs, claim.event_ids)
    assert bus.detach(stranger, held=[1]) is None
    assert bus.settle(claim) == {claim.id}


def test_what_is_held_after_the_taking_apart_is_taken_over_like_anything_else(bus: Engine, queue: int) -> None:
    claim = claimed(bus, queue, "a1", "a2")
    held = bus.detach(claim, held=[1])
    assert held is not None
    assert held[1] is not None
    crash(bus, claim)
    assert crashes(bus, queue) == {"a1": 1, "a2": 0}
    assert bus.settle_due([held[1]], "done") == set()
    assert due(bus, queue) == ["a1", "a2"]


def redriven_beside_a_claim(bus: Engine) -> tuple[int, Claim]:
    """``a1`` is redriven while a claim has ``a2`` and ``a3``, which do not wait for dead letters."""
    queue = bus.declare_queue("keys", kind="ordered", lanes=1, when_exhausted="skip")
    settle(bus, claimed(bus, queue, "a1"), a1="dead")
    claim = claimed(bus, queue, "a2", "b2", "a3")
    redrive(bus)
    return queue, claim


def test_a_redriven_event_does_not_run_beside_one_of_its_key_that_was_claimed_before(bus: Engine) -> None:
    queue, claim = redriven_beside_a_claim(bus)
    assert due(bus, queue) == []
    bus.settle(claim)
    make_due(bus, queue)
    [held] = bus.claim_due(bus.register(), queue)
    assert (held.payload, held.redriven) == ("a1", True)


def test_a_redriven_event_that_must_wait_is_not_asked_for_all_the_time(bus: Engine) -> None:
    queue, _ = redriven_beside_a_claim(bus)
    assert due(bus, queue) == []
    due_in = bus.value(
        "SELECT EXTRACT(EPOCH FROM due_at - clock_timestamp())::double precision FROM {bus}.exceptions"
        " WHERE queue_id = %s",
        queue,
    )
    assert due_in > 0


def test_a_redriven_event_and_one_that_fails_meanwhile_do_not_run_at_once(bus: Engine) -> None:
    queue, claim = redriven_beside_a_claim(bus)
    settle(bus, claim, a2="retry", a3="parked")
    assert waiting(bus, queue) == {"a1": "waiting", "a2": "parked", "a3": "parked"}


def test_a_redriven_event_does_not_run_beside_one_that_still_runs_after_its_claim_was_taken_apart(bus: Engine) -> None:
    queue, claim = redriven_beside_a_claim(bus)
    held = bus.detach(claim, held=[claim.seq("a2")])
    assert held is not None
    assert waiting(bus, queue) == {"a1": "parked", "a2": "claimed", "b2": "waiting", "a3": "parked"}
    bus.settle_due([one for one in held.values() if isinstance(one, Held)], "done")
    assert waiting(bus, queue) == {"a1": "waiting", "b2": "waiting", "a3": "parked"}


def test_a_reply_that_never_came_gives_its_events_back_in_order(bus: Engine, queue: int) -> None:
    bus.publish_keyed("a1", "a2", "b1")
    bus.relay()
    worker = bus.register()
    lost_reply = bus.claimed(worker, queue)
    assert bus.value("SELECT {bus}.release_unknown(%s, %s, '{}')", worker, [lost_reply.id]) == 3
    assert waiting(bus, queue) == {"a1": "waiting", "a2": "parked", "b1": "waiting"}
    assert len(bus.claim_due(worker, queue)) == 3  # and of these the reply is lost, too
    held = bus.column("SELECT id FROM {bus}.held(%s, 0)", worker)
    assert bus.value("SELECT {bus}.release_unknown(%s, '{}', %s)", worker, held) == 3
    assert waiting(bus, queue) == {"a1": "waiting", "a2": "parked", "b1": "waiting"}
    assert set(crashes(bus, queue).values()) == {0}
