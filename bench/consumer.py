"""One consumer process of the bus with a handler that does nothing: ``python -m bench.consumer``.

Drains a number of events and prints how fast, or serves until SIGTERM. Uses the public interface only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from bench.children import READY
from bench.line import PATTERN, QUEUE
from bench.meter import Meter
from bench.plugins import CHOICES, AroundEachCall, EveryHook
from eventbus import Event, EventBus
from eventbus.runtime.worker import Worker
from eventbus.settings import load

KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "idempotent": {"idempotent": True},
    "ordered": {"ordered": True},
    "prioritized": {"priorities": 3},
    "batch": {"batch": 100},
    "transactional": {"transactional": True},
    "transactional-batch": {"transactional": True, "batch": 100},
}
"""Options of ``subscribe`` by the name of what they promise."""


def main() -> None:
    """Consume as the arguments say."""
    arguments = _arguments()
    named = None if arguments.plugins == "default" else ()
    own: list[object] = []
    if arguments.plugins not in ("none", "default"):
        own.append(AroundEachCall() if arguments.plugins == "around each call" else EveryHook())
    bus = EventBus(load({"dsn": arguments.dsn, "plugins": named}), plugins=own)
    if arguments.events:
        asyncio.run(_drain(bus, arguments.events, KINDS[arguments.kind], plain=arguments.plain))
    else:
        asyncio.run(_serve(bus))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--events", type=int, default=0, help="stop after so many; 0: serve until SIGTERM")
    parser.add_argument("--plain", action="store_true", help="a plain handler instead of an async one")
    parser.add_argument("--kind", choices=list(KINDS), default="plain", help="what the handler is promised")
    parser.add_argument("--plugins", choices=CHOICES, default="default", help="which plugins are in use")
    return parser.parse_args()


async def _drain(bus: EventBus, events: int, options: Mapping[str, Any], *, plain: bool) -> None:
    loop = asyncio.get_running_loop()
    handled = asyncio.Event()

    def finished() -> None:
        loop.call_soon_threadsafe(handled.set)

    meter = Meter(events, finished)
    bus.subscribe(PATTERN, name=QUEUE, **options)(_handler(meter, options, plain=plain))
    worker = bus.worker()
    running = asyncio.create_task(worker.run())
    await _say_ready(worker, running)
    meter.start()
    await asyncio.wait({running, asyncio.create_task(handled.wait())}, return_when=asyncio.FIRST_COMPLETED)
    worker.stop()
    if await running:
        raise SystemExit(1)
    print(json.dumps(meter.result(events)))  # everything is settled: a graceful stop waits for that


def _handler(meter: Meter, options: Mapping[str, Any], *, plain: bool) -> Callable[..., object]:
    if plain:
        return _plain_handler(meter)
    return _batch_handler(meter) if "batch" in options else _async_handler(meter)


def _batch_handler(meter: Meter) -> Callable[..., object]:
    count = meter.count

    async def handle(events: list[Event]) -> None:
        for _ in events:
            count()

    return handle


def _async_handler(meter: Meter) -> Callable[..., object]:
    count = meter.count

    async def handle(_event: Event) -> None:
        count()

    return handle


def _plain_handler(meter: Meter) -> Callable[..., object]:
    count = meter.count

    def handle(_event: Event) -> None:
        count()

    return handle


async def _serve(bus: EventBus) -> None:
    """Note when the handler of each event started, by the clock that all processes of a machine share."""
    arrivals: dict[str, int] = {}

    @bus.subscribe(PATTERN, name=QUEUE)
    async def handle(event: Event) -> None:
        arrivals[str(event.event_id)] = time.monotonic_ns()

    worker = bus.worker()
    running = asyncio.create_task(worker.run())
    await _say_ready(worker, running)
    if await running:
        raise SystemExit(1)
    print(json.dumps(arrivals))


async def _say_ready(worker: Worker, running: asyncio.Task[int]) -> None:
    await asyncio.wait({running, asyncio.create_task(worker.ready())}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
        raise SystemExit(1)
    print(READY, flush=True)


if __name__ == "__main__":
    main()
