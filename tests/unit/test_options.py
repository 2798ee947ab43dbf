"""Options that come from a variable or a configuration are checked like those that were typed."""

from __future__ import annotations

from typing import Any

import pytest

from eventbus.consuming import options
from eventbus.errors import ConfigurationError
from eventbus.retry import RetryPolicy

POLICY = RetryPolicy(max_attempts=3)


def test_rules_without_a_policy_follow_the_one_of_the_queue_and_keep_their_order() -> None:
    assert options.checked_retry_on(None, POLICY) is None
    assert options.checked_retry_on(KeyError, POLICY) == ((KeyError, POLICY),)
    assert options.checked_retry_on([OSError, KeyError], POLICY) == ((OSError, POLICY), (KeyError, POLICY))
    own = RetryPolicy(max_attempts=9)
    given = {OSError: own, KeyError: POLICY}
    assert options.checked_retry_on(given, POLICY) == ((OSError, own), (KeyError, POLICY))
    given.clear()
    assert options.checked_discard_on(None) == ()
    assert options.checked_discard_on((KeyError, KeyboardInterrupt)) == (KeyError, KeyboardInterrupt)


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda: options.checked_retry_on({KeyError: 3}, POLICY), r"retry_on=\{KeyError: 3\}: .* a RetryPolicy"),
        (lambda: options.checked_discard_on(int), r"discard_on: int is no exception class; .*discard_on=\(Conn"),
        (lambda: options.checked_discard_on([]), "discard_on names no exception; leave it out"),
        (lambda: options.check_flags(ordered="yes"), "ordered='yes' must be True or False"),
        (lambda: options.checked_when_exhausted("skip", ordered=False), "needs ordered=True"),
        (lambda: options.check_priorities(3, ordered=True), "contradict each other"),
        (lambda: options.checked_batch_wait(1, None), "batch_wait=1 needs batch="),
        (lambda: options.checked_start("first"), "start='first' must be 'latest' .* or 'earliest'"),
    ],
)
def test_a_refusal_says_what_would_work(check: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check()


@pytest.mark.parametrize("value", [0, 0.5, 3600])
def test_every_documented_wait_for_a_batch_is_allowed(value: float) -> None:
    assert options.checked_batch_wait(value, 1) == value
    assert options.checked_batch_wait(None, 10_000) == options.DEFAULT_BATCH_WAIT
