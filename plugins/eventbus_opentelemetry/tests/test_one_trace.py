"""One trace, from an HTTP request through publish, relay and two consumers to what one of them publishes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psycopg
import pytest
from opentelemetry import propagate
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from eventbus import Event, Retry, RetryPolicy
from eventbus.bus import EventBus
from eventbus.postgres.admin import resume
from eventbus.settings import load
from eventbus_opentelemetry.tests.recording import REMOTE, SPAN, Recording, id_of

pytestmark = pytest.mark.parametrize("major", [18], indirect=True)


@pytest.fixture
def recording() -> Recording:
    return Recording()


@pytest.fixture
def bus(dsn: str, conn: psycopg.Connection, recording: Recording) -> EventBus:
    resume(conn, "eventbus")
    names = ["receipts", "ledger", "batches", "tasks", "threads"]
    declared = [
        *({"name": name, "patterns": ["orders.created"]} for name in names),
        {"name": "postings", "patterns": ["orders.created"], "tracking": "transactional"},
        {"name": "reports", "patterns": ["postings.*"]},
    ]
    conn.execute("SELECT eventbus.declare_queues(%s)", [json.dumps(declared)])
    return EventBus(load({"dsn": dsn, "lease": 5}, environment={}), plugins=[recording.plugin])


@contextmanager
def shop(bus: EventBus, recording: Recording) -> Iterator[str]:
    """A web server that publishes an event for each POST; its address."""

    class Orders(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            context = propagate.extract({name.lower(): value for name, value in self.headers.items()})
            with recording.tracer.start_as_current_span("POST /orders", context, SpanKind.SERVER):
                with psycopg.connect(bus.settings.dsn or "") as connection:
                    bus.outbox.publish_event("orders.created", {"number": 7}, conn=connection)
                self.send_response(201)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Orders) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/orders"
        server.shutdown()
        thread.join()


async def start(bus: EventBus, *queues: tuple[str, ...]) -> None:
    """Run a worker for each group of queues, all at the same time, until each has nothing left."""
    async with asyncio.TaskGroup() as group:
        for each in queues:
            group.create_task(bus.worker(queues=each, until_idle=True).run())


def trace_of(span: ReadableSpan) -> int | None:
    return None if span.context is None else span.context.trace_id


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def attribute(span: ReadableSpan, name: str) -> Any:
    return (span.attributes or {})[name]


async def test_one_request_is_one_trace_down_to_the_consumers_of_what_a_consumer_publishes(
    bus: EventBus, recording: Recording
) -> None:
    @bus.subscribe("orders.created", name="receipts")
    async def send(event: Event) -> None:
        await asyncio.sleep(0)

    @bus.subscribe("orders.created", name="postings", transactional=True)
    def post(event: Event, conn: psycopg.Connection) -> None:
        bus.outbox.publish_event("postings.made", event.payload, conn=conn)

    @bus.subscribe("postings.*", name="reports")
    def report(event: Event) -> None:
        assert event.payload == {"number": 7}

    with shop(bus, recording) as address, recording.tracer.start_as_current_span("browser", kind=SpanKind.CLIENT):
        request = urllib.request.Request(address, method="POST")
        propagate.inject(request.headers)
        assert (await asyncio.to_thread(urllib.request.urlopen, request)).status == 201
    await start(bus, ("receipts",), ("postings",))
    await start(bus, ("reports",))
    names = ["browser", "POST /orders", "publish orders.created", "process postings", "publish postings.made"]
    browser, server, publish, posting, follow_up = map(recording.span, names)
    receipts, reports = recording.span("process receipts"), recording.span("process reports")
    assert len(recording.spans) == 7
    assert {span.context.trace_id for span in recording.spans if span.context} == {trace_of(browser)}
    assert [parent_of(span) for span in (server, publish, posting, receipts, follow_up, reports)] == [
        id_of(browser), id_of(server), id_of(publish), id_of(publish), id_of(posting), id_of(follow_up)
    ]  # fmt: skip
    assert [span.kind for span in (publish, follow_up)] == [SpanKind.PRODUCER] * 2
    assert [span.kind for span in (posting, receipts, reports)] == [SpanKind.CONSUMER] * 3
    conversations = {
        attribute(span, "messaging.message.conversation_id") for span in (posting, receipts, follow_up, reports)
    }
    assert conversations == {attribute(publish, "messaging.message.id")}
    assert attribute(reports, "messaging.message.id") == attribute(follow_up, "messaging.message.id")
    assert all(span.status.status_code is StatusCode.UNSET for span in recording.spans)


async def test_a_publish_that_is_rolled_back_has_a_span_and_nothing_follows(
    bus: EventBus, recording: Recording, dsn: str
) -> None:
    @bus.subscribe("orders.created", name="receipts")
    async def send(event: Event) -> None:
        raise AssertionError("nothing was published")

    with psycopg.connect(dsn) as connection:
        bus.outbox.publish_event("orders.created", 1, conn=connection)
        connection.rollback()
    await start(bus, ("receipts",))
    assert [span.name for span in recording.spans] == ["publish orders.created"]


async def test_each_attempt_has_a_span_below_the_publish_until_it_succeeds(
    bus: EventBus, recording: Recording, dsn: str
) -> None:
    outcomes: list[Any] = [KeyError("account"), Retry(after=0.01, reason="not yet"), None]

    @bus.subscribe("orders.created", name="ledger", retry=RetryPolicy(first=0.01, jitter=False))
    async def _(event: Event) -> Any:
        outcome = outcomes[event.attempt - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with psycopg.connect(dsn) as connection:
        bus.outbox.publish_event("orders.created", 1, conn=connection)
    await start(bus, ("ledger",))
    publish, *attempts = recording.spans
    assert [parent_of(span) for span in attempts] == [id_of(publish)] * 3
    assert [attribute(span, "eventbus.attempt") for span in attempts] == [1, 2, 3]
    assert [attribute(span, "eventbus.outcome") for span in attempts] == ["failed", "retry", "done"]
    assert [attribute(span, "error.type") for span in attempts[:2]] == ["KeyError", "retry"]
    counted = {about["eventbus.outcome"]: n for about, n in recording.counted("eventbus.settled.deliveries")}
    assert counted == {"retry": 2, "done": 1}
    [consumed] = [count for _about, count in recording.counted("messaging.client.consumed.messages")]
    assert consumed == 3


async def test_a_batch_is_a_trace_of_its_own_that_links_to_every_publish(
    bus: EventBus, recording: Recording, dsn: str
) -> None:
    @bus.subscribe("orders.created", name="batches", batch=10, batch_wait=0.2)
    async def _(events: list[Event]) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await bus.outbox.apublish_event("postings.made", len(events), conn=connection)

    for number in range(3):
        with psycopg.connect(dsn) as connection:
            bus.outbox.publish_event("orders.created", number, conn=connection)
    await start(bus, ("batches",))
    process, follow_up = recording.span("process batches"), recording.span("publish postings.made")
    publishes = [span for span in recording.spans if span.name == "publish orders.created"]
    assert len(publishes) == 3
    assert [link.context.span_id for link in process.links] == list(map(id_of, publishes))
    assert parent_of(process) is None
    assert parent_of(follow_up) == id_of(process)


async def test_nothing_of_one_event_is_current_in_the_handler_of_the_next(
    bus: EventBus, recording: Recording, dsn: str
) -> None:
    found: list[tuple[str, bool]] = []

    def look(event: Event) -> None:
        span = get_current_span()
        name = getattr(span, "name", "none")
        own = (getattr(span, "attributes", None) or {}).get("messaging.message.id") == event.event_id_text
        found.append((name, own))
        if event.payload % 2:
            raise ZeroDivisionError

    once = RetryPolicy(max_attempts=1)

    @bus.subscribe("orders.created", name="tasks", concurrency=1, retry=once)
    async def task(event: Event) -> None:
        look(event)

    bus.subscribe("orders.created", name="threads", concurrency=1, retry=once)(look)

    with recording.tracer.start_as_current_span("worker"):  # whatever is current where the worker is started
        with psycopg.connect(dsn) as connection:
            for number in range(10):
                bus.outbox.publish_event("orders.created", number, conn=connection)
        await start(bus, ("tasks", "threads"))
    assert sorted(found) == [("process tasks", True)] * 10 + [("process threads", True)] * 10


PROGRAM = """
import sys
import psycopg
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from eventbus import Event, outbox, subscribe

