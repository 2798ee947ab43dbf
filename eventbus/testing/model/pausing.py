"""Pauses of queues and their probes: what they leave to a claim."""

from __future__ import annotations

from uuid import UUID

from eventbus.testing.model.keys import Keys
from eventbus.testing.model.values import Pause, Told


class Pausing(Keys):
    """Pause, resume, and what a claim is told."""

    def pause(
        self,
        queue_id: int,
        source: str,
        seconds: float | None = None,
        probe_seconds: float | None = None,
        reason: str = "tests",
        *,
        now: float,
    ) -> bool:
        """Pause a queue for one source, or anew; false when there is no such queue.

        ``seconds`` none: without end. With ``probe_seconds`` it ends by a probe only, which others await so long.
        """
        if queue_id not in self.queues:
            return False
        until = None if seconds is None else now + seconds
        self.pauses.setdefault(queue_id, {})[source] = Pause(reason, until, seconds, probe_seconds)
        return True

    def resume(self, queue_id: int, source: str) -> bool:
        """End the pause of one source; false when there was none."""
        return self.pauses.get(queue_id, {}).pop(source, None) is not None

    def free_probe(self, queue_id: int, source: str, token: UUID) -> bool:
        """The probe told nothing, and another may be taken at once; false when this one counts no more."""
        found = self.pauses.get(queue_id, {}).get(source)
        if found is None or found.probe_token != token:
            return False
        _forget_probe(found)
        return True

    def end_probe(self, queue_id: int, token: UUID) -> bool:
        """The probe was handled well: the pause is over; false when it has been decided, or counts no more."""
        here = self.pauses.get(queue_id, {})
        over = [source for source, pause in here.items() if pause.probe_token == token]
        for source in over:
            del here[source]
        return bool(over)

    def heed_pauses(self, queue_id: int, now: float) -> Told | None:
        """What the pauses of a queue leave to a claim: ``paused``, ``probe``, or none where nothing holds it up.

        A pause that is over ends here; one whose probe did not answer in time begins again.
        """
        pauses = self.pauses.get(queue_id, {})
        if not pauses:
            return None
        if any(pause.until is None for pause in pauses.values()):
            return Told("paused")
        if (seconds := _latest(pauses) - now) > 0:
            return Told("paused", seconds)
        silent = [pause for pause in pauses.values() if pause.probe_until is not None]
        for pause in silent:
            pause.until = now + (pause.seconds or 0)
            _forget_probe(pause)
        if silent:
            return Told("paused", max(pause.until or 0 for pause in pauses.values()) - now)
        for source in [source for source, pause in pauses.items() if pause.probe_seconds is None]:
            del pauses[source]
        return Told("probe") if pauses else None

    def take_probe(self, queue_id: int, worker: UUID, token: UUID, now: float) -> Told:
        """This worker has the probe of all pauses of a queue; for how long others wait."""
        pauses = self.pauses[queue_id].values()
        for pause in pauses:
            pause.probe_by, pause.probe_token = worker, token
            pause.probe_until = now + (pause.probe_seconds or 0)
        return Told("probe", max(pause.probe_seconds or 0 for pause in pauses))


def _latest(pauses: dict[str, Pause]) -> float:
    return max(max(pause.until or 0, pause.probe_until or pause.until or 0) for pause in pauses.values())


def _forget_probe(pause: Pause) -> None:
    pause.probe_by = pause.probe_token = pause.probe_until = None
