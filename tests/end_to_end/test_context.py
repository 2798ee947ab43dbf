"""Whatever a handler is and however it publishes, what it publishes belongs to the event that it handles."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from eventbus import Event
from eventbus.bus import EventBus
from eventbus.postgres.admin import resume
from eventbus.settings import load

pytestmark = pytest.mark.parametrize("major", [18], indirect=True)


@pytest.fixture
def bus(dsn: str, conn: psycopg.Connection) -> EventBus:
    bus = EventBus(load({"dsn": dsn, "lease": 5}, environment={}))
    conn.execute('SELECT eventbus.declare_queues(\'[{"name": "plain", "patterns": ["#"]}]\')')
    resume(conn, "eventbus")
    return bus


def subscribe_handlers_of_every_kind(bus: EventBus, dsn: str) -> None:
    """Each publishes on a connection of its own what it was asked for, under its own topic."""

    def publish(topic: str) -> None:
        with psycopg.connect(dsn) as connection:
            bus.outbox.publish_event(topic, None, conn=connection)

    async def apublish(topic: str) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await asyncio.sleep(0)
            await bus.outbox.apublish_event(topic, None, conn=connection)

    @bus.subscribe("start", name="async")
    async def _(event: Event) -> None:
        await apublish("follow.async")

    @bus.subscribe("start", name="task")
    async def _(event: Event) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(apublish("follow.task"))

    @bus.subscribe("start", name="to-thread")
    async def _(event: Event) -> None:
        await asyncio.to_thread(publish, "follow.to-thread")

    @bus.subscribe("start", name="plain-handler")
    def _(event: Event) -> None:
        publish("follow.plain")


async def test_events_of_every_kind_of_handler_carry_the_trace_and_name_their_cause(
    bus: EventBus, dsn: str, conn: psycopg.Connection
) -> None:
    subscribe_handlers_of_every_kind(bus, dsn)
    for queue in ("async", "task", "to-thread", "plain-handler"):
        conn.execute(
            "SELECT eventbus.declare_queues(json_build_array(json_build_object("
            "'name', %s::text, 'patterns', json_build_array('start'))))",
            [queue],
        )
    headers = [{"traceparent": f"00-{n:032x}-{n:016x}-01", "tenant": f"t{n}", "content-type": "x"} for n in range(1, 9)]
    ids = [
        str(bus.outbox.publish_event("start", n, headers=h, conn=conn, autocommit=True)) for n, h in enumerate(headers)
    ]
    await bus.worker(until_idle=True).run()
    expected = {
        (topic, one): {
            "traceparent": header["traceparent"],
            "tenant": header["tenant"],
            "correlation-id": one,
            "causation-id": one,
        }
        for topic in ("follow.async", "follow.task", "follow.to-thread", "follow.plain")
        for one, header in zip(ids, headers, strict=True)
    }
    found = conn.execute("SELECT topic, headers FROM eventbus.outbox WHERE topic LIKE 'follow.%'").fetchall()
    assert len(found) == len(expected)
    assert {(topic, header["causation-id"]): header for topic, header in found} == expected
