"""Computes where topics go: the one place where patterns meet topics on the way of an event."""

from __future__ import annotations

from collections.abc import Sequence

from eventbus.publishing.ticks import RelayEngine
from eventbus.topics import matches


async def resolve(engine: RelayEngine, topics: Sequence[str]) -> Sequence[str]:
    """Store the routes of ``topics``; returns those that no queue wants.

    Nothing is stored, and nothing returned, when the bindings have changed meanwhile: whoever needs them asks again.
    """
    version, bindings = await engine.bindings()
    routes = {topic: sorted({number for number, pattern in bindings if matches(pattern, topic)}) for topic in topics}
    if not await engine.resolve(version, routes):
        return ()
    return [topic for topic, numbers in routes.items() if not numbers]
