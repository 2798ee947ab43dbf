"""What is published: one flight, and the topic that says what became of it."""

from __future__ import annotations

from datetime import date

from pydantic import AwareDatetime, BaseModel, ConfigDict


class Flight(BaseModel):
    """One scheduled flight as it turned out; delays are minutes, negative when it was early."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    day: date
    carrier: str
    number: int
    origin: str
    destination: str
    scheduled: AwareDatetime
    departure_delay: int | None
    """None: cancelled."""
    arrival_delay: int | None
    """None: cancelled, or it never reached its destination."""

    @property
    def cancelled(self) -> bool:
        """Whether it stayed on the ground."""
        return self.departure_delay is None

    @property
    def name(self) -> str:
        """Names this one flight: no two of a day share carrier, number and origin."""
        return f"{self.day} {self.carrier}{self.number} {self.origin}"

    @property
    def topic(self) -> str:
        """``flights.departed.<carrier>`` or ``flights.cancelled.<carrier>``."""
        return f"flights.{'cancelled' if self.cancelled else 'departed'}.{self.carrier}"
