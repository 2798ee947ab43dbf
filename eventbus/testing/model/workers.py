"""Workers: they register, beat, leave, or fall silent."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from eventbus.testing.model.pausing import Pausing
from eventbus.testing.model.values import Exceptional, LeaseLost, Range, Worker


class Workers(Pausing):
    """Who is live, and what each holds."""

    def register(self, *, now: float) -> UUID:
        """A new live worker."""
        worker = self.token("worker")
        self.workers[worker] = Worker(now)
        return worker

    def beat(
        self, worker: UUID, started: Mapping[int, int] | None = None, *, now: float, lease: float = 30.0
    ) -> tuple[bool, int]:
        """One heartbeat that tells how far each open claim has started; (alive, workers that are expired).

        What the engine takes as ``open_from`` is only a place to start looking, and is not needed here.
        """
        mine = self.workers.get(worker)
        alive = mine is not None and mine.live
        if mine is not None and alive:
            mine.heartbeat_at, mine.started = now, dict(started or {})
        return alive, len(self.silent(now, lease))

    def unregister(self, worker: UUID) -> None:
        """A worker leaves. One that still holds something is taken over at once."""
        mine = self.workers.get(worker)
        if mine is None or not mine.live:
            return
        if self.open_claims(worker) or self.held_by(worker):
            mine.heartbeat_at = float("-inf")
        else:
            del self.workers[worker]

    def fall_silent(self, *workers: UUID) -> None:
        """Make it look as if these workers had not beaten for a very long time."""
        for worker in workers:
            if worker in self.workers:
                self.workers[worker].heartbeat_at = float("-inf")

    def silent(self, now: float, lease: float) -> list[UUID]:
        """Live workers whose heartbeat is older than the lease."""
        return [number for number, worker in self.workers.items() if worker.live and worker.heartbeat_at < now - lease]

    def is_live(self, worker: UUID) -> bool:
        """Whether this worker may hold anything."""
        return worker in self.workers and self.workers[worker].live

    def require_live(self, worker: UUID) -> None:
        """Raises :class:`LeaseLost` for a worker that was taken over or never registered."""
        if not self.is_live(worker):
            raise LeaseLost(f"worker {worker} lost its lease")

    def open_claims(self, worker: UUID) -> list[Range]:
        """The claims of a worker that are not settled, in order."""
        return [claim for claim in self.claims.values() if claim.worker == worker and claim.settled is None]

    def held_by(self, worker: UUID) -> list[Exceptional]:
        """The exceptions that a worker holds, in order."""
        found = [one for one in self.exceptions.values() if one.worker == worker and one.state == "claimed"]
        return sorted(found, key=lambda one: one.id)
