"""A plugin on the bench can be run in a real worker, with its tables, and its author sees what came of each event."""

from __future__ import annotations

import psycopg
import pytest

from eventbus.event import Event, OutboxEvent
from eventbus.plugins import hookimpl
from eventbus.retry import RetryPolicy
from eventbus.testing.plugins import PluginBench
from examples.audit_plugin import Audit

pytestmark = [pytest.mark.usefixtures("major"), pytest.mark.parametrize("major", [18], indirect=True)]
ONCE_MORE = RetryPolicy(max_attempts=2, first=0.01, jitter=False)


def book(event: Event) -> None:
    """A handler that knows one order."""
    if event.payload["order"] != 17:
        raise ValueError("no such order")


@pytest.mark.parametrize("source", ["empty_dsn", "dsn"])
def test_the_example_keeps_what_was_given_up_in_its_table(source: str, request: pytest.FixtureRequest) -> None:
    dsn = request.getfixturevalue(source)
    events = [OutboxEvent("orders.created", {"order": number}) for number in (17, 18)]
    results = PluginBench(Audit).run(dsn, book, *events, retry=ONCE_MORE)
    assert sorted((result.outcome, result.attempt) for result in results) == [("dead", 2), ("done", 1), ("retry", 1)]
    [dead] = [result for result in results if result.outcome == "dead"]
    assert dead.event is not None
    with psycopg.connect(dsn) as connection:
        kept = connection.execute("SELECT queue, topic, event_id::text FROM eventbus.audit_letters").fetchall()
    assert kept == [("bench", "orders.created", dead.event.event_id_text)]


def test_settings_of_the_bench_hold_in_the_worker(empty_dsn: str) -> None:
    PluginBench(Audit, {"except_queues": ["bench"]}).run(
        empty_dsn, book, OutboxEvent("orders.created", {"order": 18}), retry=ONCE_MORE
    )
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT count(*) FROM eventbus.audit_letters").fetchall() == [(0,)]


class Broken:
    """Fails whenever an event is claimed."""

    @hookimpl
    def eventbus_claimed(self, queue: str) -> None:
        raise RuntimeError("no claim")


def test_in_a_worker_what_a_hook_raises_is_logged_and_the_event_is_handled(
    empty_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    results = PluginBench(Broken()).run(empty_dsn, book, OutboxEvent("orders.created", {"order": 17}))
    assert [result.outcome for result in results] == ["done"]
    assert "plugin broken: eventbus_claimed failed and is left out: RuntimeError: no claim" in caplog.text
