"""Contenders take turns, so that what disturbs the machine disturbs them alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

Result = TypeVar("Result")


def take_turns(contenders: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Run every contender once per round, in turned order every other round; the results by name, round by round."""
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
        for name in names:
            say(f"  round {number + 1}/{rounds}: {name}")
            results[name].append(contenders[name]())
    return results


def say(text: str) -> None:
    """Progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)
