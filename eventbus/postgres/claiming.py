"""The consumer's side of the storage engine on PostgreSQL: claims in, settlements out."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

import orjson

from eventbus.postgres.link import Link, Row
from eventbus.postgres.replies import read_claims, read_due
from eventbus.postgres.statements import Statements
from eventbus.postgres.watching import Watching
from eventbus.transport import Claimed, ClaimedDue, Due, Lease, Verdict

_EVERYTHING: Final = datetime(1, 1, 1, tzinfo=UTC)
_SWEEP_SECONDS = 1.0
"""How often to look for exceptions from the low end on; in between only from the last one that was due."""


class PostgresConsumer:
    """A :class:`eventbus.transport.ConsumerEngine` over two links, one claims, one settles; ``watching`` pauses."""

    def __init__(self, claiming: Link, settling: Link, calls: Statements, watching: Watching) -> None:
        self.worker_id = uuid4()
        self.names: dict[int, str] = {}
        """Queue numbers and names of this process."""
        self.kinds: dict[int, str] = {}
        """How the queues of this process are split into lanes."""
        self.idempotent: set[int] = set()
        """Those of them whose executions are completed by the settlement."""
        self._claiming = claiming
        self._settling = settling
        self.pause, self.resume, self.free_probe = watching.pause, watching.resume, watching.free_probe
        self._calls = calls
        self._newest_claim = 0
        self._floors = (0, 0)
        """The newest claims of the two last looks at what we hold."""
        self._turn = 0
        """Whose turn it is to be first when the byte budget does not reach for all."""
        self._due_turn = 0
        self._due_from: dict[int, datetime] = {}
        self._swept_at = 0.0

    async def register(self) -> None:
        worker_id = uuid4()
        await self._claiming.rows(self._calls["register"], (worker_id, socket.gethostname(), os.getpid()))
        self.worker_id = worker_id
        self.forget_newest_claim()

    async def unregister(self) -> None:
        await self._claiming.rows(self._calls["unregister"], (self.worker_id,))

    async def claim(self, rooms: Mapping[int, int], max_bytes: int) -> Claimed:
        token = uuid4()
        self._turn += 1
        first = self._turn % len(rooms)
        order = [*rooms][first:] + [*rooms][:first]
        parameters = (
            self.worker_id, token, order, [rooms[queue_id] for queue_id in order], max_bytes, self._turn // len(rooms),
        )  # fmt: skip
        rows = await self._claiming.rows(self._calls["claim"], parameters)
        newest = next((row[0] for row in reversed(rows) if row[0] is not None), 0)
        self._newest_claim = max(self._newest_claim, newest)
        return read_claims(rows, token, self.names, time.monotonic())

    async def claim_due(self, rooms: Mapping[int, int], max_bytes: int, *, alone: bool) -> ClaimedDue:
        now = time.monotonic()
        if now - self._swept_at >= _SWEEP_SECONDS:
            self._swept_at = now
            self._due_from.clear()
        token = uuid4()
        partial = set(self._due_from)
        starts = [self._due_from.get(queue_id, _EVERYTHING) for queue_id in rooms]
        self._due_turn += 1
        parameters = (
            self.worker_id, token, list(rooms), list(rooms.values()), starts, max_bytes, alone, self._due_turn,
        )  # fmt: skip
        rows = await self._claiming.rows(self._calls["claim_due"], parameters)
        if not alone:
            self._follow(rows)
        claimed = read_due(rows, token, self.names, time.monotonic())
        sweep_in = self._swept_at + _SWEEP_SECONDS - now
        return ClaimedDue(
            claimed.deliveries,
            {
                queue_id: _not_later_than(sweep_in, due) if queue_id in partial else due
                for queue_id, due in claimed.next.items()
            },
            claimed.paused,
            claimed.probing,
        )

    def _follow(self, rows: Sequence[Row]) -> None:
        """Look from here on next time: dead rows are where exceptions were."""
        for row in rows:
            if row[0] is not None and self.kinds[row[1]] == "plain":
                self._due_from[row[1]] = row[6]

    async def settle(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        claims = sorted((lease for lease in leases if lease.claim_id), key=lambda lease: lease.claim_id)
        exceptions = sorted((lease for lease in leases if lease.exception_id), key=lambda lease: lease.exception_id)
        return [*await self._settle_claims(claims), *await self._settle_exceptions(exceptions)]

    async def _settle_claims(self, claims: Sequence[Lease]) -> list[Lease]:
        if not claims:
            return []
        outcomes = [
            {"claim": lease.claim_id, "outcomes": _outcomes(lease.verdicts)} for lease in claims if lease.verdicts
        ]
        rows = await self._settling.rows(
            self._calls["settle"],
            (
                [lease.claim_id for lease in claims],
                [lease.token for lease in claims],
                orjson.dumps(outcomes).decode() if outcomes else None,
                [lease.claim_id for lease in claims if lease.queue_id in self.idempotent],
            ),
        )
        settled = {claim_id for (claim_id,) in rows}
        return [lease for lease in claims if lease.claim_id not in settled]

    async def _settle_exceptions(self, exceptions: Sequence[Lease]) -> list[Lease]:
        if not exceptions:
            return []
        outcomes = [
            {"id": lease.exception_id, **_fields(lease.verdicts[0][1])}
            if lease.verdicts
            else {"id": lease.exception_id, "outcome": "done"}
            for lease in exceptions
        ]
        rows = await self._settling.rows(
            self._calls["settle_exceptions"],
            (
                [lease.exception_id for lease in exceptions],
                [lease.token for lease in exceptions],
                orjson.dumps(outcomes).decode(),
            ),
        )
        settled = {exception_id for (exception_id,) in rows}
        return [lease for lease in exceptions if lease.exception_id not in settled]

    async def record_progress(self, lease: Lease) -> bool:
        done, verdicts = lease.done, lease.verdicts
        lease.done, lease.verdicts = [], []
        try:
            [row] = await self._settling.rows(
                self._calls["record_progress"],
                (lease.claim_id, lease.token, sorted(done), orjson.dumps(_outcomes(verdicts)).decode()),
            )
        except BaseException:
            lease.done, lease.verdicts = done + lease.done, verdicts + lease.verdicts
            raise
        lease.recorded.update(done, (seq for seq, _ in verdicts))
        return bool(row[0])

    async def detach(self, lease: Lease, seqs: Sequence[int]) -> Mapping[int, int] | None:
        done, verdicts = lease.done, lease.verdicts
        lease.done, lease.verdicts = [], []
        outcomes = orjson.dumps(_outcomes(verdicts)).decode()
        try:
            rows = await self._settling.rows(
                self._calls["detach"], (lease.claim_id, lease.token, sorted(done), outcomes, list(seqs))
            )
        except BaseException:
            lease.done, lease.verdicts = done + lease.done, verdicts + lease.verdicts
            raise
        return {seq: exception_id or 0 for seq, exception_id in rows if seq is not None} if rows else None

    async def release_unknown(self, known: Collection[Lease], *, thorough: bool) -> int:
        if thorough:
            self.forget_newest_claim()
        claims, exceptions = {lease.claim_id for lease in known}, {lease.exception_id for lease in known}
        # a claim that is being taken apart on the other link may be exceptions by now, under the same token
        tokens = {lease.token for lease in known if lease.claim_id and lease.ordered}
        floors = (self._floors[1], self._newest_claim)
        held = await self._claiming.rows(self._calls["held"], (self.worker_id, self._floors[0]))
        self._floors = floors
        lost_claims = [n for kind, n, _ in held if kind == "claim" and n not in claims]
        lost_exceptions = [n for kind, n, by in held if kind != "claim" and n not in exceptions and by not in tokens]
        if not lost_claims and not lost_exceptions:
            return 0
        lost = (self.worker_id, sorted(lost_claims), sorted(lost_exceptions))
        return int((await self._claiming.rows(self._calls["release_unknown"], lost))[0][0])

    async def recover(self) -> None:
        await self._claiming.recover()

    async def recover_settling(self) -> None:
        await self._settling.recover()

    def forget_newest_claim(self) -> None:
        """A server that crashed may hand out lower claim ids again: bound nothing by the highest one seen."""
        self._newest_claim = 0
        self._floors = (0, 0)

    def beat_state(self, leases: Iterable[Lease]) -> tuple[int, dict[str, int]]:
        """What a heartbeat tells of the open claims: a lower bound of their ids, and how far each has started.

        A claim whose reply was lost may be committed by the server after we looked for it. So the bound stays at the
        newest claim of two looks ago, a whole lease back at least.
        """
        started = {str(lease.claim_id): lease.started for lease in leases if lease.claim_id}
        return min([self._floors[0], *map(int, started)]), started


def _not_later_than(seconds: float, due: Due) -> Due:
    """Look again by then: what was committed late may be due before the place where we started to look."""
    return Due(seconds if due.due_in is None else min(seconds, due.due_in), due.crashed_in)


def _outcomes(verdicts: Sequence[tuple[int, Verdict]]) -> list[dict[str, Any]]:
    """Verdicts as the engine reads them; neighbouring released deliveries as one range."""
    outcomes: list[dict[str, Any]] = []
    for seq, verdict in sorted(verdicts, key=lambda pair: pair[0]):
        last = outcomes[-1] if outcomes else None
        if verdict.outcome == "released" and last and last["outcome"] == "released" and last["hi"] == seq - 1:
            last["hi"] = seq
        elif verdict.outcome == "released":
            outcomes.append({"seq": seq, "hi": seq, "outcome": "released"})
        else:
            outcomes.append({"seq": seq, **_fields(verdict)})
    return outcomes


def _fields(verdict: Verdict) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome, "delay": verdict.delay, "reason": verdict.reason, "error": verdict.error,
    }  # fmt: skip
