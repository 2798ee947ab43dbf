"""A plugin of twenty lines: failures of handlers go to an error tracker, Sentry unless the settings say another one."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ImportString

from eventbus.plugins import Failure, hookimpl


class ErrorReporting:
    """Reports what handlers raise, with the queue, the topic, the event and the attempt."""

    class Settings(BaseModel):
        """``capture`` is called on the event loop: it has to hand over and return, as that of Sentry does."""

        model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

        capture: ImportString[Any] = Field(
            default="sentry_sdk:capture_exception", description="called as capture(exception, tags={...})"
        )

    def __init__(self, settings: Settings) -> None:
        self._capture = settings.capture

    @hookimpl(tryfirst=True)
    def eventbus_handler_failed(self, queue: str, failure: Failure) -> None:
        """Pass it on; nothing is returned, so that nothing changes for the event."""
        if failure.error is not None:
            event = failure.event
            tags = {"queue": queue, "topic": event.topic, "event_id": event.event_id_text, "attempt": event.attempt}
            self._capture(failure.error, tags=tags)
