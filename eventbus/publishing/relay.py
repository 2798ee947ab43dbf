"""Moves committed events from the outbox into the queues, and sleeps when there are none.

Before it: publishers have committed. After it: consumers claim. Any process may run a relay; one at a time is at
work, by a lock that lives no longer than one step. A crash leaves whole steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from eventbus.errors import Unavailable
from eventbus.publishing.filling import Filling
from eventbus.publishing.routing import resolve
from eventbus.publishing.ticks import RelayEngine, Tick
from eventbus.transport import StatementCancelled

log = logging.getLogger("eventbus")

_PACE = 0.005
"""Least seconds from one small tick to the next, so that a stream of single events is relayed in groups."""
_SMALL = 100
"""A tick of fewer events is a small one."""
_FIRST_LOOK = 0.002
"""Seconds to the first look after events that a publisher may be about to commit; doubled after each."""
_LONGEST_LOOK = 1.0
_BUSY_PAUSE = 0.05
_DEFER_LEAST, _DEFER_MOST = 0.03, 0.3
"""Seconds for which a sleeping relay leaves an event to the one that relayed last."""
_PAUSED_POLL = 2.0
_DUE_BATCH = 1_000


class Relay:
    """The relay of one process. ``fed`` is called with the queue numbers that got something.

    Every publisher's notification reaches every relay. The one that relayed last acts on it; the others wait for a
    random moment first, and sleep on when they hear that somebody has relayed. ``random`` returns numbers from 0 to 1.
    ``relayed`` is told how many deliveries which queue got, ``unrouted`` of topics that no queue wants.
    """

    def __init__(
        self,
        engine: RelayEngine,
        *,
        batch: int,
        notify: bool,
        fed: Callable[[Sequence[int]], None],
        random: Callable[[], float],
        relayed: Callable[[Mapping[int, int]], None] = lambda _: None,
        unrouted: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.poll_interval = 0.5
        self.idle_ticks = 0
        """How many ticks found nothing; grows while the relay works and nothing is left to do."""
        self.delivered = 0
        self._engine = engine
        self._batch = self._most = batch
        self._notify = notify
        self._fed = fed
        self._relayed = relayed
        self._unrouted = unrouted
        self._filling = Filling(engine, fed, time.monotonic, relayed)
        self._random = random
        self._awake = asyncio.Event()
        self._heard = asyncio.Event()
        self._leading = True
        """No other relay was heard since we relayed or began."""
        self._sleeping = False
        self._stopping = False
        self._look = _FIRST_LOOK
        self._asleep = False
        self._renew = False
        """A whole sleep is over: ask to be woken again before looking."""
        self.paused = False
        """The bus waits for ``eventbus resume``."""

    def wake(self) -> None:
        """Something was published."""
        self._look = _FIRST_LOOK
        self._asleep = self._renew = False
        self._awake.set()

    def heard(self) -> None:
        """Another relay has relayed something."""
        self._leading = False
        self._heard.set()

    def stop(self) -> None:
        """End ``run`` after the step that is under way."""
        self._stopping = True
        self._sleeping = False
        self._awake.set()

    async def run(self) -> None:
        """Relay until ``stop``."""
        while not self._stopping:
            started = time.monotonic()
            try:
                self._awake.clear()
                self._sleeping = False
                pause = await self._step()
            except StatementCancelled:
                self._batch = max(1, self._batch // 2)
                await self._engine.recover()
                continue
            except Unavailable:
                await self._engine.recover()
                continue
            await self._pause(pause - (time.monotonic() - started))

    async def _step(self) -> float:
        """One tick, and one step of a queue that is filling; the seconds from the start to the next, unless woken."""
        if self._renew:
            await self._fall_asleep()
        tick = await self._engine.tick(self._batch)
        pause = await self._follow(tick)
        if tick.state in ("paused", "foreign"):
            return pause
        filling = await self._filling.step(self._batch)
        return pause if filling is None else min(pause, filling)

    async def _follow(self, tick: Tick) -> float:
        """What follows from a tick; the seconds from its start to the next one, unless woken."""
        match tick.state:
            case "ticked":
                return self._ticked(tick)
            case "unknown":
                await self._resolve(tick.unknown)
                return 0.0
            case "foreign":
                log.warning("this database was restored from another one: %s", await self._engine.attach())
                return 0.0
            case "paused":
                if not self.paused:
                    log.warning("the bus is paused; `eventbus resume` starts it again")
                self.paused = True
                return _PAUSED_POLL
            case "busy":
                return _BUSY_PAUSE
            case "idle":
                self.paused = False
                self.idle_ticks += 1
                return await self._idle(tick)

    def _ticked(self, tick: Tick) -> float:
        self._look = _FIRST_LOOK
        self._asleep = False
        self.paused = False
        self._batch = min(self._most, self._batch + max(1, self._batch // 4))
        self._leading = True
        self.delivered += tick.deliveries
        if tick.fed:
            self._fed(tick.fed)
            self._relayed(dict(zip(tick.fed, tick.counts, strict=False)))
        return 0.0 if tick.more or tick.events >= _SMALL else _PACE

    async def _idle(self, tick: Tick) -> float:
        """Nothing fresh. Fire what is due; else fall asleep, looking again for those who may not wake us."""
        if tick.due_in is not None and tick.due_in <= 0:
            # nothing fired: another relay has them, or a cancel that is not decided yet
            return 0.0 if await self._engine.fire_due(_DUE_BATCH) else _BUSY_PAUSE
        if self._filling.queues:
            self._asleep = self._renew = False
            return _PACE  # whoever publishes need not wake us
        longest = self.poll_interval if tick.due_in is None else min(self.poll_interval, tick.due_in)
        if self._asleep:  # and the tick after falling asleep found nothing either
            self._asleep = False
            self._sleeping = self._renew = True
            return longest
        look, self._look = self._look, min(_LONGEST_LOOK, self._look * 2)
        if not self._notify or look == _FIRST_LOOK:
            return min(look, longest)  # events come in bursts: stay awake a little
        return 0.0 if await self._fall_asleep() else min(look, longest)

    async def _fall_asleep(self) -> bool:
        """Ask to be woken; false when somebody is publishing who may not have seen it."""
        self._renew = False
        self._asleep = not await self._engine.fall_asleep(self.poll_interval)
        return self._asleep

    async def _resolve(self, topics: Sequence[str]) -> None:
        for topic in await resolve(self._engine, topics):
            log.warning("no queue matches topic %s; its events are unrouted", topic, extra={"topic": topic})
            self._unrouted(topic)

    async def _pause(self, seconds: float) -> None:
        if seconds <= 0 or self._stopping:
            await asyncio.sleep(0)
            return
        until = time.monotonic() + seconds
        while await _set(self._awake, until - time.monotonic()):
            if self._leading or not self._sleeping:
                return
            self._awake.clear()
            self._heard.clear()
            if not await _set(self._heard, _DEFER_LEAST + (_DEFER_MOST - _DEFER_LEAST) * self._random()):
                return


async def _set(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set, that long at most; whether it is."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
