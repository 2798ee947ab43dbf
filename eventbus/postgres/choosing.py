"""When: the moments that dead letters and events are chosen by, checked before anything is looked for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import psycopg

from eventbus.errors import ConfigurationError
from eventbus.postgres.admin import looking
from eventbus.postgres.statements import Statements

Moment = datetime | timedelta
"""A moment with its offset from UTC, or how long ago by the database's clock."""

_OLDEST: Final = timedelta(days=36_500)


class InvalidChoice(ConfigurationError, ValueError):
    """What was asked for cannot be; nothing was looked for and nothing changed."""


@dataclass(frozen=True, slots=True)
class Period:
    """The moments from ``since`` on and before ``until``."""

    since: Moment | None = None
    until: Moment | None = None

    def __post_init__(self) -> None:
        for name, moment in (("since", self.since), ("until", self.until)):
            _check_moment(name, moment)

    def bounds(self, connection: psycopg.Connection) -> tuple[datetime | None, datetime | None]:
        """Both ends as moments; raises :class:`InvalidChoice` if nothing can lie between them."""
        with looking(connection):
            [(now,)] = connection.execute(Statements("dead_letters", "")["now"]).fetchall()
        since, until = (now - end if isinstance(end, timedelta) else end for end in (self.since, self.until))
        if since is not None and until is not None and since >= until:
            raise InvalidChoice(f"nothing lies between: since {since.isoformat()} is not before {until.isoformat()}")
        return since, until


def check_text(name: str, text: str | None) -> None:
    """Raise :class:`InvalidChoice` for text that is in no column of any table."""
    try:
        fits = text is None or (bool(text) and b"\0" not in text.encode())
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise InvalidChoice(f"{name} {text!a}: give some text that can be stored")


def _check_moment(name: str, moment: Moment | None) -> None:
    if isinstance(moment, datetime) and moment.utcoffset() is None:
        raise InvalidChoice(f"{name} {moment.isoformat()}: give it an offset from UTC")
    if isinstance(moment, timedelta) and not timedelta() <= moment <= _OLDEST:
        raise InvalidChoice(f"{name}: an age is not negative and at most {_OLDEST.days} days")


ALWAYS: Final = Period()
