"""``--since``, ``--until`` and ``--rate``, and the Ctrl-C that ends a long change between two of its transactions."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from eventbus.postgres.choosing import Moment, Period

Since = Annotated[
    str | None, typer.Option("--since", metavar="MOMENT", help="not before 2030-01-31T09:00:00+01:00, or an age as 2h")
]
Until = Annotated[
    str | None, typer.Option("--until", metavar="MOMENT", help="before 2030-01-31T09:00:00+01:00, or an age as 30m, 7d")
]
Rate = Annotated[
    float | None, typer.Option("--rate", metavar="N", help="at most so many a second, as 50 or 0.5", show_default=False)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="show what would be done and change nothing", show_default=False)
]

_EARLIEST: Final = datetime(1900, 1, 1, tzinfo=UTC)
"""What is before it begins with it: a server may not be able to write down such a moment in its own time zone."""
_AGE: Final = re.compile(r"\s*\d+(\.\d+)?\s*[smhd]\s*")


def period(since: str | None, until: str | None) -> Period:
    """Both options; raises :class:`typer.BadParameter`."""
    from eventbus.postgres.choosing import Period

    return Period(_moment("--since", since), _moment("--until", until))


def _moment(option: str, text: str | None) -> Moment | None:
    from eventbus.cli.event_lines import parse_duration, parse_moment

    if text is None:
        return None
    try:
        if _AGE.fullmatch(text):
            return timedelta(seconds=parse_duration(text))
        return max(parse_moment(text), _EARLIEST)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"'{text}' is no moment: write it as 2030-01-31T09:00:00+01:00, with the offset from UTC, or as an age: "
            "30m, 2h or 7d",
            param_hint=option,
        ) from None


@contextmanager
def until_interrupted() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one raises :class:`KeyboardInterrupt` as ever."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            signal.default_int_handler(number, frame)
        stopped.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
