"""A worker does not start that would forget what it has done before its retries are over."""

from __future__ import annotations

from typing import Any

import pytest

from eventbus.consuming.remembering import longest_path, require_remembered
from eventbus.consuming.reporting import Reporter
from eventbus.consuming.subscriptions import Subscription, Subscriptions
from eventbus.errors import ConfigurationError
from eventbus.retry import RetryPolicy
from eventbus.settings import Settings
from eventbus.station import Station

DAY = 86_400.0
HOURLY = RetryPolicy(max_attempts=25, first=3600, factor=1, cap=3600, jitter=False)


def subscribed(**options: Any) -> Subscription:
    subscriptions = Subscriptions()
    if options.get("transactional"):
        from psycopg import AsyncConnection

        @subscriptions.subscribe("orders.*", name="mails", **options)
        async def send_with(event: dict[str, Any], conn: AsyncConnection) -> None: ...

    else:

        @subscriptions.subscribe("orders.*", name="mails", **options)
        async def send(event: dict[str, Any]) -> None: ...

    [subscription] = subscriptions
    return subscription


@pytest.mark.parametrize("kind", ["idempotent", "transactional"])
def test_a_retention_that_is_not_longer_than_twice_the_retries_is_refused_with_both_numbers(kind: str) -> None:
    subscription = subscribed(retry=HOURLY, **{kind: True})
    require_remembered(subscription, 2 * DAY + 1)
    with pytest.raises(ConfigurationError) as refused:
        require_remembered(subscription, 2 * DAY)
    for part in ("queue 'mails'", "86,400 s", "172,800 s", "EVENTBUS_PROCESSED_RETENTION to more than 172,800"):
        assert part in str(refused.value)


def test_a_queue_that_records_nothing_may_retry_for_as_long_as_it_likes() -> None:
    require_remembered(subscribed(retry=HOURLY), 60)


def test_the_rules_for_single_exceptions_count_too() -> None:
    rules = {KeyError: RetryPolicy(max_attempts=2, first=DAY, factor=1, cap=DAY, jitter=False), ValueError: HOURLY}
    subscription = subscribed(idempotent=True, retry_on=rules, retry=RetryPolicy(max_attempts=1))
    assert longest_path(subscription) == 2 * DAY
    subscription = subscribed(idempotent=True, retry_on=(KeyError, ValueError), retry=HOURLY)
    assert longest_path(subscription) == DAY


def test_the_defaults_fit_each_other() -> None:
    require_remembered(subscribed(idempotent=True), Settings().processed_retention)


def test_a_worker_with_such_a_queue_does_not_start() -> None:
    settings = Settings(dsn="postgresql://nowhere", processed_retention=100)
    with pytest.raises(ConfigurationError, match="queue 'mails'"):
        Station(settings, [subscribed(idempotent=True, retry=HOURLY)], None, Reporter(), wait=False)  # type: ignore[arg-type]
