"""The settings of the circuit breaker, and what counts as a failure unless somebody says otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ImportString, ValidationError, model_validator

from eventbus.errors import PayloadMismatch
from eventbus.plugins import Failure

Counts = Callable[[Failure], bool]


class Options(BaseModel):
    """When a queue is paused, and for how long. All times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    failures: int = Field(default=5, ge=1, description="so many failures in a row in one process open the breaker")
    ratio: float | None = Field(
        default=None, gt=0, le=1, description="so does this share of failed calls within the window; none: only a row"
    )
    window: float = Field(default=60.0, gt=0, le=86_400, description="seconds over which the ratio is taken")
    least_calls: int = Field(default=20, ge=1, description="fewer calls than this within the window have no ratio")
    patience: float = Field(
        default=10.0,
        ge=0,
        le=600,
        description="seconds for which a call that is still running may prove that the handler works",
    )
    first_pause: float = Field(default=30.0, gt=0, le=86_400, description="seconds of the first pause")
    factor: float = Field(
        default=2.0, ge=1, le=100, description="each failed probe makes the next pause longer by this"
    )
    longest_pause: float = Field(default=600.0, gt=0, le=86_400, description="no pause takes more seconds than this")
    probe_timeout: float = Field(
        default=60.0, gt=0, le=86_400, description="a probe without an outcome after so many seconds begins a new pause"
    )
    counts: ImportString[Counts] | None = Field(
        default=None,
        description="package.module:function that tells of a Failure whether it counts; none: all but bad payloads",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.longest_pause < self.first_pause:
            raise ValueError(f"longest_pause ({self.longest_pause:g} s) is shorter than first_pause")
        if inspect.iscoroutinefunction(self.counts):
            raise ValueError("counts is an async function; it is called on the event loop and has to answer at once")
        return self

    def pause(self, trips: int) -> float:
        """Seconds of the pause of so many openings in a row, the first one included."""
        return min(self.longest_pause, self.first_pause * self.factor ** min(max(trips, 1) - 1, 100))


def counts_by_default(failure: Failure) -> bool:
    """Whether a failure tells something of the handler's surroundings.

    A payload that does not fit says nothing of them, nor does a handler that gives its event up.
    """
    if failure.error is None:
        return failure.outcome == "retry"
    return not isinstance(failure.error, PayloadMismatch | ValidationError)
