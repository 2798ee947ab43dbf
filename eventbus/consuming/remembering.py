"""Whether completed executions are remembered for long enough to be of use to a subscription."""

from __future__ import annotations

from eventbus.consuming.subscriptions import Subscription
from eventbus.errors import ConfigurationError


def longest_path(subscription: Subscription) -> float:
    """Seconds that an event may wait between its attempts in all, by whatever rules; more than any real path."""
    policies = {subscription.retry, *(policy for _, policy in subscription.retry_on or ())}
    return sum(policy.longest_path() for policy in policies)


def require_remembered(subscription: Subscription, retention: float) -> None:
    """Refuse a queue that records executions and forgets them while their events may still be retried.

    Twice the longest path, because a redriven event gets all its attempts once more.
    """
    if subscription.tracking == "none":
        return
    needed = 2 * longest_path(subscription)
    if retention <= needed:
        raise ConfigurationError(
            f"queue '{subscription.name}' may retry an event for {needed / 2:,.0f} s, and once more after a redrive, "
            f"but completed executions are remembered for {retention:,.0f} s: set EVENTBUS_PROCESSED_RETENTION to more "
            f"than {needed:,.0f}, or make the retry policy shorter"
        )
