"""Real workers are scraped over HTTP: what they did, what is in the database, and what happens when that is away."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from eventbus import Event
from eventbus.bus import EventBus
from eventbus.errors import ConfigurationError
from eventbus.postgres import admin
from eventbus_prometheus.tests.scraped import Samples, parsed, samples, settings
from tests.end_to_end.processes import Nursery
from tests.end_to_end.scene import FAST_RETRY, Scene, one_server, played
from tests.fixtures import migrated
from tests.servers import Cluster
from tests.waiting import wait_until

LEDGER: Final[Mapping[str, Any]] = {"name": "ledger", "pattern": "orders.#", "retry": FAST_RETRY | {"max_attempts": 2}}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scraped(port: int, timeout: float = 20.0) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=timeout) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return samples(parsed(answer.read()).values())


def watched(scene: Scene, *queues: Mapping[str, Any], **own: Any) -> int:
    """Start a consumer with the plugin; its port."""
    port = free_port()
    process = scene.consume(
        *queues,
        plugins=["prometheus"],
        plugin_settings={"prometheus": {"cache": 0, **own}},
        http_port=port,
    )
    scene.wait_until_consuming(process)
    return port


def sum_over(ports: list[int], *key: str) -> float:
    return sum(scraped(port).get(key, 0) for port in ports)


@one_server
def test_what_two_workers_count_adds_up_to_what_was_published(scene: Scene) -> None:
    scene.prepare(LEDGER)
    ports = [watched(scene, LEDGER) for _ in range(2)]
    scene.publish("orders.created", *({} for _ in range(200)), {"fail": 9})
    wait_until(lambda: sum_over(ports, "eventbus_events_total", "done", "ledger") == 200)
    wait_until(lambda: sum_over(ports, "eventbus_events_total", "dead", "ledger") == 1)
    assert sum_over(ports, "eventbus_events_total", "retry", "ledger") == 1
    assert sum_over(ports, "eventbus_relayed_events_total", "ledger") == 201
    assert sum_over(ports, "eventbus_claimed_events_total", "ledger") >= 201
    assert sum_over(ports, "eventbus_handler_seconds_count", "ledger") == 202
    assert sum_over(ports, "eventbus_waiting_seconds_count", "ledger") == 201, "the retry did not wait for a handler"
    assert 0 < sum_over(ports, "eventbus_waiting_seconds_sum", "ledger") < 201 * 30
    for port in ports:
        found = scraped(port)
        assert found["eventbus_queue_dead_letters", "ledger"] == 1
        assert found["eventbus_workers", "alive"] == 2
        assert found["eventbus_handlers_limit", "ledger"] == 10
        assert found["eventbus_section_up", "queues"] == 1


@one_server
def test_a_handler_that_blocks_the_event_loop_does_not_blank_the_page(scene: Scene) -> None:
    scene.prepare(LEDGER)
    port = watched(scene, LEDGER, database=False)
    scene.publish("orders.created", {"block": 5})
    scene.wait_for("ledger", "start", 1)
    began = time.monotonic()
    assert scraped(port)["eventbus_handlers_running", "ledger"] == 1
    assert time.monotonic() - began < 2
    assert not scene.check.entries("ledger", "end")


@pytest.mark.parametrize("major", [18])
def test_without_the_database_the_process_still_tells_what_it_knows(
    owned_cluster: Cluster, tmp_path: Path, nursery: Nursery
) -> None:
    migrated(owned_cluster.dsn())
    with played(owned_cluster.dsn(), tmp_path, nursery) as scene:
        scene.prepare(LEDGER)
        port = watched(scene, LEDGER)
        scene.publish("orders.created", {})
        wait_until(lambda: scraped(port)["eventbus_events_total", "done", "ledger"] == 1)
        owned_cluster.stop("immediate")
        wait_until(lambda: scraped(port)["eventbus_database_away",] == 1)
        found = scraped(port)
        assert found["eventbus_section_up", "queues"] == 0
        assert found["eventbus_events_total", "done", "ledger"] == 1
        owned_cluster.start()
        wait_until(lambda: scraped(port)["eventbus_database_away",] == 0, timeout=30)
        found = scraped(port)
        assert found["eventbus_database_outages_total",] == 1
        assert found["eventbus_database_away_seconds_total",] > 0
        assert found["eventbus_section_up", "queues"] == 1


@one_server
def test_a_worker_that_was_frozen_for_longer_than_its_lease_tells_what_it_lost(scene: Scene) -> None:
    scene.prepare(LEDGER)
    scene.publish("orders.created", {"gate": "gate"})
    first_port = free_port()
    first = scene.consume(LEDGER, plugins=["prometheus"], http_port=first_port)
    scene.wait_for("ledger", "start", 1)
    first.freeze()
    second_port = watched(scene, LEDGER)
    wait_until(lambda: scraped(second_port)["eventbus_taken_over_events_total",] == 1, timeout=30)
    assert scraped(second_port)["eventbus_taken_over_workers_total",] == 1
    first.send(signal.SIGCONT)
    wait_until(lambda: scraped(first_port)["eventbus_lost_events_total", "ledger"] == 1, timeout=30)
    scene.open_gate("gate")


@one_server
async def test_the_port_is_open_as_long_as_the_worker_runs_and_one_in_use_stops_the_start(
    dsn: str, conn: psycopg.Connection
) -> None:
    admin.resume(conn, "eventbus")
    port = free_port()
    bus = EventBus(settings(dsn, plugins=("prometheus",), http_port=port))
    bus.subscribe("orders.#", name="ledger")(nothing)
    worker, second = bus.worker(), bus.worker()
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(worker.ready(), 20)
    found = await asyncio.to_thread(scraped, port)
    assert found["eventbus_workers", "alive"] == 1
    with pytest.raises(ConfigurationError, match="the port is in use"):
        await second.run()
    assert (await asyncio.to_thread(scraped, port, 20))["eventbus_workers", "alive"] == 1, "it has never registered"
    worker.stop()
    assert await asyncio.wait_for(running, 20) == 0
    with pytest.raises(urllib.error.URLError, match="refused"):
        await asyncio.to_thread(scraped, port)


async def nothing(event: Event) -> None:
    """Handle it."""