lines = ConsoleSpanExporter(out=open("spans", "a"), formatter=lambda span: span.to_json(indent=None) + "\\n")
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(lines))
trace.set_tracer_provider(provider)

@subscribe("orders.created", name="postings", transactional=True)
def post(event: Event, conn: psycopg.Connection) -> None:
    outbox.publish_event("postings.made", event.payload, conn=conn)
"""


def test_a_worker_of_the_command_line_records_with_the_sdk_that_its_program_sets_and_loses_no_span_at_its_end(
    bus: EventBus, dsn: str, conn: psycopg.Connection, tmp_path: Path
) -> None:
    bus.outbox.publish_event("orders.created", 1, headers={"traceparent": REMOTE}, conn=conn, autocommit=True)
    (tmp_path / "shop.py").write_text(PROGRAM)
    environment = os.environ | {"EVENTBUS_DSN": dsn, "EVENTBUS_PLUGINS": "opentelemetry"}
    command = [sys.executable, "-m", "eventbus", "consume", "shop", "--until-idle"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)
    follow_up, process = map(json.loads, (tmp_path / "spans").read_text().splitlines())
    assert (process["name"], process["parent_id"]) == ("process postings", f"0x{SPAN:016x}")
    assert (follow_up["name"], follow_up["parent_id"]) == ("publish postings.made", process["context"]["span_id"])
    [(headers,)] = conn.execute("SELECT headers FROM eventbus.outbox WHERE topic = 'postings.made'").fetchall()
    assert f"0x{headers['traceparent'].split('-')[2]}" == follow_up["context"]["span_id"]
