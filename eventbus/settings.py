"""Every setting of the bus, in one frozen class.

Read from arguments, then ``EVENTBUS_*`` environment variables, then ``[tool.eventbus]`` of the nearest
``pyproject.toml``. Plain numbers are seconds unless the name says another unit. An unknown key is an error.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from eventbus.errors import ConfigurationError

PREFIX = "EVENTBUS_"
_SCHEMA_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,39}")

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Settings(BaseSettings):
    """How one process uses the bus. Build it with :func:`load`, which turns mistakes into one clear line each."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True)

    dsn: str | None = Field(None, description="PostgreSQL connection string; none means the embedded server")
    listen_dsn: str | None = Field(
        None, description="direct connection for LISTEN when dsn goes through a transaction-mode pooler"
    )
    schema_name: str = Field(
        "eventbus",
        validation_alias=AliasChoices("schema", "schema_name", "EVENTBUS_SCHEMA"),
        description="schema that holds the bus's tables and functions",
    )
    max_payload_bytes: int = Field(16 * 1024 * 1024, ge=1, le=256 * 1024 * 1024, description="limit of one payload")
    lease: Seconds = Field(30.0, ge=1, description="a worker silent for this long loses its claims")
    drain_timeout: float = Field(30.0, ge=0, le=86_400, description="how long running handlers may finish at a stop")
    concurrency: int = Field(10, ge=1, le=10_000, description="handlers running at once, per queue and process")
    prefetch: int = Field(2_000, ge=1, le=100_000, description="most events held in memory, per queue and process")
    prefetch_bytes: int = Field(32 * 1024 * 1024, ge=1, description="most payload bytes held in memory, per process")
    batch: int = Field(1_000, ge=1, le=10_000, description="most events in one claim")
    settle_interval: float = Field(0.01, ge=0, le=10, description="oldest age of a finished claim before it settles")
    relay_batch: int = Field(5_000, ge=1, le=100_000, description="most deliveries that one tick of the relay writes")
    poll_interval: Seconds = Field(5.0, description="floor of the wake-ups while LISTEN works")
    poll_interval_without_listen: Seconds = Field(0.5, description="floor of the wake-ups while LISTEN does not work")
    notify: bool = Field(True, description="ask publishers to wake a sleeping relay; off where NOTIFY is a problem")
    max_crashes: int = Field(3, ge=1, le=1_000, description="an event whose handler killed this many workers is dead")
    on_restore: Literal["pause", "resume"] = Field(
        "pause", description="what to do when the database turns out to be a copy restored elsewhere"
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

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings)


def load(
    arguments: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """Read the settings; raises :class:`ConfigurationError` naming the key and where it came from."""
    environment = os.environ if environment is None else environment
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    _refuse_unknown(given, "argument", str)
    from_environment = {
        name.removeprefix(PREFIX).lower(): value for name, value in environment.items() if name.startswith(PREFIX)
    }
    _refuse_unknown(from_environment, "environment variable", lambda key: PREFIX + key.upper())
    from_file = _read_pyproject(folder or Path.cwd())
    _refuse_unknown(from_file, "key in [tool.eventbus]", str)
    merged = {_canonical(key): value for source in (from_file, from_environment, given) for key, value in source.items()}
    try:
        return _FromArguments(**merged)
    except ValidationError as error:
        lines = "; ".join(
            f"{_spelling('.'.join(map(str, item['loc'])))}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors()
        )
        raise ConfigurationError(f"invalid setting: {lines}") from None


class _FromArguments(Settings):
    """The same settings from arguments alone: :func:`load` has already merged the sources."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, **_: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


def _spelling(field: str) -> str:
    return "schema" if field == "schema_name" else field


def _canonical(key: str) -> str:
    return "schema_name" if key == "schema" else key


def _refuse_unknown(given: Mapping[str, Any], kind: str, spell: Any) -> None:
    known = {_spelling(field) for field in Settings.model_fields} | {"schema_name"}
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {spell(close[0])}?" if close else f"; known: {', '.join(sorted(known))}"
            raise ConfigurationError(f"unknown {kind} {spell(key)}{hint}")


def _read_pyproject(folder: Path) -> dict[str, Any]:
    for candidate in (folder, *folder.parents):
        path = candidate / "pyproject.toml"
        if path.is_file():
            try:
                document = tomllib.loads(path.read_text(encoding="utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"{path} is not valid TOML: {error}") from None
            table = document.get("tool", {}).get("eventbus", {})
            return dict(table) if isinstance(table, dict) else {}
    return {}
