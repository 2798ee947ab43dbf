"""Every setting of the bus, in one frozen class.

Read from arguments, then ``EVENTBUS_*`` environment variables, then ``[tool.eventbus]`` of the nearest
``pyproject.toml``: the first of them that names a setting decides. Plain numbers are seconds unless the name says
another unit. An unknown name is an error.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from eventbus.errors import ConfigurationError

PREFIX: Final = "EVENTBUS_"
_SCHEMA_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,39}")

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Settings(BaseModel):
    """How one process uses the bus. Build it with :func:`load`, which reads every source and explains mistakes.

    ``schema_name`` is spelled ``schema`` everywhere outside Python (``EVENTBUS_SCHEMA``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dsn: str | None = Field(
        default=None, repr=False, description="PostgreSQL connection string; none means the embedded server"
    )
    listen_dsn: str | None = Field(
        default=None,
        repr=False,
        description="direct connection for LISTEN when dsn goes through a transaction-mode pooler",
    )
    schema_name: str = Field(default="eventbus", description="schema that holds the bus's tables and functions")
    max_payload_bytes: int = Field(
        default=16 * 1024 * 1024, ge=1, le=256 * 1024 * 1024, description="limit of one payload"
    )
    lease: Seconds = Field(default=30.0, ge=1, description="a worker silent for this long loses its claims")
    drain_timeout: float = Field(
        default=30.0, ge=0, le=86_400, description="how long running handlers may finish at a stop"
    )
    concurrency: int = Field(default=10, ge=1, le=10_000, description="handlers running at once, per queue and process")
    prefetch: int = Field(
        default=2_000, ge=1, le=100_000, description="most events held in memory, per queue and process"
    )
    prefetch_bytes: int = Field(
        default=32 * 1024 * 1024, ge=1, description="most payload bytes held in memory, per process"
    )
    batch: int = Field(default=1_000, ge=1, le=10_000, description="most events in one claim")
    settle_interval: float = Field(
        default=0.01, ge=0, le=10, description="oldest age of a finished claim before it settles"
    )
    relay_batch: int = Field(
        default=5_000, ge=1, le=100_000, description="most deliveries that one tick of the relay writes"
    )
    poll_interval: Seconds = Field(default=5.0, description="floor of the wake-ups while LISTEN works")
    poll_interval_without_listen: Seconds = Field(
        default=0.5, description="floor of the wake-ups while LISTEN does not work"
    )
    notify: bool = Field(
        default=True, description="ask publishers to wake a sleeping relay; off where NOTIFY is a problem"
    )
    max_crashes: int = Field(
        default=3, ge=1, le=1_000, description="an event whose handler killed this many workers is dead"
    )
    processed_retention: float = Field(
        default=7 * 86_400.0,
        ge=60,
        le=10 * 366 * 86_400.0,
        description="how long completed executions of idempotent and transactional handlers are remembered",
    )
    on_restore: Literal["pause", "resume"] = Field(
        default="pause", description="what to do when the database turns out to be a copy restored elsewhere"
    )

    @field_validator("schema_name")
    @classmethod
    def _check_schema_name(cls, value: str) -> str:
        if not _SCHEMA_NAME.fullmatch(value) or value.startswith("pg_"):
            raise ValueError(
                "a schema name is 1 to 40 letters, digits, underscores or hyphens, starts with a letter or "
                "underscore and not with 'pg_'"
            )
        return value


@dataclass(frozen=True, slots=True)
class _Given:
    """A value that a source gives, and how that source spells the setting."""

    value: Any
    spelling: str


def load(
    arguments: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """Read the settings. An argument that is ``None`` and an empty environment variable are not given.

    Raises :class:`ConfigurationError`, on one line, naming the setting as its source spells it.
    """
    given = _from_pyproject(Path.cwd() if folder is None else folder)
    given |= _from_environment(os.environ if environment is None else environment)
    given |= _from_arguments(arguments or {})
    try:
        return Settings(**{field: each.value for field, each in given.items()})
    except ValidationError as error:
        problems = "; ".join(
            f"{given[str(problem['loc'][0])].spelling}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors()
        )
        raise ConfigurationError(f"invalid setting {problems}") from None


def _from_arguments(arguments: Mapping[str, Any]) -> dict[str, _Given]:
    return {
        _field(name, "argument", name): _Given(value, name) for name, value in arguments.items() if value is not None
    }


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Given]:
    return {
        _field(name.removeprefix(PREFIX).lower(), "environment variable", name): _Given(value, name)
        for name, value in environment.items()
        if name.startswith(PREFIX) and value
    }


def _from_pyproject(folder: Path) -> dict[str, _Given]:
    path = next((file for at in (folder, *folder.parents) if (file := at / "pyproject.toml").is_file()), None)
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    tools = document.get("tool", {})
    table = tools.get("eventbus", {}) if isinstance(tools, dict) else tools
    if not isinstance(table, dict):
        raise ConfigurationError(
            f"tool.eventbus in {path} is not a table; write [tool.eventbus] and the settings below"
        )
    where = f"key in [tool.eventbus] of {path}"
    return {
        _field(name, where, name): _Given(value, f"{name} in [tool.eventbus] of {path}")
        for name, value in table.items()
    }


def _field(name: str, where: str, spelling: str) -> str:
    """The field of :class:`Settings` that a source calls ``name``; refuses an unknown one with a suggestion."""
    field = "schema_name" if name == "schema" else name
    if field in Settings.model_fields:
        return field
    known = sorted(each.removesuffix("_name") for each in Settings.model_fields)
    upper = spelling.startswith(PREFIX)
    close = difflib.get_close_matches(name, known, n=1)
    shown = [f"{PREFIX}{each.upper()}" if upper else each for each in close or known]
    hint = f"did you mean {shown[0]}?" if close else f"known are {', '.join(shown)}"
    raise ConfigurationError(f"unknown {where}: {spelling}; {hint}")
