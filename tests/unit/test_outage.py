"""An outage is two log lines and two calls of its observers, however many connections it cuts."""

from __future__ import annotations

import threading
import time

import pytest

from eventbus.postgres.outage import Outage


class Observer:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.told: list[str | float] = []
        self.outage = Outage(began=self.told.append, ended=self.told.append)


@pytest.fixture
def observer(caplog: pytest.LogCaptureFixture) -> Observer:
    caplog.set_level("INFO", "eventbus")
    return Observer()


def test_five_connections_that_fail_are_one_outage_with_its_reason_and_its_length(
    observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    links = [f"link {number}" for number in range(5)]
    for link in links:
        observer.outage.began(link, f"{link} was cut")
    for link in links:
        assert len(observer.told) == 1
        observer.outage.ended(link)
    reason, seconds = observer.told
    assert reason == "link 0 was cut"
    assert isinstance(seconds, float)
    assert caplog.messages == [
        "database trouble: link 0 was cut; retrying until it is back",
        f"the database is back after {seconds:.1f} s",
    ]


def test_a_connection_that_works_ends_no_outage_that_it_had_no_part_in(observer: Observer) -> None:
    observer.outage.ended("relay")
    assert observer.told == []
    observer.outage.began("claim", "cut")
    observer.outage.ended("relay")
    assert observer.told == ["cut"]


def test_a_connection_that_the_last_outage_cut_is_no_new_one_but_one_that_has_worked_since_is(
    observer: Observer,
) -> None:
    before = time.monotonic()
    observer.outage.began("claim", "cut")
    observer.outage.ended("claim")
    observer.outage.began("relay", "cut as well", before)
    assert len(observer.told) == 2
    observer.outage.began("relay", "cut again", time.monotonic())
    assert observer.told[2:] == ["cut again"]


def test_an_observer_that_raises_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: object) -> None:
        raise ValueError("of no use")

    outage = Outage(began=broken, ended=broken)
    outage.began("claim", "cut")
    outage.ended("claim")
    outage.began("claim", "cut")
    assert caplog.text.count("database trouble") == 2
    assert caplog.text.count("ValueError: of no use") == 3


def test_an_observer_that_reports_on_an_outage_itself_or_is_slow_does_not_stop_the_connections() -> None:
    told: list[str | float] = []
    inside, finish = threading.Event(), threading.Event()

    def slow(reason: str) -> None:
        told.append(reason)
        if reason == "cut":
            inside.set()
            assert finish.wait(10)
            outage.began("observer", "it needs the database, too")
            outage.ended("observer")

    outage = Outage(began=slow, ended=told.append)
    thread = threading.Thread(target=outage.began, args=("heartbeat", "cut"))
    thread.start()
    assert inside.wait(10)
    ending = threading.Thread(target=outage.ended, args=("heartbeat",))
    ending.start()
    ending.join(5)
    assert not ending.is_alive(), "it waits for the observer"
    assert told == ["cut"]
    finish.set()
    thread.join(10)
    assert told[::2] == ["cut", "it needs the database, too"]
    assert [type(each) for each in told[1::2]] == [float, float]
