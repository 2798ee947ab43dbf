"""Every setting of the bus, in one frozen class.

Read from arguments, then ``EVENTBUS_*`` environment variables, then ``[tool.eventbus]`` of the nearest
``pyproject.toml``: the first of them that names a setting decides. Plain numbers are seconds unless the name says
another unit. An unknown name is an error.

A plugin's own settings stand in a table of its name, ``[tool.eventbus.NAME]``, or in ``EVENTBUS_NAME_KEY``; they are
checked when the plugin is loaded. Those of a plugin that is installed, or named by a source that does not decide, and
not used are ignored.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from eventbus.errors import ConfigurationError

PREFIX: Final = "EVENTBUS_"
_GROUP: Final = "eventbus"
"""The entry points of plugins."""
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
    plugins: tuple[str, ...] = Field(
        default=("stats", "circuit_breaker"),
        description="plugins to use, in the order in which they are called; by name, or package.module:attribute",
    )
    plugin_settings: Mapping[str, Mapping[str, Any]] = Field(
        default_factory=dict, repr=False, description="settings of each plugin, by its name"
    )
    http_port: int | None = Field(
        default=None, ge=0, le=65_535, description="port on which a worker serves the pages of its plugins"
    )
    http_host: str = Field(default="127.0.0.1", description="address on which it serves them")
    on_restore: Literal["pause", "resume"] = Field(
        default="pause", description="what to do when the database turns out to be a copy restored elsewhere"
    )

    @field_validator("plugins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """A list of names in one environment variable is separated by commas."""
        return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value

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
    """A value that a source gives: for a field of :class:`Settings`, or for a setting of a plugin."""

    name: str
    value: Any
    where: str
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
    given += _from_environment(os.environ if environment is None else environment)
    given += [_Given(name, value, "argument", name) for name, value in (arguments or {}).items() if value is not None]
    fields: dict[str, _Given] = {}
    others: list[_Given] = []
    for each in given:
        field = "schema_name" if each.name == "schema" else each.name
        if field in Settings.model_fields and (field != "plugin_settings" or each.where == "argument"):
            fields[field] = each
        else:
            others.append(each)
    settings = _validated(fields)
    own = _of_plugins(others, settings.plugins, [each.value for each in given if each.name == "plugins"])
    return settings.model_copy(update={"plugin_settings": own | dict(settings.plugin_settings)}) if own else settings


def plugin_name(spelling: str) -> str:
    """The name of a plugin of the setting ``plugins``: for ``shop.audit:AuditLog``, ``audit_log``."""
    attribute = spelling.rpartition(":")[2].rpartition(".")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", attribute).lower() if ":" in spelling else spelling


def _validated(given: Mapping[str, _Given]) -> Settings:
    try:
        return Settings(**{field: each.value for field, each in given.items()})
    except ValidationError as error:
        problems = "; ".join(
            f"{given[str(problem['loc'][0])].spelling}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors()
        )
        raise ConfigurationError(f"invalid setting {problems}") from None


def _of_plugins(given: Iterable[_Given], plugins: Sequence[str], named: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """The settings of each plugin; refuses what belongs to none that is known, with a suggestion.

    ``named``: what the sources say of the setting plugins, those that do not decide among them.
    """
    names = sorted(map(plugin_name, plugins), key=len, reverse=True)
    found: dict[str, dict[str, Any]] = {}
    others: list[_Given] = []
    for each in given:
        if isinstance(each.value, dict) and each.name in names:
            found.setdefault(each.name, {}).update(each.value)
            continue
        owner = next((name for name in names if each.name.startswith(f"{name}_")), None)
        if owner is None or not each.spelling.startswith(PREFIX):
            others.append(each)
            continue
        found.setdefault(owner, {})[each.name.removeprefix(f"{owner}_")] = each.value
    unused = _known_plugins(named) if others else set()
    for each in others:
        if not (each.name in unused if isinstance(each.value, dict) else _is_variable_of(each, unused)):
            raise ConfigurationError(_unknown(each, names))
    return found


def _known_plugins(named: Iterable[Any]) -> set[str]:
    """The names of the plugins that are installed or named."""
    spellings = [name for value in named for name in (value.split(",") if isinstance(value, str) else value)]
    installed = {point.name for point in entry_points(group=_GROUP)}
    return installed | {plugin_name(name.strip()) for name in spellings}


def _is_variable_of(given: _Given, plugins: Iterable[str]) -> bool:
    return given.spelling.startswith(PREFIX) and any(given.name.startswith(f"{name}_") for name in plugins)


def _from_environment(environment: Mapping[str, str]) -> list[_Given]:
    return [
        _Given(name.removeprefix(PREFIX).lower(), value, "environment variable", name)
        for name, value in environment.items()
        if name.startswith(PREFIX) and value
    ]


def _from_pyproject(folder: Path) -> list[_Given]:
    path = next((file for at in (folder, *folder.parents) if (file := at / "pyproject.toml").is_file()), None)
    if path is None:
        return []
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
    return [_Given(name, value, where, f"{name} in [tool.eventbus] of {path}") for name, value in table.items()]


def _unknown(given: _Given, plugins: Sequence[str]) -> str:
    """What to say of a name that is no setting."""
    spelling = given.name if given.where.startswith("key") else given.spelling
    if isinstance(given.value, dict):
        where = given.where.removeprefix("key in ")
        return f"unknown table in {where}: {given.name}; no plugin of that name is used or installed, add it to plugins"
    known = sorted(each.removesuffix("_name") for each in Settings.model_fields if each != "plugin_settings")
    upper = spelling.startswith(PREFIX)
    close = difflib.get_close_matches(given.name, known, n=1)
    shown = [f"{PREFIX}{each.upper()}" if upper else each for each in close or known]
    hint = f"did you mean {shown[0]}?" if close else f"known are {', '.join(shown)}"
    if upper and not close and plugins:
        hint += f", and those of the plugins {', '.join(sorted(plugins))}"
    return f"unknown {given.where}: {spelling}; {hint}"
