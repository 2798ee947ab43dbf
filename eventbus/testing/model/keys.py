"""The order of keys, dead letters, and executions of idempotent queues: the rules that claims and settlements share.

Of a key at most one exception is not parked, besides those that one worker has taken along in one piece. What is parked
goes on when nothing before it is under way and no dead letter blocks the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eventbus.testing.model.relaying import Relaying
from eventbus.testing.model.values import Event, Exceptional, Execution, Letter, Range


class Keys(Relaying):
    """Advance keys, bury deliveries, begin and complete executions."""

    def advance_keys(self, places: Iterable[tuple[int, int, str | None]], now: float) -> None:
        """Let the first parked event of each key (queue, lane, key) run where nothing holds it back."""
        for queue_id, lane, key in sorted({(q, n, k) for q, n, k in places if k is not None}):
            under_way = [one for one in self.of_key(queue_id, lane, key) if one.state != "parked"]
            for one in sorted(under_way, key=lambda one: (one.state, one.seq))[1:]:
                if one.state == "waiting":
                    one.state = "parked"
            line = self.of_key(queue_id, lane, key)
            held_back = line and any(seq < line[0].seq for seq in self.blocking(queue_id, lane, key))
            if line and not under_way and not held_back:
                line[0].state = "waiting"
                line[0].due_at = now

    def bury(self, buried: Sequence[tuple[Exceptional, str | None]], now: float) -> None:
        """Make dead letters of exceptions, each with its reason. Another delivery of the event may run then."""
        for one, reason in sorted(buried, key=lambda pair: pair[0].id):
            event = one.event
            assert event is not None
            blocks = one.key is not None and self.queues[one.queue_id].when_exhausted == "park"
            number = self.next("letter")
            self.dead_letters[number] = Letter(
                number, one.queue_id, one.lane, one.seq, event, one.attempts, one.crashes, blocks, reason, now,
                one.redriven_from, one.first_error, one.last_error,
            )  # fmt: skip
            execution = self.executions.get((one.queue_id, event.event_id))
            if execution and execution.completed_at is None and execution.owner == event.id:
                execution.owner = None
            del self.exceptions[one.id]

    def redrive(self, letters: Iterable[int], *, now: float) -> list[int]:
        """Move dead letters back to their queues, due now, attempts from the start; those that were moved."""
        picked = [self.dead_letters.pop(number) for number in sorted(set(letters) & set(self.dead_letters))]
        moved = []
        for letter in sorted(picked, key=lambda letter: (letter.queue_id, letter.lane, letter.seq)):
            number = self.next("exception")
            key = self.key_in(letter.queue_id, letter.event)
            one = Exceptional(
                number, letter.queue_id, letter.lane, letter.seq, now, letter.event, key=key,
                state="waiting" if key is None else "parked", redriven_from=letter.id,
            )  # fmt: skip
            self.exceptions[number] = one
            moved.append(one)
        self.advance_keys(((one.queue_id, one.lane, one.key) for one in moved), now)
        return [letter.id for letter in picked]

    def discard(self, letters: Iterable[int], *, now: float) -> list[int]:
        """Remove dead letters for good; what they blocked goes on. Those that were removed."""
        gone = [self.dead_letters.pop(number) for number in sorted(set(letters) & set(self.dead_letters))]
        self.advance_keys(((one.queue_id, one.lane, one.event.key) for one in gone if one.blocks), now)
        return [letter.id for letter in gone]

    def begin_executions(self, queue_id: int, events: Sequence[Event]) -> None:
        """Each event gets a pending execution, owned by its delivery; one that nobody owns changes hands."""
        if self.queues[queue_id].tracking != "idempotent":
            return
        for event in events:
            execution = self.executions.setdefault((queue_id, event.event_id), Execution(event.id))
            if execution.owner is None and execution.completed_at is None:
                execution.owner = event.id

    def twin(self, queue_id: int, event: Event) -> str | None:
        """What another delivery of the event has come to: ``completed``, ``pending``, or none: this one runs it."""
        tracking = self.queues[queue_id].tracking
        execution = self.executions.get((queue_id, event.event_id))
        if tracking == "none" or execution is None:
            return None
        if execution.completed_at is not None:
            return "completed"
        if execution.owner == event.id or (execution.owner is None and tracking != "idempotent"):
            return None
        return "pending"

    def complete_executions(self, queue_id: int, events: Iterable[Event], now: float) -> None:
        """Executions that their owners have brought to an end."""
        for event in events:
            execution = self.executions.get((queue_id, event.event_id))
            if execution and execution.owner == event.id and execution.completed_at is None:
                execution.owner, execution.completed_at = None, now

    def complete_claim(self, claim: Range, seqs: Iterable[int] | None, now: float) -> None:
        """The same for these deliveries of a claim, or for all, where they have no other outcome than done."""
        if self.queues[claim.queue_id].tracking == "none":
            return
        wanted = set(range(claim.lo, claim.hi + 1) if seqs is None else seqs)
        events = [
            one.event
            for one in self.deliveries(claim)
            if one.seq in wanted and claim.progress.get(one.seq, "done") == "done"
        ]
        self.complete_executions(claim.queue_id, events, now)
