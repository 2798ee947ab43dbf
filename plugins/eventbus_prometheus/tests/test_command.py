"""``eventbus metrics`` prints what a scrape has of the database, and says by its exit code whether it has all."""

from __future__ import annotations

import json

import psycopg
import pytest

from eventbus.cli.failures import run
from eventbus.cli.options import Commands, new_app
from eventbus.testing.plugins import PluginBench
from eventbus_prometheus import Prometheus
from eventbus_prometheus.tests.scraped import parsed, samples

pytestmark = pytest.mark.parametrize("major", [18], indirect=True)


def metrics(*arguments: str, **options: object) -> int:
    app = new_app()
    PluginBench(Prometheus, options).call("eventbus_commands", commands=Commands(app))
    return run(app, ["metrics", *arguments])


def test_it_prints_what_prometheus_can_read(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert metrics("--dsn", dsn) == 0
    said = capsys.readouterr()
    found = samples(parsed(said.out.encode()).values())
    assert found["eventbus_section_up", "queues"] == 1
    assert found["eventbus_outbox_backlog_events",] == 0
    assert said.out.endswith("\n")
    assert not said.out.endswith("\n\n")
    assert said.err == ""


def test_it_prints_values_for_programs(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert metrics("--dsn", dsn, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert {"name": "eventbus_section_up", "labels": {"section": "outbox"}, "value": 1.0} in said


def test_a_section_that_is_missing_is_named_and_is_exit_code_one(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE eventbus.scheduled IN ACCESS EXCLUSIVE MODE")
        assert metrics("--dsn", dsn, statement_timeout=0.1) == 1
    said = capsys.readouterr()
    assert samples(parsed(said.out.encode()).values())["eventbus_section_up", "scheduled"] == 0
    assert "eventbus: no scheduled: " in said.err
    assert "lock timeout" in said.err or "statement timeout" in said.err


def test_without_a_schema_it_says_what_to_run(empty_dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert metrics("--dsn", empty_dsn) == 1
    said = capsys.readouterr()
    assert "eventbus migrate" in said.err
    assert said.out == ""
