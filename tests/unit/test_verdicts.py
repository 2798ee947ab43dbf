"""Rules for exceptions: what a user would lose if an event were retried for nothing, or given up too early."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from eventbus.consuming.subscriptions import Subscriptions
from eventbus.consuming.verdicts import Verdicts
from eventbus.errors import PayloadMismatch
from eventbus.event import Event
from eventbus.retry import RetryPolicy
from eventbus.transport import Retry, Verdict

POLICY = RetryPolicy(max_attempts=3, first=2.0, jitter=False)
PATIENT = RetryPolicy(max_attempts=10, first=60.0, jitter=False)


def event(attempt: int = 1) -> Event:
    return Event(
        event_id=str(uuid4()), topic="orders.created", payload="{}", headers=None, key=None,
        published_at=datetime.now(UTC), queue="tests", attempt=attempt,
    )  # fmt: skip


def verdicts(**options: Any) -> Verdicts:
    subscriptions = Subscriptions()
    subscriptions.subscribe("#", name="tests", retry=POLICY, **options)(lambda event: None)
    return Verdicts(next(iter(subscriptions)), lambda: 0.5)


def failed(error: BaseException, attempt: int = 1, **options: Any) -> Verdict:
    return verdicts(**options).failed(error, event(attempt))


def test_without_rules_everything_is_retried_but_a_payload_that_does_not_fit() -> None:
    assert failed(ValueError()).outcome == "retry"
    assert failed(KeyboardInterrupt()).outcome == "retry"
    found = failed(PayloadMismatch("no"))
    assert (found.outcome, found.reason) == ("dead", "payload mismatch")


@pytest.mark.parametrize("rule", [OSError, (KeyError, OSError), {OSError: POLICY}])
def test_only_what_a_rule_names_is_retried_and_the_rest_is_a_dead_letter_at_once(rule: Any) -> None:
    found = failed(ConnectionError("away"), retry_on=rule)
    assert (found.outcome, found.delay) == ("retry", 2.0)
    found = failed(ValueError("wrong"), retry_on=rule)
    assert (found.outcome, found.reason) == ("dead", "not retried: no rule of retry_on names ValueError")
    assert found.error is not None
    assert found.error["message"] == "wrong"
    assert failed(PayloadMismatch("no"), retry_on=rule).reason == "payload mismatch"


def test_the_first_rule_that_matches_decides_how_long_and_how_often() -> None:
    rules = {ConnectionError: PATIENT, OSError: POLICY}
    assert failed(ConnectionResetError(), retry_on=rules).delay == 60.0
    assert failed(FileNotFoundError(), retry_on=rules).delay == 2.0
    assert failed(ConnectionError(), attempt=3, retry_on=rules).outcome == "retry"
    assert failed(FileNotFoundError(), attempt=3, retry_on=rules).reason == "gave up after 3 attempts"
    assert failed(ConnectionError(), attempt=10, retry_on=rules).reason == "gave up after 10 attempts"
    assert failed(ConnectionError(), retry_on={OSError: POLICY, ConnectionError: PATIENT}).delay == 2.0


def test_discarding_is_asked_first_and_says_what_was_discarded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "eventbus"):
        found = failed(FileNotFoundError("gone"), discard_on=(FileNotFoundError, KeyError), retry_on=OSError)
    assert found.outcome == "done"
    [record] = caplog.records
    assert record.levelname == "INFO"
    assert "FileNotFoundError: gone" in record.message
    assert "event_id" in record.__dict__
    assert failed(PermissionError(), discard_on=FileNotFoundError, retry_on=OSError).outcome == "retry"
    assert failed(PermissionError(), discard_on=FileNotFoundError).outcome == "retry"


def test_a_payload_that_does_not_fit_is_a_dead_letter_unless_a_rule_names_just_that() -> None:
    mismatch = PayloadMismatch("no")
    assert failed(mismatch, discard_on=Exception, retry_on=BaseException).reason == "payload mismatch"
    assert failed(mismatch, retry_on=(ValueError, PayloadMismatch)).outcome == "retry"
    assert failed(mismatch, discard_on=PayloadMismatch).outcome == "done"


def test_a_returned_retry_follows_the_policy_of_the_queue_whatever_the_rules_say() -> None:
    assert verdicts(retry_on=KeyError).of(Retry(), event()).delay == 2.0


class ClaimsToBeAnother(Exception):
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise RuntimeError("no class")


def test_an_exception_that_lies_about_its_class_still_gets_a_verdict() -> None:
    assert failed(ClaimsToBeAnother(), discard_on=KeyError, retry_on=ClaimsToBeAnother).outcome == "retry"
