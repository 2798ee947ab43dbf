"""Says which guarantees were broken. Reads history and tables; shares no code with the bus, so that it excuses none.

The numbers are those of docs/guarantees.md. Whatever a killed or silent worker did is judged by what it could have
done: its runs may have counted or not, but never after another worker had started the same event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tests.torture import keys
from tests.torture.evidence import UNCLEAR, Evidence, gives_up
from tests.torture.history import FOREVER, History, Run
from tests.torture.kinds import MAX_ATTEMPTS, Kind
from tests.torture.plan import FAILURES, SUCCESSES, fate
from tests.torture.tables import Letter, Tables

MOST_REPEATED: Final = 2_000
"""Completed runs of one lost worker and queue that may come again: what it can hold in memory."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A guarantee that was broken, and by what."""

    guarantee: int
    queue: str
    what: str

    def __str__(self) -> str:
        return f"guarantee {self.guarantee} in {self.queue}: {self.what}"


def violations(kinds: Iterable[Kind], history: History, tables: Tables) -> list[Violation]:
    """Everything that is wrong at a quiet moment."""
    found = []
    for kind in kinds:
        evidence = Evidence(kind, history, tables)
        for number, check in CHECKS:
            found += [Violation(number, kind.queue, what) for what in check(evidence)]
    return found


def no_loss(evidence: Evidence) -> Iterator[str]:
    """Every committed event was delivered, and handled well if it is not waiting or dead."""
    for token in evidence.wanted:
        if not evidence.tables.delivered[evidence.spot(token)]:
            yield f"{token} was never delivered"
        elif not evidence.places(token) and evidence.succeeded_at(token) == FOREVER:
            yield f"{token} is called done, but no handler ever came to an end with it"


def no_phantom(evidence: Evidence) -> Iterator[str]:
    """Nobody saw an event that was not committed, or that belongs elsewhere, or that was changed on the way."""
    for run in evidence.runs:
        event = evidence.wanted.get(run.token)
        if event is None:
            yield f"{run} of an event that was never committed for this queue"
        elif (event.event_id, event.key) != (run.event_id, run.key):
            yield f"{run} of {event}"
    for queue, token in evidence.tables.delivered:
        if queue == evidence.kind.queue and token not in evidence.wanted:
            yield f"{token} was delivered, but never committed for this queue"


def duplicates(evidence: Evidence) -> Iterator[str]:
    """An event is handled again only if a worker was lost that had handled it, and only so many."""
    repeated: Counter[int] = Counter()
    for token, runs in evidence.by_token.items():
        yield from (f"{run} again after {first}" for first, run in _again(evidence, runs))
        yield from (f"{run} beside {other}" for other, run in evidence.overlaps(runs))
        lost = [run for run in runs if run.told in SUCCESSES and evidence.is_lost(run)]
        repeated.update(run.pid for run in lost[: sum(run.told in SUCCESSES for run in runs) - 1])
        if evidence.tables.delivered[evidence.spot(token)] > 1:
            yield f"{token} was delivered twice"
    for pid, count in repeated.items():
        if count > MOST_REPEATED:
            yield f"worker {pid} was lost, and {count} events came again that it had handled"


def executions(evidence: Evidence) -> Iterator[str]:
    """A completed execution never starts again, and there is exactly one for each event id that is done."""
    if evidence.kind.tracking == "none":
        return
    completed = {
        event_id: at for (queue, event_id), at in evidence.tables.processed.items() if queue == evidence.kind.queue
    }
    for event_id, runs in evidence.by_event_id.items():
        if evidence.kind.tracking == "transactional":
            break  # twins may both run: only one of them commits
        yield from (f"{run} again after {first}" for first, run in _again(evidence, runs))
        yield from (f"{run} beside {other}" for other, run in evidence.overlaps(runs))
        at = completed.get(event_id) or FOREVER
        yield from (
            f"{run} after its execution was completed at {at / 1e9:.4f}"
            for run in runs
            if run.started > at and evidence.started_alive(run)
        )
    for event_id, tokens in evidence.tokens_of.items():
        undone = [token for token in tokens if evidence.places(token)]
        if len(undone) < len(tokens) and completed.get(event_id) is None:
            yield f"{event_id} is done, but has no completed execution"
        if len(undone) == len(tokens) and completed.get(event_id) is not None:
            yield f"{event_id} has a completed execution, but {tokens} are {[*map(evidence.places, tokens)]}"
    yield from (f"an execution of {each}, which is no event of it" for each in completed.keys() - evidence.tokens_of)


def effects(evidence: Evidence) -> Iterator[str]:
    """A transactional handler's effect is there once if the event is done, and not at all if it is not."""
    if evidence.kind.tracking != "transactional":
        return
    counted = Counter(event_id for queue, event_id, _ in evidence.tables.effects if queue == evidence.kind.queue)
    for event_id, tokens in evidence.tokens_of.items():
        told = {run.told for run in evidence.by_event_id.get(event_id, [])}
        done = any(not evidence.places(token) for token in tokens)
        most = int(done and "done" in told)
        least = 0 if "discard" in told else most
        if not least <= counted[event_id] <= most:
            state = "done" if done else "not done"
            yield f"{event_id} is {state} and told {sorted(map(str, told))}, but has {counted[event_id]} effects"
    yield from (f"an effect of {each}, which is no event of it" for each in counted.keys() - evidence.tokens_of)


