"""The settings of the plugin."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

_HANDLER: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
_WAITING: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)


class Settings(BaseModel):
    """Where the metrics are, and what a scrape may cost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(default="/metrics", pattern=r"^(/[A-Za-z0-9_.-]+)+$", description="path of the page")
    database: bool = Field(
        default=True, description="also ask the database at a scrape; off where another worker's metrics have that part"
    )
    cache: float = Field(default=1.0, ge=0, le=60, description="seconds for which scrapes get the same answer")
    timeout: float = Field(
        default=5.0,
        gt=0,
        le=60,
        description="seconds that the database may take for all; what is missing then is left out",
    )
    statement_timeout: float = Field(
        default=2.0, ge=0.01, le=60, description="seconds that one query may take; its section is left out then"
    )
    handler_buckets: tuple[float, ...] = Field(
        default=_HANDLER, description="upper bounds of the histogram of handler times, in seconds, ascending"
    )
    waiting_buckets: tuple[float, ...] = Field(
        default=_WAITING, description="upper bounds of the histogram of waiting times, in seconds, ascending"
    )

    @field_validator("handler_buckets", "waiting_buckets", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Numbers in one environment variable are separated by commas."""
        return tuple(value.split(",")) if isinstance(value, str) else value

    @field_validator("handler_buckets", "waiting_buckets")
    @classmethod
    def _ascending(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not 1 <= len(value) <= 50 or value[0] <= 0 or any(a >= b for a, b in pairwise(value)):
            raise ValueError("buckets are 1 to 50 numbers above 0, each greater than the one before")
        return value
