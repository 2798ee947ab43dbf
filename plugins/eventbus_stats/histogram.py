"""Times counted in buckets with fixed bounds, and percentiles out of them.

The bounds grow by the square root of two from 0.1 ms to 3.7 hours, so that counts of different minutes, workers and
queues add up, and a percentile is wrong by less than that factor.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

BOUNDS: Final = tuple(1e-4 * 2 ** (n / 2) for n in range(55))
"""The upper end of each bucket in seconds, which belongs to it. One more bucket has what is longer."""


@dataclass(slots=True)
class Histogram:
    """How many times fell into each bucket, their sum and the longest of them, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0
    longest: float = 0.0

    def add(self, times: list[float], calls: int = 1) -> None:
        """Count these times, each for so many calls, and leave them sorted. What is below 0 counts as 0."""
        if not times:
            return
        times.sort()
        if times[0] < 0:
            below = bisect_left(times, 0.0)
            times[:below] = [0.0] * below
        bucket, counted = bisect_left(BOUNDS, times[0]), 0
        while counted < len(times):
            upto = bisect_right(times, BOUNDS[bucket], counted) if bucket < len(BOUNDS) else len(times)
            self.counts[bucket] += calls * (upto - counted)
            bucket, counted = bucket + 1, upto
        self.total += calls * sum(times)
        self.longest = max(self.longest, times[-1])

    @property
    def trimmed(self) -> list[int]:
        """The counts up to the last that is not zero."""
        used = len(self.counts)
        while used and not self.counts[used - 1]:
            used -= 1
        return self.counts[:used]


def percentile(counts: Sequence[int], share: float, longest: float) -> float | None:
    """The time that ``share`` of the counted ones (0 to 1) do not exceed, in seconds; None if nothing was counted.

    It lies in the bucket of the true one, at most as high as ``longest``, and on a logarithmic scale as far up as its
    rank is in the bucket.
    """
    number = sum(counts)
    if not number:
        return None
    rank = max(1, math.ceil(share * number))
    below = 0
    for bucket, count in enumerate(counts):
        if below + count >= rank:
            return _within(bucket, (rank - below) / count, longest)
        below += count
    raise AssertionError("a rank is at most the number of what was counted")


def _within(bucket: int, part: float, longest: float) -> float:
    """A point of a bucket: ``part`` of its way up."""
    top = min(BOUNDS[bucket], longest) if bucket < len(BOUNDS) else longest
    if bucket == 0:
        return top * part
    bottom = BOUNDS[bucket - 1]
    return min(top, bottom * math.pow(top / bottom, part))
