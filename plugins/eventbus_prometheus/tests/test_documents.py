"""README, dashboard and alert rules speak of what a scrape really has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from prometheus_client.metrics_core import Metric

from eventbus.testing.plugins import PluginBench
from eventbus.testing.values import new_counted, new_queue
from eventbus.testing.workers import BenchWorker
from eventbus_prometheus import Prometheus
from eventbus_prometheus.options import Settings
from eventbus_prometheus.tests.promql import BY_PROMETHEUS, Use, uses
from eventbus_prometheus.tests.scraped import parsed, settings
from tests.postgres.line import Line

FOLDER = Path(__file__).parents[1]
README = (FOLDER / "README.md").read_text(encoding="utf-8")
ALERTS: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [rule["expr"] for rule in RULES] + [target["expr"] for panel in PANELS for target in panel["targets"]]

one_version = pytest.mark.parametrize("major", [18], indirect=True)


@pytest.fixture
async def scrape(dsn: str, conn: psycopg.Connection) -> dict[str, Metric]:
    """A scrape of a bus in which there is some of everything."""
    Line(conn).declare(ledger=["orders.#"])
    conn.execute("SELECT eventbus.circuit_breaker_open('ledger', NULL, 'failed', NULL, 30, 2, 600, 60)")
    bench = PluginBench(Prometheus)
    worker = BenchWorker([new_queue("ledger")], settings(dsn))
    worker.pools = {"ledger": (1, 10)}
    worker.answers = [[(1_700_000_000.0,)]]
    await bench.call("eventbus_worker_ready", worker=worker)
    bench.call("eventbus_counted", queue="ledger", counted=new_counted("done", queue="ledger"))
    bench.call("eventbus_relayed", deliveries={"ledger": 1})
    [page] = bench.call("eventbus_pages", worker=worker)
    return parsed(page.answer({}).body)


def labels_of(family: Metric) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} - {"le"}


def exposed(family: Metric) -> set[str]:
    """The names under which Prometheus has a metric."""
    return {sample.name for sample in family.samples}


def named(family: Metric) -> str:
    """Its name in the README: that of its samples, but of a histogram without endings."""
    return family.name if family.type == "histogram" else next(iter(exposed(family)))


def rows_between(mark: str) -> Iterator[list[str]]:
    table = README.split(f"<!-- {mark}:begin -->")[1].split(f"<!-- {mark}:end -->")[0]
    for line in table.strip().splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


@one_version
def test_the_readme_has_exactly_the_metrics_of_a_scrape(scrape: dict[str, Metric]) -> None:
    written = {row[0].strip("`"): (row[1], row[2]) for row in rows_between("metrics")}
    real = {
        named(family): (family.type, ", ".join(sorted(labels_of(family))))
        for family in scrape.values()
        if family.name.startswith("eventbus_")
    }
    assert written == real
    assert all(row[3] for row in rows_between("metrics"))


@one_version
def test_only_counters_are_called_total_and_every_unit_is_one_of_prometheus(scrape: dict[str, Metric]) -> None:
    for family in scrape.values():
        assert family.documentation
        for name in exposed(family):
            assert name.endswith("_total") == (family.type == "counter"), name
            assert not re.search(r"_(ms|millis|milliseconds|minutes|kb|mb|percent)(_|$)", name), name


def test_the_readme_names_every_setting_with_its_default_and_what_it_is() -> None:
    table = dict(
        re.findall(r"^\| `(\w+)` \| (.+)$", README.split("## Settings")[1].split("## Metrics")[0], re.MULTILINE)
    )
    assert list(table) == list(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        shown = f"{field.default[0]:g} to {field.default[-1]:g}" if isinstance(field.default, tuple) else (
            f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`")  # fmt: skip
        assert table[name] == f"{shown} | {field.description} |"


@one_version
def test_every_rule_and_every_panel_asks_for_metrics_and_labels_that_exist(scrape: dict[str, Metric]) -> None:
    real = {name: labels_of(family) | {"le"} for family in scrape.values() for name in exposed(family)}
    used: list[Use] = [use for expression in EXPRESSIONS for use in uses(expression)]
    assert len(used) > 50
    for use in used:
        assert use.metric in real, f"{use.metric} is in no scrape"
        assert use.labels <= real[use.metric] | BY_PROMETHEUS, f"{use.metric} has no {use.labels - real[use.metric]}"


@one_version
def test_values_of_labels_that_rules_and_panels_ask_for_exist(scrape: dict[str, Metric]) -> None:
    real = {(label, value) for family in scrape.values() for s in family.samples for label, value in s.labels.items()}
    asked = {pair for expression in EXPRESSIONS for pair in re.findall(r'(\w+)!?="([^"$]+)"', expression)}
    assert len(asked) >= 4
    assert asked - {("source", "manual")} <= real


@one_version
def test_rates_are_asked_of_counters_and_growth_of_gauges_only(scrape: dict[str, Metric]) -> None:
    types = {name: family.type for family in scrape.values() for name in exposed(family)}
    over = [(use.function, types[use.metric]) for expression in EXPRESSIONS for use in uses(expression) if use.function]
    assert {("rate", "counter"), ("increase", "counter"), ("delta", "gauge")} <= set(over)
    assert {kind for function, kind in over if function in ("rate", "increase")} <= {"counter", "histogram"}
    assert {kind for function, kind in over if function == "delta"} == {"gauge"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_says_what_is_wrong_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Eventbus[A-Z]\w+", rule["alert"])
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "action"}
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
    by = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    kept = {label for use in uses(rule["expr"]) for label in use.kept}
    assert by <= kept, f"{by - kept} is not left over by the expression"


def test_the_rules_cover_what_operators_are_woken_up_for() -> None:
    text = " ".join(rule["expr"] for rule in RULES)
    for metric in (
        "eventbus_queue_oldest_age_seconds", "eventbus_queue_dead_letters", "eventbus_circuit_breaker_state",
        "eventbus_outbox_oldest_age_seconds", "eventbus_workers", "eventbus_oldest_transaction_age_seconds",
        "eventbus_oldest_snapshot_age_transactions", "eventbus_section_up",
    ):  # fmt: skip
        assert metric in text


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job", "queue"}
    asked = set(re.findall(r"\$\{?(\w+)", " ".join(EXPRESSIONS)))
    assert asked <= variables | {"__rate_interval"}
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


@one_version
def test_the_variables_of_the_dashboard_are_filled_from_metrics_that_exist(scrape: dict[str, Metric]) -> None:
    real = {name: labels_of(family) for family in scrape.values() for name in exposed(family)}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            [(metric, label)] = re.findall(r"label_values\((\w+)[^,]*, (\w+)\)", variable["definition"])
            assert label in real[metric] | BY_PROMETHEUS
