"""Settling: what became of claimed deliveries, written once, by the one who holds them.

An outcome is a mapping as the engine takes it: ``seq`` (or ``id``), ``outcome``, and perhaps ``delay`` in seconds,
``reason``, ``error``, and ``hi`` where a released one stands for ``seq`` to ``hi``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eventbus.testing.model.exceptions import Exceptions
from eventbus.testing.model.values import AlreadyCompleted, Claim, Event, Exceptional, Execution, Held, LeaseLost, Range

Outcomes = Sequence[Mapping[str, Any]]


class Settling(Exceptions):
    """Settle, record, detach, and the commit of transactional handlers."""

    def settle(self, *claims: Claim, outcomes: Mapping[int, Outcomes] | None = None, now: float) -> set[int]:
        """Settle whole claims; those that are settled now by their tokens, also by an earlier call."""
        settled = set()
        for claim in sorted(claims, key=lambda claim: claim.id):
            mine = self.owned(claim)
            if mine is None or mine.settled == "lost":
                continue
            if mine.settled is None:
                mine.settled = "settled"
                self.record_outcomes(mine, (), (outcomes or {}).get(mine.id, ()), now)
                self.complete_claim(mine, None, now)
            settled.add(mine.id)
        return settled

    def record(self, claim: Claim, done: Sequence[int] = (), outcomes: Outcomes = (), *, now: float) -> bool:
        """Record single deliveries of an open claim; false, and nothing written, when it is not this token's."""
        mine = self.owned(claim)
        if mine is None or mine.settled is not None:
            return False
        self.record_outcomes(mine, done, outcomes, now)
        self.complete_claim(mine, done, now)
        return True

    def detach(
        self, claim: Claim, held: Sequence[int], done: Sequence[int] = (), outcomes: Outcomes = (), *, now: float
    ) -> dict[int, Held | None] | None:
        """Settle a claim while some of it runs: what is held of it now, by seq; nothing at all if it was lost.

        What neither has an outcome nor is held comes back as never started. None for one that has ended meanwhile.
        """
        mine = self.owned(claim)
        if mine is None or not self.is_live(mine.worker) or mine.settled == "lost":
            return None
        if mine.settled is None:
            mine.settled = "settled"
            self.record_outcomes(mine, done, outcomes, now)
            self.complete_claim(mine, done, now)
            self._leave(mine, [one.seq for one in self.deliveries(mine) if one.seq not in done], held, now)
        here = {
            one.seq: one.id
            for one in self.held_by(mine.worker)
            if (one.token, one.queue_id, one.lane) == (mine.token, mine.queue_id, mine.lane)
        }
        return {seq: Held(here[seq], mine.token) if seq in here else None for seq in held}

    def settle_due(self, held: Sequence[Held], outcome: str, *, now: float, **fields: Any) -> set[int]:
        """Settle exceptions, all alike; the ids of those that were still ours."""
        return self.settle_each([(one, outcome) for one in held], now=now, **fields)

    def settle_each(self, held: Sequence[tuple[Held, str]], *, now: float, **fields: Any) -> set[int]:
        """Settle exceptions, each with its outcome; the ids of those that were still ours.

        One whose transactional handler has committed is done, whatever the outcome says.
        """
        mine = [
            (self.exceptions[one.id], outcome)
            for one, outcome in sorted(held, key=lambda pair: pair[0].id)
            if one.id in self.exceptions and self.exceptions[one.id].token == one.token
        ]
        done = [one for one, outcome in mine if outcome == "done" or one.finished]
        left = [(one, outcome) for one, outcome in mine if outcome != "done" and not one.finished]
        for one, outcome in left:
            _leave_path(one, outcome, fields, now)
        self.bury([(one, fields.get("reason")) for one, outcome in left if outcome == "dead"], now)
        self.finish(done, now)
        self.advance_keys(((one.queue_id, one.lane, one.key) for one, _ in mine), now)
        return {one.id for one, _ in mine}

    def complete(
        self,
        queue_id: int,
        started: Sequence[tuple[Claim, int]] = (),
        held: Sequence[Held] = (),
        event_ids: Iterable[str] = (),
        *,
        now: float,
        tx: int | None = None,
    ) -> None:
        """Commit the transaction of a transactional handler: deliveries, executions and what it published, or nothing.

        Raises :class:`LeaseLost` or :class:`AlreadyCompleted`; then nothing is written, and ``tx`` is still open.
        """
        claims = [(self.owned(claim), seq) for claim, seq in started]
        rows = [self.exceptions.get(one.id) for one in held]
        if any(claim is None or seq in claim.progress for claim, seq in claims):
            raise LeaseLost("somebody else has recorded the delivery")
        if any(row is None or row.token != one.token or row.finished for row, one in zip(rows, held, strict=True)):
            raise LeaseLost("this delivery is not held any more")
        keys = [(queue_id, event_id) for event_id in event_ids]
        found = [self.executions.get(key) for key in keys]
        if len(set(keys)) < len(keys) or any(one and one.completed_at is not None for one in found):
            raise AlreadyCompleted("this event has been completed already")
        for claim, seq in claims:
            assert claim is not None
            claim.progress[seq] = "done"
        for row in rows:
            assert row is not None
            row.finished = True
        self.executions |= {key: Execution(None, now) for key in keys}
        if tx is not None:
            self.commit(tx)

    def owned(self, claim: Claim) -> Range | None:
        """The claim of this id and token."""
        found = self.claims.get(claim.id)
        return found if found is not None and found.token == claim.token else None

    def record_outcomes(self, claim: Range, done: Iterable[int], outcomes: Outcomes, now: float) -> None:
        """What nobody has recorded yet of a claim: the first who records a delivery decides."""
        said = [(said, seq) for said in outcomes for seq in range(said["seq"], said.get("hi", said["seq"]) + 1)]
        here = range(claim.lo, claim.hi + 1)
        for seq in done:
            if seq in here:
                claim.progress.setdefault(seq, "done")
        new = sorted(((s, seq) for s, seq in said if seq in here and seq not in claim.progress), key=lambda p: p[1])
        ordered = self.queues[claim.queue_id].ordered
        dead, keys, together = [], [], []
        for fields, seq in new:
            outcome = fields["outcome"]
            claim.progress[seq] = outcome
            if outcome == "released" and not ordered:
                together.append(seq)
                continue
            one = self.add_exception(self.line(claim.queue_id, claim.lane)[seq - 1], now)
            _leave_path(one, outcome, fields, now)
            keys.append((claim.queue_id, claim.lane, one.key))
            if outcome == "dead":
                dead.append((one, fields.get("reason")))
        self.add_ranges(claim, together, now)
        self.bury(dead, now)
        self.advance_keys(keys, now)

    def finish(self, done: Sequence[Exceptional], now: float) -> None:
        """These exceptions are done: their executions are complete, and they are gone."""
        for one in done:
            event: Event | None = one.event
            if event is not None:
                self.complete_executions(one.queue_id, [event], now)
            del self.exceptions[one.id]

    def _leave(self, claim: Range, seqs: Sequence[int], held: Sequence[int], now: float) -> None:
        """Unrecorded deliveries of a claim that is settled: held ones stay with the worker, others come back."""
        keys = []
        for seq in seqs:
            if seq in claim.progress:
                continue
            claim.progress[seq] = "held" if seq in held else "released"
            one = self.add_exception(self.line(claim.queue_id, claim.lane)[seq - 1], now)
            if seq in held:
                one.state, one.token, one.worker = "claimed", claim.token, claim.worker
            elif one.key is not None:
                one.state = "parked"
            keys.append((one.queue_id, one.lane, one.key))
        self.advance_keys(keys, now)


def _leave_path(one: Exceptional, outcome: str, fields: Mapping[str, Any], now: float) -> None:
    """What an outcome makes of an exception; the key is advanced afterwards."""
    one.state = "parked" if one.key is not None and outcome in {"released", "parked"} else "waiting"
    one.token = one.worker = None
    one.due_at = now + (fields.get("delay") or 0)
    one.attempts += outcome in {"retry", "dead"}
    error = fields.get("error")
    one.first_error = error if one.first_error is None else one.first_error
    one.last_error = one.last_error if error is None else error
