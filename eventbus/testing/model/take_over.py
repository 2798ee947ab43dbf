"""Take-over: what a silent worker held comes back."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from eventbus.testing.model.settling import Settling
from eventbus.testing.model.values import Exceptional, Range


class TakeOver(Settling):
    """Give back on behalf of workers that no longer work."""

    def take_over(self, worker: UUID, max_crashes: int = 3, lease: float = 30.0, *, now: float) -> tuple[int, int]:
        """Take over whose heartbeat is older than the lease; how many workers and deliveries.

        Sixteen at most, in the order of their numbers; the database's numbers are random, so any order is right there.
        """
        silent = [number for number in sorted(self.silent(now, lease)) if number != worker][:16]
        count = 0
        for number in silent:
            self.workers[number].live = False
            for claim in self.open_claims(number):
                started = self.workers[number].started.get(claim.id, claim.hi)
                count += self.give_back(claim, started, max_crashes, now)
            count += self.give_back_exceptions(self.held_by(number), 1, max_crashes, now)
        return len(silent), count

    def release_unknown(
        self, worker: UUID, claims: Sequence[int] = (), exceptions: Sequence[int] = (), *, now: float
    ) -> int:
        """A worker releases what it holds here and does not know. None of it has started."""
        never = 2**31 - 1
        count = sum(self.give_back(claim, 0, never, now) for claim in self.open_claims(worker) if claim.id in claims)
        held = [one for one in self.held_by(worker) if one.id in exceptions]
        return count + self.give_back_exceptions(held, 0, never, now)

    def give_back(self, claim: Range, started: int, max_crashes: int, now: float) -> int:
        """End a claim: unrecorded deliveries up to ``started`` come back as crashed, the rest as never started.

        Of a key only the first can die of it. Returns how many came back or died.
        """
        claim.settled = "lost"
        lost = [one for one in self.deliveries(claim) if one.seq not in claim.progress]
        claim.progress |= {one.seq: "lost" for one in lost}
        ordered = self.queues[claim.queue_id].ordered
        back, seen = [], set()
        for one in lost:
            if not ordered and one.seq > started:
                continue
            new = self.add_exception(one, now)
            first = new.key is None or new.key not in seen
            seen.add(new.key)
            crashes = 1 if first else min(1, max_crashes - 1)
            new.crashes = crashes if one.seq <= started else 0
            new.alone = _must_run_alone(new.crashes, max_crashes)
            new.state = "waiting" if new.key is None else "parked"
            back.append(new)
        self.bury([(one, "worker died") for one in back if one.crashes >= max_crashes], now)
        self.advance_keys(((one.queue_id, one.lane, one.key) for one in back), now)
        self.add_ranges(claim, [] if ordered else [one.seq for one in lost if one.seq > started], now)
        return len(lost)

    def give_back_exceptions(self, held: Sequence[Exceptional], crashes: int, max_crashes: int, now: float) -> int:
        """Give back exceptions as crashed; of a key only the first can die of it. How many."""
        self.finish([one for one in held if one.finished], now)
        seen = set()
        back = [one for one in held if not one.finished]
        for one in sorted(back, key=lambda one: one.seq):
            place = (one.queue_id, one.lane, one.key)
            if one.key is None or place not in seen:
                one.crashes += crashes
            else:
                one.crashes = max(one.crashes, min(one.crashes + crashes, max_crashes - 1))
            seen.add(place)
            one.alone = _must_run_alone(one.crashes, max_crashes)
            one.token = one.worker = None
            one.due_at = now
            one.state = "waiting" if one.key is None else "parked"
        self.bury([(one, "worker died") for one in back if crashes and one.crashes >= max_crashes], now)
        self.advance_keys(((one.queue_id, one.lane, one.key) for one in held), now)
        return len(held)


def _must_run_alone(crashes: int, max_crashes: int) -> bool:
    """From the second crash on, or from the last but one: a single kill of a worker costs no speed."""
    return crashes > 0 and crashes >= min(2, max_crashes - 1)
