"""Puppets that move by themselves, one random step of the engine at a time, in an order that can be played again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import psycopg

from tests.torture.plan import SUCCESSES, step
from tests.torture.puppets import Part, Puppet, Theatre

Outcome = dict[str, Any]


@dataclass(slots=True)
class Work:
    """What one call of ``claim`` or ``claim_due`` brought, and how far it has come."""

    parts: list[Part]
    is_due: bool
    running: set[int] = field(default_factory=set)
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def startable(self, *, ordered: bool) -> Iterator[int]:
        """Places of what may start now: of one key, one after the other."""
        waiting: set[str | None] = set()
        for place, part in enumerate(self.parts):
            behind = ordered and part.key is not None and part.key in waiting
            if place not in self.running and place not in self.outcomes and not behind:
                yield place
            if self.outcomes.get(place, {}).get("outcome") != "done":
                waiting.add(part.key)

    @property
    def is_finished(self) -> bool:
        """Everything has an outcome."""
        return len(self.outcomes) == len(self.parts)


class Actor:
    """One worker. What it does when it has lost its lease must have no effect."""

    def __init__(self, theatre: Theatre, chance: random.Random) -> None:
        self.puppet: Puppet = theatre.puppet()
        self._theatre = theatre
        self._chance = chance
        self._works: list[Work] = []

    def act(self) -> None:
        """One step."""
        steps = [self._claim, self._claim_due, self._start, self._start, self._end, self._end, self._settle]
        self._chance.choice([*steps, self._settle, self._record, self._detach, self._give_back, self._beat])()

    def finish(self) -> None:
        """Bring everything that is held to its end."""
        while self._works:
            self._start()
            self._end()
            self._settle()

    def expect_death(self) -> None:
        """Tell how far it is for the last time, maybe not quite the truth of a moment later."""
        self._beat()
        self._start()

    def _claim(self) -> None:
        self._take(self.puppet.claim(self._chance.randrange(1, 8)), is_due=False)

    def _claim_due(self) -> None:
        self._take(self.puppet.claim_due(alone=self._chance.random() < 0.3), is_due=True)

    def _take(self, parts: list[Part], *, is_due: bool) -> None:
        numbers = dict.fromkeys(part.holder for part in parts)
        groups = [parts] if is_due else [[part for part in parts if part.holder == number] for number in numbers]
        self._works += [Work(group, is_due) for group in groups if group]

    def _start(self) -> None:
        for work in self._works:
            places = list(work.startable(ordered=self._theatre.kind.ordered))
            if places:
                self._begin(work, self._chance.choice(places))
                return

    def _begin(self, work: Work, place: int) -> None:
        part = work.parts[place]
        if part.twin is not None:
            work.outcomes[place] = self._outcome(part, {"completed": "done", "pending": "deferred"}[part.twin])
            self._park_behind(work)
            return
        self.puppet.start(part)
        work.running.add(place)

    def _end(self) -> None:
        working = [work for work in self._works if work.running]
        if not working:
            return
        work = self._chance.choice(working)
        place = self._chance.choice(sorted(work.running))
        part = work.parts[place]
        told = step(self._theatre.kind.queue, part.token, part.attempt, redriven=part.redriven).told
        outcome = "done" if told in SUCCESSES else "dead" if told == "dead" or part.attempt == 3 else "retry"
        self.puppet.end(part, told)
        work.running.discard(place)
        work.outcomes[place] = self._outcome(part, outcome)
        self._park_behind(work)

    def _park_behind(self, work: Work) -> None:
        """What follows an event of its key that is not done does not start; behind a dead one it may be skipped to."""
        if not self._theatre.kind.ordered:
            return
        stopped: set[str] = set()
        for place, part in enumerate(work.parts):
            if part.key in stopped and place not in work.outcomes:
                work.outcomes[place] = self._outcome(part, "parked")
            elif part.key is not None and work.outcomes.get(place, {}).get("outcome", "done") != "done":
                stopped.add(part.key)

    def _settle(self) -> None:
        for work in [work for work in self._works if work.is_finished]:
            outcomes = [work.outcomes[place] for place in range(len(work.parts))]
            if work.is_due:
                self.puppet.settle_due(work.parts, outcomes)
            else:
                self.puppet.settle(work.parts, outcomes)
            self._works.remove(work)

    def _record(self) -> None:
        for work in self._works:
            if work.outcomes and not work.is_due and not work.is_finished:
                self.puppet.record(work.parts, list(work.outcomes.values()))

    def _detach(self) -> None:
        """Settle a claim of an ordered queue before all of it is done; what runs is held one by one from then on."""
        for work in [work for work in self._works if work.running and not work.is_due and self._theatre.kind.ordered]:
            held = [work.parts[place] for place in sorted(work.running)]
            numbers = self.puppet.detach(work.parts, list(work.outcomes.values()), held)
            self._works.remove(work)
            self._works += [
                Work([replace(part, holder=numbers.get(part.seq) or 0)], is_due=True, running={0}) for part in held
            ]
            return

    def _give_back(self) -> None:
        """Of one claim, what has not started."""
        for work in self._works:
            for place, part in enumerate(work.parts):
                if place not in work.running and place not in work.outcomes:
                    work.outcomes[place] = self._outcome(part, "released")
            return

    def _beat(self) -> None:
        self.puppet.beat([part for work in self._works if not work.is_due for part in self._highest(work)])

    def _highest(self, work: Work) -> list[Part]:
        started = [work.parts[place] for place in sorted({*work.running, *work.outcomes})]
        return started[-1:]

    def _outcome(self, part: Part, outcome: str) -> Outcome:
        return {"seq": part.seq, "id": part.holder, "outcome": outcome, "delay": 0, "reason": "by hand"}


def play(theatre: Theatre, chance: random.Random, steps: int) -> None:
    """Publish, relay, consume and die in a random order, then let one worker finish."""
    actors = [Actor(theatre, chance) for _ in range(3)]
    zombies: list[Actor] = []
    sent: list[tuple[str | None, str]] = []
    for _ in range(steps):
        match chance.choices(("publish", "relay", "act", "haunt", "die", "redrive"), (12, 8, 74, 5, 1.5, 0.5))[0]:
            case "publish":
                publish(theatre, chance, sent)
            case "relay":
                theatre.relay()
            case "act":
                chance.choice(actors).act()
            case "haunt" if zombies:
                with suppress(psycopg.Error):  # EB001: a zombie claims nothing
                    chance.choice(zombies).act()
            case "die":
                dying = actors.pop(chance.randrange(3))
                dying.expect_death()
                actors[0].puppet.take_over(dying.puppet)
                zombies.append(dying)
                actors.append(Actor(theatre, chance))
            case "redrive":
                theatre.redrive()
            case _:
                pass
    theatre.relay()
    for actor in actors:
        actor.finish()
    for zombie in zombies:
        zombie.finish()
    actors[0].puppet.finish()


def publish(theatre: Theatre, chance: random.Random, sent: list[tuple[str | None, str]]) -> None:
    """One event, with an id that was there before now and then."""
    key = chance.choice((None, "a", "a", "b", "c"))
    if sent and chance.random() < 0.1:
        key, event_id = chance.choice(sent)
        theatre.publish(key, told=theatre.any_told(chance), event_id=event_id)
        return
    event_id = str(UUID(int=chance.getrandbits(128)))
    theatre.publish(key, told=theatre.any_told(chance), event_id=event_id)
    sent.append((key, event_id))