def zombies(evidence: Evidence) -> Iterator[str]:
    """What a worker told that is alive stands, whatever one tells that has lost its lease."""
    for token, runs in evidence.by_token.items():
        stands = next((run for run in runs if run.told in SUCCESSES and evidence.counts(run)), None)
        if stands and evidence.places(token):
            yield f"{stands} counts, but it is {evidence.places(token)}"


def attempts(evidence: Evidence) -> Iterator[str]:
    """The attempt that a handler is told is one more than the failures before."""
    for token, runs in evidence.by_token.items():
        redrives = evidence.history.redriven[evidence.spot(token)]
        least = most = 1
        for run in runs:
            fenced = evidence.is_fenced(run)
            if evidence.started_alive(run):
                if run.attempt == 1 and least > 1 and redrives:
                    redrives -= 1
                    least = most = 1
                if not least <= run.attempt <= most:
                    yield f"{run} should be attempt {least}{f' to {most}' if most > least else ''}"
                least = most = run.attempt
            if not fenced:
                sure, possible = _costs(evidence, run)
                least, most = least + sure, most + possible


def letters(evidence: Evidence) -> Iterator[str]:
    """A dead letter holds the whole event, and came after exactly the attempts that it says."""
    for letter in evidence.tables.letters:
        if letter.queue != evidence.kind.queue:
            continue
        event = evidence.wanted.get(letter.token)
        if event is None or (event.event_id, event.topic, event.key, event.payload, event.headers) != (
            letter.event_id, letter.topic, letter.key, letter.payload, letter.headers,
        ):  # fmt: skip
            yield f"{letter} does not hold the event {event}"
        elif not any(_explains(evidence, letter, run) for run in evidence.by_token.get(letter.token, [])):
            yield f"{letter} was not told by its handler: {[*map(str, evidence.by_token.get(letter.token, []))]}"
    yield from _fates(evidence)


def conservation(evidence: Evidence) -> Iterator[str]:
    """Everything is in exactly one place: done, waiting, parked or dead."""
    counted: Counter[str] = Counter()
    for token in evidence.wanted:
        places = evidence.places(token) or ["done" if evidence.succeeded_at(token) < FOREVER else "lost"]
        counted.update(places)
        if len(places) > 1:
            yield f"{token} is in several places: {places}"
        elif places[0] not in ("done", "dead", "parked"):
            yield f"{token} is {places[0]} although all is quiet"
    if counted.total() != len(evidence.wanted) or counted["lost"]:
        yield f"{len(evidence.wanted)} were published, but there are {dict(counted)}"
    strangers = [token for queue, token in evidence.tables.places if queue == evidence.kind.queue]
    yield from (f"{token} is kept, but was never published" for token in {*strangers} - evidence.wanted.keys())


CHECKS: Final[Iterable[tuple[int, Callable[[Evidence], Iterator[str]]]]] = (
    (1, no_loss),
    (2, no_phantom),
    (3, duplicates),
    (4, executions),
    (5, effects),
    (6, zombies),
    (7, keys.order),
    (8, attempts),
    (9, letters),
    (10, conservation),
)


def _again(evidence: Evidence, runs: Iterable[Run]) -> Iterator[tuple[Run, Run]]:
    """Runs that started after one that counted for sure."""
    first: Run | None = None
    for run in sorted(runs, key=lambda run: run.ended):
        if first is not None and run.started > first.ended and evidence.started_alive(run):
            yield first, run
        if first is None and run.told in SUCCESSES and evidence.counts(run):
            first = run


def _costs(evidence: Evidence, run: Run) -> tuple[int, int]:
    """How many attempts a run costs at least and at most."""
    unclear = run.told in UNCLEAR or (
        evidence.kind.tracking == "transactional" and (run.told in SUCCESSES or evidence.was_cut_off(run))
    )
    possible = int(run.told in FAILURES or unclear)
    return (0 if unclear or evidence.is_lost(run) else possible), possible


def _explains(evidence: Evidence, letter: Letter, run: Run) -> bool:
    return gives_up(run) and run.attempt == letter.attempts and not evidence.is_fenced(run)


def _fates(evidence: Evidence) -> Iterator[str]:
    """What its handler was going to tell is what became of each event, unless something else went wrong with it."""
    for token, event in evidence.wanted.items():
        runs = evidence.by_token.get(token, [])
        alone = evidence.kind.tracking == "none" or len(evidence.tokens_of[event.event_id]) == 1
        disturbed = evidence.history.redriven[evidence.spot(token)] or any(
            run.told in UNCLEAR or evidence.was_cut_off(run) for run in runs
        )
        if not runs or not alone or (disturbed and (evidence.kind.tracking == "transactional" or runs[-1].redriven)):
            continue
        told, attempt = fate(evidence.kind.queue, token)
        places = evidence.places(token)
        if (places == ["dead"]) != (told == "dead") and not evidence.history.redriven[evidence.spot(token)]:
            yield f"{token} should be {told} after {attempt} of {MAX_ATTEMPTS} attempts, but is {places}"
