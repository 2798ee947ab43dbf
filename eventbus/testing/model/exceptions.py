"""Exceptions that are due: one worker gets each, with what is parked behind it in its key."""

from __future__ import annotations

import json
from uuid import UUID

from eventbus.testing.model.claiming import Claiming
from eventbus.testing.model.state import rank_in_turn
from eventbus.testing.model.values import MEBIBYTE, Exceptional, Held, Told


class Exceptions(Claiming):
    """Claim what is due."""

    def claim_due(
        self,
        worker: UUID,
        queue_id: int,
        limit: int = 100,
        max_bytes: int = 8 * MEBIBYTE,
        *,
        now: float,
        alone: bool = False,
        turn: int = 0,
    ) -> list[Held]:
        """Claim exceptions of one queue that are due; ``alone``: one that needs a process for itself.

        Raises :class:`LeaseLost`.
        """
        return self.claim_due_and_hear(worker, queue_id, limit, max_bytes, now=now, alone=alone, turn=turn)[0]

    def claim_due_and_hear(
        self,
        worker: UUID,
        queue_id: int,
        limit: int = 100,
        max_bytes: int = 8 * MEBIBYTE,
        *,
        now: float,
        alone: bool = False,
        turn: int = 0,
    ) -> tuple[list[Held], Told | None]:
        """The same with what is told of a pause."""
        told = self.heed_pauses(queue_id, now)
        if told is not None and told.state == "paused":
            return [], told
        if told is not None:
            limit, told = min(limit, 1), Told("probing")
        if limit <= 0 or max_bytes <= 0 or not self._due(queue_id, now, alone=alone):
            return [], told
        self.require_live(worker)
        token = self.token("token")
        found = self._due(queue_id, now, alone=True)[:1] if alone else self._in_turn(queue_id, limit, turn, now)
        taken = self._fits(found, max_bytes)
        for one in taken:
            one.state, one.token, one.worker = "claimed", token, worker
        for one in taken:
            if one.event is not None:
                self.begin_executions(queue_id, [one.event])
        if told is not None and taken:
            told = self.take_probe(queue_id, worker, token, now)
        return [self._held(one, token) for one in taken], told

    def _due(self, queue_id: int, now: float, *, alone: bool) -> list[Exceptional]:
        found = [
            one
            for one in self.exceptions.values()
            if one.queue_id == queue_id and one.state == "waiting" and one.alone == alone and one.due_at <= now
        ]
        return sorted(found, key=lambda one: (one.due_at, one.id))

    def _in_turn(self, queue_id: int, limit: int, turn: int, now: float) -> list[Exceptional]:
        """What is due, lane by lane in the order of this turn."""
        queue = self.queues[queue_id]
        due = self._due(queue_id, now, alone=False)
        found: list[Exceptional] = []
        for lane in sorted(range(queue.lanes), key=lambda lane: rank_in_turn(queue, lane, turn)):
            left = limit - len(found)
            for one in [one for one in due if one.lane == lane][: max(left, 0)]:
                room = limit - len(found)
                if room <= 0:
                    break
                if one.range_hi is not None:
                    found += self._part(one, room)
                elif one.key is None:
                    found.append(one)
                elif one.redriven_from is not None and self._is_claimed(one):
                    one.due_at = now + 0.1
                else:
                    found += [one, *self._behind(one)[: room - 1]]
        return found

    def _behind(self, first: Exceptional) -> list[Exceptional]:
        """What is parked behind an event in its key, as far as nothing in between has to stay."""
        assert first.key is not None
        blocks = self.blocking(first.queue_id, first.lane, first.key)
        behind = []
        for one in self.of_key(first.queue_id, first.lane, first.key):
            if one.seq <= first.seq or one.state != "parked" or any(seq < one.seq for seq in blocks):
                continue
            if one.alone:
                break
            behind.append(one)
        return behind

    def _is_claimed(self, one: Exceptional) -> bool:
        """Whether the open claim of the lane has an unfinished event of this key."""
        claim = self.newest_claim(one.queue_id, one.lane)
        if claim is None or claim.settled is not None:
            return False
        return any(d.event.key == one.key and d.seq not in claim.progress for d in self.deliveries(claim))

    def _part(self, whole: Exceptional, room: int) -> list[Exceptional]:
        """Take the first part of a released range as exceptions of their own."""
        assert whole.range_hi is not None
        hi = min(whole.range_hi, whole.seq + room - 1)
        line = self.line(whole.queue_id, whole.lane)
        part = [self.add_exception(one, whole.due_at) for one in line[whole.seq - 1 : hi]]
        if hi == whole.range_hi:
            del self.exceptions[whole.id]
        else:
            whole.seq = hi + 1
        return part

    @staticmethod
    def _fits(found: list[Exceptional], left: int) -> list[Exceptional]:
        """As many as fit into so many bytes, one at least."""
        taken: list[Exceptional] = []
        size = 0
        for one in found:
            size += one.event.size if one.event else 0
            if size > left and taken:
                break
            taken.append(one)
        return taken

    def _held(self, one: Exceptional, token: UUID) -> Held:
        event = one.event
        assert event is not None
        return Held(
            one.id, token, one.attempts, one.crashes, event.event_id, json.loads(event.payload), event.key,
            self.twin(one.queue_id, event), one.redriven_from is not None,
        )  # fmt: skip
