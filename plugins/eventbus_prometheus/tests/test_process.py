"""What a worker counts of its own doing is exact, starts at zero, and is read while it goes on."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.plugins import DatabaseClock, Timing
from eventbus.plugins.values import OutcomeName
from eventbus.testing.plugins import PluginBench
from eventbus.testing.values import new_counted, new_event, new_queue, new_result
from eventbus.testing.workers import BenchWorker
from eventbus_prometheus import Prometheus
from eventbus_prometheus.process import OUTCOMES, Distribution, Process
from eventbus_prometheus.scrape import text
from eventbus_prometheus.tests.scraped import Samples, parsed, samples


@pytest.fixture
def bench() -> PluginBench:
    return PluginBench(Prometheus, {"database": False, "cache": 0})


def scraped(bench: PluginBench, worker: BenchWorker | None = None) -> Samples:
    [page] = bench.call("eventbus_pages", worker=worker or BenchWorker())
    return samples(parsed(page.answer({}).body).values())


def test_the_outcomes_are_those_of_the_bus() -> None:
    assert get_args(OutcomeName) == OUTCOMES


async def test_counters_of_each_queue_begin_at_zero_so_that_the_first_failure_is_an_increase(
    bench: PluginBench,
) -> None:
    worker = BenchWorker([new_queue("ledger"), new_queue("mail")])
    worker.answers = [[(1_700_000_000.0,)]]
    await bench.call("eventbus_worker_ready", worker=worker)
    found = scraped(bench, worker)
    for queue in ("ledger", "mail"):
        assert {outcome: found["eventbus_events_total", outcome, queue] for outcome in OUTCOMES} == dict.fromkeys(
            OUTCOMES, 0
        )
        assert found["eventbus_claimed_events_total", queue] == 0
        assert found["eventbus_lost_events_total", queue] == 0
        assert found["eventbus_handler_seconds_count", queue] == 0


def test_every_outcome_is_counted_by_queue(bench: PluginBench) -> None:
    bench.call("eventbus_counted", queue="ledger", counted=new_counted("done", "done", "retry", queue="ledger"))
    bench.call("eventbus_counted", queue="ledger", counted=new_counted("dead", "released", queue="ledger"))
    bench.call("eventbus_counted", queue="mail", counted=new_counted("duplicate", queue="mail"))
    found = {key[1:]: value for key, value in scraped(bench).items() if key[0] == "eventbus_events_total"}
    assert found == {
        ("done", "ledger"): 2,
        ("retry", "ledger"): 1,
        ("dead", "ledger"): 1,
        ("released", "ledger"): 1,
        ("duplicate", "mail"): 1,
    }


def test_what_is_claimed_relayed_lost_and_taken_over_is_counted(bench: PluginBench) -> None:
    bench.call("eventbus_claimed", queue="ledger", count=5)
    bench.call("eventbus_claimed", queue="ledger", count=2)
    bench.call("eventbus_relayed", deliveries={"ledger": 3, "others": 4})
    bench.call("eventbus_relayed", deliveries={"others": 1})
    bench.call("eventbus_lease_lost", queue="ledger", deliveries=6)
    bench.call("eventbus_took_over", workers=2, deliveries=9)
    found = scraped(bench)
    assert found["eventbus_claimed_events_total", "ledger"] == 7
    assert found["eventbus_relayed_events_total", "ledger"] == 3
    assert found["eventbus_relayed_events_total", "others"] == 5
    assert found["eventbus_lost_events_total", "ledger"] == 6
    assert found["eventbus_taken_over_workers_total",] == 2
    assert found["eventbus_taken_over_events_total",] == 9


def test_an_outage_is_seen_while_it_lasts_and_counted_in_the_end(bench: PluginBench) -> None:
    assert scraped(bench)["eventbus_database_away",] == 0
    bench.call("eventbus_outage_began", reason="no server")
    first = scraped(bench)
    second = scraped(bench)
    assert first["eventbus_database_away",] == first["eventbus_database_outages_total",] == 1
    assert 0 < first["eventbus_database_away_seconds_total",] < second["eventbus_database_away_seconds_total",]
    bench.call("eventbus_outage_ended", seconds=12.5)
    last = scraped(bench)
    assert last["eventbus_database_away",] == 0
    assert last["eventbus_database_outages_total",] == 1
    assert last["eventbus_database_away_seconds_total",] == 12.5


def test_the_use_of_each_pool_is_that_of_the_moment(bench: PluginBench) -> None:
    worker = BenchWorker()
    worker.pools = {"ledger": (3, 10), "mail": (0, 2)}
    found = scraped(bench, worker)
    assert (found["eventbus_handlers_running", "ledger"], found["eventbus_handlers_limit", "ledger"]) == (3, 10)
    assert (found["eventbus_handlers_running", "mail"], found["eventbus_handlers_limit", "mail"]) == (0, 2)


async def test_handler_and_waiting_times_are_by_the_clock_of_the_database(bench: PluginBench) -> None:
    worker = BenchWorker([new_queue("ledger")])
    there = datetime(2026, 1, 1, tzinfo=UTC)
    worker.answers = [[(there.timestamp(),)]]
    here = time.monotonic()
    await bench.call("eventbus_worker_ready", worker=worker)
    event = new_event(queue="ledger")
    object.__setattr__(event, "published_at", there - timedelta(seconds=20))
    result = new_result(event=event, queue="ledger", started_at=here, seconds=0.07)
    bench.call("eventbus_counted", queue="ledger", counted=new_counted(result, queue="ledger"))
    found = scraped(bench)
    assert found["eventbus_handler_seconds_sum", "ledger"] == 0.07
    assert [found["eventbus_handler_seconds_bucket", bound, "ledger"] for bound in ("0.05", "0.1", "+Inf")] == [0, 1, 1]
    assert found["eventbus_waiting_seconds_sum", "ledger"] == pytest.approx(20, abs=0.5)
    assert [found["eventbus_waiting_seconds_bucket", bound, "ledger"] for bound in ("10.0", "30.0")] == [0, 1]
    assert list(worker.repeated) == ["prometheus clock"]


def test_without_the_clock_of_the_database_nothing_is_said_about_waiting(bench: PluginBench) -> None:
    bench.call("eventbus_counted", queue="ledger", counted=new_counted("done", queue="ledger"))
    found = scraped(bench)
    assert found["eventbus_handler_seconds_count", "ledger"] == 1
    assert found["eventbus_waiting_seconds_count", "ledger"] == 0


async def test_a_retry_counts_for_the_handler_and_not_as_waiting(bench: PluginBench) -> None:
    worker = BenchWorker([new_queue("ledger")])
    worker.answers = [[(1_700_000_000.0,)]]
    await bench.call("eventbus_worker_ready", worker=worker)
    retry: Any = SimpleNamespace(counts={"done": 1}, timings=[Timing(None, time.monotonic(), 0.2)])
    bench.call("eventbus_counted", queue="ledger", counted=retry)
    found = scraped(bench)
    assert found["eventbus_handler_seconds_count", "ledger"] == 1
    assert found["eventbus_waiting_seconds_count", "ledger"] == 0


async def test_of_all_looks_at_the_clock_the_quickest_counts_and_old_ones_are_forgotten() -> None:
    now = [0.0]
    clocks = DatabaseClock(lambda: now[0], 10)
    before = clocks.ahead

    async def look(takes: float, answer: float) -> None:
        async def ask() -> float:
            now[0] += takes
            return answer

        await clocks.measure(ask)

    await look(takes=2.0, answer=1_001.0)
    assert (before, clocks.ahead) == (None, 1_000.0)
    await look(takes=0.0, answer=1_007.0)
    assert clocks.ahead == 1_005.0
    for _ in range(9):
        await look(takes=1.0, answer=now[0] + 0.5 + 3_000)
    assert clocks.ahead == 1_005.0
    await look(takes=1.0, answer=now[0] + 0.5 + 3_000)
    assert clocks.ahead == 3_000.0


times = st.floats(min_value=0, max_value=1_000) | st.sampled_from([0.1, 1.0, 10.0])


@given(st.lists(st.lists(times)))
def test_a_histogram_has_each_value_in_the_bucket_where_it_belongs(groups: list[list[float]]) -> None:
    bounds = (0.1, 1.0, 10.0)
    distribution = Distribution(bounds)
    for group in groups:
        distribution.add(group)
    values = [value for group in groups for value in group]
    each = [sum(bisect_left(bounds, value) <= n for value in values) for n in range(4)]
    assert distribution.buckets == list(zip(("0.1", "1.0", "10.0", "+Inf"), each, strict=True))
    assert distribution.sum == pytest.approx(sum(values))


def test_names_of_queues_are_escaped_as_prometheus_wants_it() -> None:
    process = Process((1.0,), (1.0,))
    odd = 'a"b\\c\nd{}'
    process.claimed(odd, 1)
    assert samples(parsed(text(process.families({}))).values())["eventbus_claimed_events_total", odd] == 1


def test_a_scrape_in_the_middle_of_the_work_is_consistent() -> None:
    process = Process((1.0,), (1.0,))
    one: Any = new_counted("done")
    stop = threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            process.counted(f"queue {number % 20}", one, 0.0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(50):
            found = samples(process.families({}))
            counted = {key[2]: value for key, value in found.items() if key[0] == "eventbus_events_total"}
            timed = {key[1]: value for key, value in found.items() if key[0] == "eventbus_handler_seconds_count"}
            assert counted == timed
    finally:
        stop.set()
        thread.join(10)


def test_a_scrape_that_is_being_written_out_does_not_hold_up_the_event_loop_and_does_not_change() -> None:
    process = Process((1.0,), (1.0,))
    process.know(["ledger"])
    one: Any = new_counted("done", queue="ledger")
    families = process.families({})
    next(families)

    def work() -> None:
        process.counted("ledger", one, 0.0)
        process.claimed("ledger", 1)
        process.lost("ledger", 1)
        process.relayed({"ledger": 1})

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    written = samples(families)
    assert written["eventbus_handler_seconds_bucket", "1.0", "ledger"] == 0
    assert {value for key, value in written.items() if "ledger" in key} == {0}
    assert samples(process.families({}))["eventbus_handler_seconds_bucket", "1.0", "ledger"] == 1
