"""What the demo shows: bars that move on a terminal, a line now and then where there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from examples.flights.standing import Standing

_EVERY: Final = 2.0
"""Seconds between two lines without a terminal."""


class Screen(Protocol):
    """Where the demo reports to."""

    def say(self, text: str) -> None:
        """One line that stays."""

    def show(self, standing: Standing) -> None:
        """The newest standing."""


class Plain:
    """Lines of text, one standing every two seconds."""

    def __init__(self, console: Console, totals: Mapping[str, int]) -> None:
        self._console = console
        self._totals = totals
        self._shown = float("-inf")

    def say(self, text: str) -> None:
        """As in :class:`Screen`."""
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def show(self, standing: Standing) -> None:
        """As in :class:`Screen`."""
        if standing.seconds - self._shown < _EVERY:
            return
        self._shown = standing.seconds
        counts = {"published": standing.published, "relayed": standing.relayed, **standing.handled}
        parts = (f"{name} {count:,}/{self._totals[name]:,}" for name, count in counts.items())
        self.say(
            f"{standing.seconds:4.0f} s  {'  '.join(parts)}  {standing.rate:,.0f} handled/s  lag {standing.lag:.1f} s"
        )


class Bars:
    """One bar per count, and a line with the speed."""

    def __init__(self, progress: Progress, totals: Mapping[str, int]) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {
            name: progress.add_task(name, total=total, note="") for name, total in totals.items()
        }

    def say(self, text: str) -> None:
        """As in :class:`Screen`."""
        self._progress.console.print(text, highlight=False, markup=False)

    def show(self, standing: Standing) -> None:
        """As in :class:`Screen`."""
        counts = {"published": standing.published, "relayed": standing.relayed, **standing.handled}
        for name, count in counts.items():
            self._progress.update(self._tasks[name], completed=count)
        note = f"{standing.rate:,.0f} handled/s   lag {standing.lag:.1f} s   {standing.seconds:.0f} s"
        self._progress.update(self._tasks["published"], note=note)


@contextmanager
def screen(console: Console, totals: Mapping[str, int]) -> Iterator[Screen]:
    """The screen that fits the console; ``totals`` are the counts at the end, by name."""
    if not console.is_terminal:
        yield Plain(console, totals)
        return
    bar = BarColumn(bar_width=24)
    columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console) as progress:
        yield Bars(progress, totals)
