"""Programs without a worker have the database's metrics too: as text, as a WSGI application, as a command."""

from __future__ import annotations

import subprocess
import sys
import wsgiref.validate
from collections.abc import Callable
from typing import Any
from wsgiref.util import setup_testing_defaults

import psycopg
import pytest

from eventbus.errors import ConfigurationError
from eventbus.settings import Settings
from eventbus.testing.plugins import PluginBench
from eventbus.testing.values import new_counted
from eventbus.testing.workers import BenchWorker
from eventbus_prometheus import Prometheus, make_wsgi_app, render
from eventbus_prometheus.scrape import Scraping
from eventbus_prometheus.tests.scraped import Samples, parsed, samples, settings

one_version = pytest.mark.parametrize("major", [18], indirect=True)


def found_in(body: bytes) -> Samples:
    return samples(parsed(body).values())


@one_version
def test_a_program_gets_the_metrics_as_text(dsn: str) -> None:
    found = found_in(render(settings(dsn)))
    assert found["eventbus_section_up", "queues"] == 1
    assert found["eventbus_outbox_backlog_events",] == 0
    assert any(key[0] == "eventbus_build_info" for key in found)
    assert "eventbus_events_total" not in {key[0] for key in found}


def test_without_the_database_the_text_says_so_and_nothing_is_raised() -> None:
    found = found_in(render(settings("host=/nowhere dbname=x")))
    assert found["eventbus_section_up", "queues"] == 0
    assert ("eventbus_section_seconds", "queues") not in found


@pytest.mark.parametrize("function", [render, make_wsgi_app])
def test_without_a_dsn_it_is_said_what_to_set(function: Callable[[Settings], Any]) -> None:
    with pytest.raises(ConfigurationError, match="set EVENTBUS_DSN"):
        function(Settings())


def test_the_settings_of_the_plugin_count_here_too(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"prometheus": {"statement_timeout": 0.05, "queues": ["a"]}}
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE eventbus.scheduled IN ACCESS EXCLUSIVE MODE")
        found = found_in(render(settings(dsn).model_copy(update={"plugin_settings": own})))
    assert found["eventbus_section_up", "scheduled"] == 0
    assert found["eventbus_section_up", "queues"] == 1


def ask(application: Any, method: str = "GET") -> tuple[str, dict[str, str], bytes]:
    environ: dict[str, Any] = {"REQUEST_METHOD": method, "QUERY_STRING": ""}
    setup_testing_defaults(environ)
    answered: list[tuple[str, dict[str, str]]] = []

    def start_response(status: str, headers: list[tuple[str, str]], _problem: object = None) -> Callable[[bytes], None]:
        answered.append((status, dict(headers)))
        return lambda _: None

    parts = wsgiref.validate.validator(application)(environ, start_response)
    body = b"".join(parts)
    parts.close()  # type: ignore[attr-defined]
    return *answered[0], body


@one_version
def test_the_application_can_be_mounted(dsn: str) -> None:
    application = make_wsgi_app(settings(dsn))
    status, headers, body = ask(application)
    assert (status, headers["Content-Type"]) == ("200 OK", "text/plain; version=0.0.4; charset=utf-8")
    assert found_in(body)["eventbus_section_up", "queues"] == 1
    status, headers, nothing = ask(application, "HEAD")
    assert (status, headers["Content-Length"], nothing) == ("200 OK", str(len(body)), b"")
    assert ask(application, "POST")[0] == "405 Method Not Allowed"


@one_version
def test_several_scrapers_in_one_second_ask_the_database_once(dsn: str, conn: psycopg.Connection) -> None:
    patient = {"plugin_settings": {"prometheus": {"cache": 60}}}
    application = make_wsgi_app(settings(dsn).model_copy(update=patient))
    first = ask(application)[2]
    conn.execute("SELECT eventbus.publish('orders.created', '1', NULL)")
    assert ask(application)[2] == first


def test_an_answer_is_given_again_until_it_is_too_old() -> None:
    now = [0.0]
    times = iter(range(10))

    def part() -> Any:
        now[0] += 3.0  # that long a scrape may take, without being old when it is there
        next(times)
        return []

    scraping = Scraping([part], cache=1.0, clock=lambda: now[0])
    scraping.text()
    now[0] += 0.9
    scraping.text()
    assert next(times) == 1
    now[0] += 0.1
    scraping.text()
    assert next(times) == 3


def test_the_page_has_the_path_of_the_setting_and_leaves_the_database_out_if_told_so(dsn: str) -> None:
    worker = BenchWorker(settings=settings(dsn))
    [page] = PluginBench(Prometheus, {"path": "/bus/metrics"}).call("eventbus_pages", worker=worker)
    answer = page.answer({})
    assert (page.path, page.title) == ("/bus/metrics", "metrics for Prometheus")
    assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
    found = found_in(answer.body)
    assert found["eventbus_section_up", "queues"] == 1
    assert found["process_resident_memory_bytes",] > 1_000_000
    [page] = PluginBench(Prometheus, {"database": False}).call("eventbus_pages", worker=worker)
    assert "eventbus_section_up" not in {key[0] for key in found_in(page.answer({}).body)}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"path": "metrics"}, "path"),
        ({"cache": -1}, "cache"),
        ({"timeout": 0}, "timeout"),
        ({"statement_timeout": 0}, "statement_timeout"),
        ({"handler_buckets": "1,1"}, "each greater than the one before"),
        ({"waiting_buckets": "0,1"}, "above 0"),
        ({"handler_buckets": ""}, "handler_buckets"),
        ({"handler_bucket": "1"}, "did you mean handler_buckets"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        PluginBench(Prometheus, given)


def test_buckets_can_be_set_in_an_environment_variable() -> None:
    bench = PluginBench(Prometheus, {"handler_buckets": "0.5, 2", "waiting_buckets": "7", "database": "false"})
    bench.call("eventbus_counted", queue="ledger", counted=new_counted("done", queue="ledger"))
    [page] = bench.call("eventbus_pages", worker=BenchWorker())
    found = found_in(page.answer({}).body)
    bounds = {name: {key[1] for key in found if key[0] == f"eventbus_{name}_seconds_bucket"}
              for name in ("handler", "waiting")}  # fmt: skip
    assert bounds == {"handler": {"0.5", "2.0", "+Inf"}, "waiting": {"7.0", "+Inf"}}


def test_without_its_package_the_plugin_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from eventbus.plugins.loading import load\n"
        "from eventbus.settings import Settings\n"
        "print(*load(Settings(plugins=('prometheus',)))[1])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("plugin prometheus (entry point eventbus_prometheus:Prometheus of eventbus)")
    assert said.endswith('prometheus-client is not installed: pip install "eventbus[prometheus]"\n')
