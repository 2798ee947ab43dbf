"""The plugins that the documentation shows do what it says."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest

from eventbus import OutboxEvent
from eventbus.errors import ConfigurationError, Unavailable
from eventbus.testing.plugins import PluginBench
from eventbus.testing.values import new_call, new_event, new_failure, new_result, new_settled
from eventbus.testing.workers import BenchWorker
from examples.audit_plugin import Audit
from examples.error_reporting_plugin import ErrorReporting


class Reporter:
    """Takes what would go to an error tracker."""

    def __init__(self) -> None:
        self.captured: list[tuple[BaseException, dict[str, Any]]] = []

    def capture_exception(self, error: BaseException, *, tags: dict[str, Any]) -> None:
        self.captured.append((error, tags))


@pytest.fixture
def sentry(monkeypatch: pytest.MonkeyPatch) -> Reporter:
    """A module ``sentry_sdk`` that keeps what it is told."""
    reporter = Reporter()
    module = types.ModuleType("sentry_sdk")
    module.capture_exception = reporter.capture_exception  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentry_sdk", module)
    return reporter


def test_a_failure_is_reported_with_where_it_happened_and_changes_nothing(sentry: Reporter) -> None:
    error, event = ValueError("no such order"), new_event("orders.created", queue="ledger", attempt=3)
    answer = PluginBench(ErrorReporting).call(
        "eventbus_handler_failed", queue="ledger", failure=new_failure(error, event=event, queue="ledger")
    )
    assert answer is None
    tags = {"queue": "ledger", "topic": "orders.created", "event_id": event.event_id_text, "attempt": 3}
    assert sentry.captured == [(error, tags)]


def test_a_handler_that_asked_for_a_retry_is_no_error_to_report(sentry: Reporter) -> None:
    PluginBench(ErrorReporting).call("eventbus_handler_failed", queue="ledger", failure=new_failure(None))
    assert sentry.captured == []


def test_without_a_tracker_the_worker_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    with pytest.raises(ConfigurationError, match=r"plugin error_reporting: capture: .*sentry_sdk"):
        PluginBench(ErrorReporting)


def test_an_event_gets_the_tenant_that_it_does_not_have() -> None:
    bench, own = PluginBench(Audit, {"tenant": "acme"}), {"tenant": "other"}
    headers: dict[str, str] = {}
    bench.call("eventbus_amend_headers", headers=headers)
    bench.call("eventbus_amend_headers", headers=own)
    assert (headers, own) == ({"tenant": "acme"}, {"tenant": "other"})


def test_a_refused_topic_is_refused_and_no_other() -> None:
    bench = PluginBench(Audit, {"refuse": "orders.legacy.*"})
    reason = bench.call("eventbus_veto_publish", event=OutboxEvent("orders.legacy.created"))
    assert reason == "orders.legacy.* is closed"
    assert bench.call("eventbus_veto_publish", event=OutboxEvent("orders.created")) is None
    assert PluginBench(Audit).call("eventbus_veto_publish", event=OutboxEvent("orders.created")) is None


def test_slow_handlers_are_logged_also_when_they_fail(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="no"), PluginBench(Audit, {"slow": 1e-9}).around(new_call()):
        raise ValueError("no")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    caplog.clear()
    with PluginBench(Audit).around(new_call()):
        pass
    assert not caplog.records


async def test_what_was_given_up_is_written_once_and_kept_while_the_database_is_away() -> None:
    bench, worker = PluginBench(Audit), BenchWorker()
    bench.call("eventbus_worker_ready", worker=worker)
    write = worker.repeated["audit"]
    await write()
    assert worker.statements == []
    dead = new_result("dead", reason="gave up", error={"type": "ValueError", "message": "no such order"})
    bench.call("eventbus_settled", queue="ledger", settled=new_settled("done", "retry", dead, queue="ledger"))
    worker.answers = [Unavailable("away")]
    await write()
    await write()
    await write()
    assert dead.event is not None
    row = [["ledger"], ["bench.happened"], [dead.event.event_id_text], ["gave up: no such order"]]
    assert [parameters for _, parameters in worker.statements] == [row, row]


async def test_a_stop_writes_the_rest() -> None:
    bench, worker = PluginBench(Audit), BenchWorker()
    bench.call("eventbus_settled", queue="ledger", settled=new_settled("dead"))
    await bench.call("eventbus_worker_stopped", worker=worker, code=0)
    assert len(worker.statements) == 1


def test_memory_stays_bounded_while_nothing_can_be_written() -> None:
    bench = PluginBench(Audit)
    for _ in range(11):
        bench.call("eventbus_settled", queue="ledger", settled=new_settled(*[new_result("dead")] * 1_000))
    assert len(bench.instance._unwritten) == 10_000
