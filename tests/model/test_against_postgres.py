"""PostgreSQL and the model give the same answers and keep the same rows, operation for operation.

The sequences are drawn with fixed seeds; ``MODEL_SEEDS`` in the environment says how many.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.model.pair import FAR, Pair
from tests.postgres.engine.driver import Engine
from tests.postgres.engine.sessions import NewSession

SEEDS = range(int(os.environ.get("MODEL_SEEDS", "6")))
OUTCOMES = ["done", "done", "done", "retry", "dead", "released", "deferred", "parked"]
OPERATIONS = {
    "publish": 8, "tick": 6, "claim": 6, "settle": 5, "claim_due": 5, "settle_due": 5, "record": 2, "complete": 3,
    "detach": 1, "crash": 1, "redrive": 1, "discard": 1, "begin": 4, "end": 2, "cancel": 1, "pause": 1, "resume": 3,
    "register": 1,
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_every_answer_and_every_row_is_the_same(bus: Engine, session: NewSession, seed: int) -> None:
    pair = Pair(bus, session())
    pair.declare("keys", kind="ordered", lanes=2)
    pair.declare("skipping", kind="ordered", lanes=1, when_exhausted="skip")
    pair.declare("urgent", kind="prioritized", lanes=3)
    pair.declare("once", kind="ordered", lanes=1, tracking="idempotent")
    pair.declare("books", tracking="transactional")
    pair.register()
    chance = random.Random(seed)
    history = []
    for _ in range(120):
        [operation] = chance.choices(list(OPERATIONS), list(OPERATIONS.values()))
        history.append(operation)
        try:
            step(pair, operation, chance)
            pair.compare()
        except AssertionError as error:
            raise AssertionError(f"after {history[-8:]}: {error}") from error
    pair.end(commits=False)


def step(pair: Pair, operation: str, chance: random.Random) -> None:  # noqa: C901, PLR0912 - one line per operation
    some = chance.randrange(100)
    queue = chance.choice(list(pair.queues))
    outcomes = chance.choices(OUTCOMES, k=3)
    delay = chance.choice([0.0, 0.0, FAR])
    match operation:
        case "publish":
            key = chance.choice([None, "a", "b", "c"])
            late, twin, delayed = some < 40, some % 5 == 0, some % 10 == 1
            pair.publish(key, some % 10, late=late, twin=twin, delayed=delayed)
        case "tick":
            pair.tick(chance.choice([1, 4, 100]))
        case "claim":
            names = chance.sample(list(pair.queues), chance.choice([1, 1, 3]))
            pair.claim(some, names, chance.choice([1, 3, 50]), chance.randrange(20), chance.choice([10, 10_000]))
        case "claim_due":
            pair.claim_due(some, queue, alone=some % 4 == 0)
        case "settle" | "record" if pair.claims:
            getattr(pair, operation)(some, outcomes, delay)
        case "detach" | "complete" if pair.claims:
            getattr(pair, operation)(some)
        case "settle_due" if pair.held:
            pair.settle_due(some, outcomes[0], delay)
        case "crash":
            pair.crash(some, some % 3, chance.choice([2, 3]))
        case "pause":
            pair.pause(queue, probed=some % 2 == 0)
        case "resume":
            pair.resume(queue)
        case "end":
            pair.end(commits=some % 3 > 0)
        case "redrive" | "discard" | "begin" | "cancel" | "register":
            getattr(pair, operation)()
        case _:
            pass
