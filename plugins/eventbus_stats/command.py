"""``eventbus stats``."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Annotated, Final

import typer

from eventbus.cli.extending import Invocation, Session, period, session, shown
from eventbus.errors import EventBusError
from eventbus_stats.drawing import LEVELS, delays, everything, headline, others, speeds
from eventbus_stats.report import Report, look, names

_EVERY: Final = 2.0
_NAMES_SHOWN: Final = 20
_CLEAR: Final = "\x1b[2J\x1b[H"


def stats(
    invocation: Invocation,
    queue: Annotated[str | None, typer.Option("--queue", metavar="NAME", help="only this queue")] = None,
    since: Annotated[
        str, typer.Option("--since", metavar="MOMENT", help="an age as 10m, 2h, 3d, or 2030-01-31T09:00:00+01:00")
    ] = "1h",
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="show it anew every 2 seconds until Ctrl-C", show_default=False)
    ] = False,
) -> None:
    """Show how much each queue handles, what fails, how long handlers run and how long events wait for them.

    The busiest queue comes first, and in the second table the slowest handler. Now is since the beginning of the minute
    before this one, mean is over the whole period. Failed are calls of the handler, with their share of all calls. Run
    is the time that the handler took, wait the time from the publisher's INSERT to the handler's first call. Workers
    write what they did every 5 seconds.
    """
    with session(invocation) as current:
        if queue is not None:
            _require(current, queue)
        with suppress(KeyboardInterrupt) if watch else nullcontext():
            _show(invocation, _report(current, queue, since))
            while watch:
                time.sleep(_EVERY)
                report = _report(current, queue, since)
                _begin_anew(as_json=invocation.screen.as_json)
                _show(invocation, report)


def _report(current: Session, queue: str | None, since: str) -> Report:
    moment = period(since, None).since
    assert moment is not None
    return look(current.connection, current.schema, moment, queue)


def _show(invocation: Invocation, report: Report) -> None:
    screen = invocation.screen
    if screen.as_json:
        screen.json(report)
    elif sys.stdout.isatty():
        _draw(invocation, report, shutil.get_terminal_size().columns)
    elif report.queues:
        screen.table(*everything(report))
    if not report.queues:
        screen.note(why_empty(report))
    sys.stdout.flush()


def _draw(invocation: Invocation, report: Report, width: int) -> None:
    if not report.queues:
        return
    screen = invocation.screen
    for line in textwrap.wrap(headline(report), width):
        screen.line(line, "bold")
    screen.line()
    screen.table(*speeds(report, width, charts=_can_show(LEVELS)))
    for columns, rows in (delays(report, width), others(report)):
        if rows:
            screen.line()
            screen.table(columns, rows)


def _begin_anew(*, as_json: bool) -> None:
    """Clear the terminal; in a pipe an empty line separates what comes from what was there before."""
    sys.stdout.write(_CLEAR if sys.stdout.isatty() and not as_json else "\n")


def why_empty(report: Report) -> str:
    """What to say when there are no figures."""
    if report.newest is None:
        return (
            "nothing was counted yet: workers that use the plugin stats write what they did every 5 seconds "
            "(eventbus plugins shows whether it is used)"
        )
    age = report.until - report.newest
    days = age // timedelta(days=1) + 1
    return (
        f"nothing happened since {report.since.astimezone():%Y-%m-%d %H:%M}; the newest figures are of "
        f"{report.newest.astimezone():%Y-%m-%d %H:%M}: eventbus stats --since {days}d"
    )


def _require(current: Session, queue: str) -> None:
    known = names(current.connection, current.schema)
    if queue in known:
        return
    more = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
    hint = f"known queues: {', '.join(known[:_NAMES_SHOWN])}{more}" if known else "there are no queues yet"
    raise EventBusError(f"there is no queue '{shown(queue)}'; {hint}")


def _can_show(text: str) -> bool:
    """Whether the terminal's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
