"""A report as tables: how fast, how slow, what else. On a terminal with a chart of each queue, as wide as fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from eventbus.cli.extending import Cell, Column
from eventbus_stats.report import QueueReport, Report, Times

LEVELS: Final = "▁▂▃▄▅▆▇█"
_IDLE: Final = "·"
_GAP: Final = 3
_NARROWEST_CHART: Final = 8
_WIDE: Final = 100
"""Columns of a terminal that has room for what matters less."""
_PARTLY: Final = 10.0
"""Seconds of a step that has only begun, at least, so that its first event is no peak."""

Table = tuple[Sequence[Column], Sequence[Sequence[Cell]]]

_OTHERS: Final = (
    ("retried", "retried", "yellow"),
    ("dead", "dead", "red"),
    ("duplicates", "duplicates", ""),
    ("discarded", "discarded", ""),
    ("deferred", "deferred", ""),
    ("released", "released", ""),
    ("lost_leases", "lost leases", "red"),
)
"""Counters that most queues have not got: field, title, style."""


def headline(report: Report) -> str:
    """The whole bus on one line."""
    total = report.total
    parts = [
        f"{total.published:,} published",
        f"{total.handled:,} handled ({rate(report.per_second)}/s, now {rate(report.per_second_now)}/s)",
        f"{total.failed:,} failed ({share(report.error_rate)})" if total.failed else "none failed",
    ]
    parts += [f"{total.dead:,} dead"] if total.dead else []
    return f"since {report.since.astimezone():%Y-%m-%d %H:%M}: " + ", ".join(parts)


def speeds(report: Report, width: int, *, charts: bool) -> Table:
    """How much each queue handles, the busiest first."""
    columns = [
        Column("queue", "cyan"),
        Column("handled", right=True, narrow=True),
        Column("now/s", right=True, narrow=True),
        *([Column("mean/s", right=True, narrow=True)] if width >= _WIDE else []),
        Column("failed", "yellow", right=True, narrow=True),
    ]
    rows = [
        [
            each.queue,
            f"{each.counts.handled:,}",
            rate(each.per_second_now),
            *([rate(each.per_second)] if width >= _WIDE else []),
            f"{each.counts.failed:,} {share(each.error_rate)}" if each.counts.failed else "0",
        ]
        for each in report.queues
    ]
    if not charts:
        return columns, rows
    room = max(_NARROWEST_CHART, width - _width(columns, rows) - _GAP)
    drawn = [chart(_speeds_of(each, report), room) for each in report.queues]
    title = f"per {length_of(report.step_seconds * _merged(len(report.queues[0].chart), room))}"
    return [*columns, Column(title, "green", narrow=True)], [
        [*row, line] for row, line in zip(rows, drawn, strict=True)
    ]


def delays(report: Report, width: int) -> Table:
    """How long handlers take and events wait, the slowest handler first; empty if none was called."""
    longest = width >= _WIDE
    kinds = ["p50", "p95", "p99", *(["longest"] if longest else [])]
    columns = [Column("queue", "cyan")]
    columns += [
        Column(f"{what} {kind}" if kind == "p50" else kind, right=True, narrow=True)
        for what in ("run", "wait")
        for kind in kinds
    ]
    slowest = sorted(
        (each for each in report.queues if each.handler or each.waiting),
        key=lambda each: (-(each.handler.p99 if each.handler else 0.0), each.queue),
    )
    return columns, [
        [each.queue, *_times(each.handler, longest=longest), *_times(each.waiting, longest=longest)] for each in slowest
    ]


def others(report: Report) -> Table:
    """What else became of deliveries: only the queues and the columns in which there is something."""
    shown = [each for each in _OTHERS if getattr(report.total, each[0])]
    columns = [
        Column("queue", "cyan"),
        *(Column(title, style, right=True, narrow=True) for _, title, style in shown),
    ]
    rows = [
        [each.queue, *(_unless_zero(getattr(each.counts, field)) for field, _, _ in shown)] for each in report.queues
    ]
    return columns, [row for row in rows if any(row[1:])]


def everything(report: Report) -> Table:
    """One table for a pipe: all columns, no chart."""
    titles = ["queue", "published", "handled", "now/s", "mean/s", "failed", "error rate"]
    titles += [title for _, title, _ in _OTHERS]
    titles += [f"{what} {kind}" for what in ("run", "wait") for kind in ("p50", "p95", "p99", "longest")]
    return [Column(title) for title in titles], [_everything(each) for each in report.queues]


def _everything(each: QueueReport) -> list[Cell]:
    counts = each.counts
    row: list[Cell] = [each.queue, counts.published, counts.handled, rate(each.per_second_now), rate(each.per_second)]
    row += [counts.failed, share(each.error_rate)]
    row += [getattr(counts, field) for field, _, _ in _OTHERS]
    return [*row, *_times(each.handler, longest=True), *_times(each.waiting, longest=True)]


def chart(values: Sequence[float], width: int) -> str:
    """One character for each value, or for as many values in a row as it takes to stay below ``width``.

    The height is that of the highest among them; a dot stands for nothing at all.
    """
    merged = _merged(len(values), width)
    heights = [sum(part) / len(part) for part in _parts(values, merged)]
    highest = max(heights, default=0.0)
    return "".join(
        _IDLE if height <= 0 else LEVELS[max(0, math.ceil(height / highest * len(LEVELS)) - 1)] for height in heights
    )


def rate(per_second: float) -> str:
    """With three digits, or more before the point: ``0.25``, ``12.5``, ``1,250``; what is above 0 is not shown as 0."""
    if 0 < per_second < 0.01:
        return "<0.01"
    digits = 2 if per_second < 10 else 1 if per_second < 100 else 0
    return f"{per_second:,.{digits}f}" if per_second else "0"


def share(part: float | None) -> str:
    """As percent."""
    if part is None:
        return ""
    return "<0.1%" if 0 < part < 0.001 else f"{part:.1%}"


def length_of(seconds: float | None) -> str:
    """A length of time in one unit: ``350µs``, ``1.2ms``, ``45s``, ``2.5min``, ``3h``."""
    if seconds is None:
        return ""
    for unit, size, limit in (("µs", 1e-6, 0.9995e-3), ("ms", 1e-3, 0.9995), ("s", 1.0, 59.5), ("min", 60.0, 3_570.0)):
        if seconds < limit:
            return _digits(seconds / size) + unit
    return _digits(seconds / 3_600) + "h"


def _digits(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0") if number < 9.95 else f"{number:.0f}"


def _unless_zero(number: int) -> str:
    return f"{number:,}" if number else ""


def _times(times: Times | None, *, longest: bool) -> list[str]:
    if times is None:
        return [""] * (4 if longest else 3)
    return [length_of(each) for each in (times.p50, times.p95, times.p99, *([times.longest] if longest else []))]


def _speeds_of(each: QueueReport, report: Report) -> list[float]:
    """Per second in each step; the last one is divided by what of it has passed."""
    step = report.step_seconds
    passed = (report.until - report.since).total_seconds() % step
    return [*(handled / step for handled in each.chart[:-1]), each.chart[-1] / max(passed, _PARTLY)]


def _merged(values: int, width: int) -> int:
    return max(1, -(-values // width))


def _parts(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """Runs of ``size`` values, counted from the end, so that the newest are whole."""
    starts = range(len(values), 0, -size)
    return [values[max(0, start - size) : start] for start in starts][::-1]


def _width(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> int:
    widths = [
        max(len(str(cell)) for cell in (column.title, *cells)) for column, *cells in zip(columns, *rows, strict=True)
    ]
    return sum(widths) + _GAP * (len(columns) - 1)
