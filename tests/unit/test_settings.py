"""Settings: a value that somebody set is never silently ignored, and never lands in another place."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from eventbus.errors import ConfigurationError
from eventbus.settings import Settings, load


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose project sets nothing."""
    return write(tmp_path, "[project]\nname = 'shop'\n")


def test_with_nothing_set_everybody_gets_the_documented_defaults(folder: Path) -> None:
    settings = load(environment={}, folder=folder)
    assert settings == Settings()
    assert (settings.dsn, settings.schema_name, settings.lease) == (None, "eventbus", 30.0)
    assert (settings.max_payload_bytes, settings.drain_timeout, settings.on_restore) == (
        16 * 1024 * 1024,
        30.0,
        "pause",
    )


def test_an_argument_wins_over_the_environment_and_that_over_the_project(tmp_path: Path) -> None:
    write(tmp_path, "[tool.eventbus]\nlease = 10\nbatch = 10\nprefetch = 10\n")
    settings = load({"lease": 30}, environment={"EVENTBUS_LEASE": "20", "EVENTBUS_BATCH": "20"}, folder=tmp_path)
    assert (settings.lease, settings.batch, settings.prefetch) == (30, 20, 10)


def test_the_schema_has_one_short_name_outside_and_one_place_inside(tmp_path: Path) -> None:
    write(tmp_path, "[tool.eventbus]\nschema = 'project'\n")
    assert load(environment={}, folder=tmp_path).schema_name == "project"
    assert load(environment={"EVENTBUS_SCHEMA": "environment"}, folder=tmp_path).schema_name == "environment"
    assert load({"schema": "argument"}, environment={}, folder=tmp_path).schema_name == "argument"
    assert load({"schema_name": "field"}, environment={"EVENTBUS_SCHEMA": "x"}, folder=tmp_path).schema_name == "field"


def test_what_the_command_line_did_not_say_hides_nothing(folder: Path) -> None:
    assert load({"lease": None}, environment={"EVENTBUS_LEASE": "7"}, folder=folder).lease == 7


def test_an_empty_environment_variable_does_not_turn_into_an_empty_dsn(folder: Path) -> None:
    assert load(environment={"EVENTBUS_DSN": "", "EVENTBUS_BATCH": ""}, folder=folder) == Settings()


def test_the_real_environment_and_the_working_folder_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "[tool.eventbus]\nprefetch = 10\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENTBUS_BATCH", "20")
    settings = load()
    assert (settings.prefetch, settings.batch) == (10, 20)


def test_the_project_of_a_folder_below_is_found_and_the_nearest_alone_counts(tmp_path: Path) -> None:
    write(tmp_path, "[tool.eventbus]\nbatch = 1\n")
    (tmp_path / "src" / "shop").mkdir(parents=True)
    assert load(environment={}, folder=tmp_path / "src" / "shop").batch == 1
    write(tmp_path / "src", "[tool.eventbus]\nprefetch = 2\n")
    assert load(environment={}, folder=tmp_path / "src" / "shop").batch == Settings().batch


@pytest.mark.parametrize(
    ("arguments", "environment", "project", "message"),
    [
        ({"leese": 1}, {}, "", "unknown argument: leese; did you mean lease?"),
        ({}, {"EVENTBUS_LEESE": "1"}, "", "unknown environment variable: EVENTBUS_LEESE; did you mean EVENTBUS_LEASE?"),
        ({}, {"EVENTBUS_SHEMA": "x"}, "", "did you mean EVENTBUS_SCHEMA?"),
        ({}, {}, "[tool.eventbus]\nleese = 1", r"pyproject.toml: leese; did you mean lease?"),
        ({}, {}, "[tool.eventbus.lease]\nx = 1", r"lease in \[tool.eventbus\] of .*pyproject.toml: Input should be"),
        ({"zzz": 1}, {}, "", "unknown argument: zzz; known are batch, .*schema, settle_interval"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_right_spelling(
    tmp_path: Path, arguments: dict[str, Any], environment: dict[str, str], project: str, message: str
) -> None:
    write(tmp_path, project)
    with pytest.raises(ConfigurationError, match=message.replace("?", r"\?")):
        load(arguments, environment=environment, folder=tmp_path)


UNUSED = "[tool.eventbus]\nplugins = ['stats', 'shop.audit:AuditLog']\n"


@pytest.mark.parametrize(
    ("project", "environment"),
    [
        ("[tool.eventbus.stats]\ninterval = 1\n[tool.eventbus.circuit_breaker]\nfailures = 3", {}),
        ("", {"EVENTBUS_CIRCUIT_BREAKER_FAILURES": "3", "EVENTBUS_STATS_INTERVAL": "1"}),
        (f"{UNUSED}[tool.eventbus.audit_log]\nkeep = 1", {"EVENTBUS_AUDIT_LOG_KEEP": "1"}),
    ],
    ids=["tables", "variables", "a plugin of the program's own"],
)
def test_settings_of_a_plugin_that_is_switched_off_here_disturb_nobody(
    tmp_path: Path, project: str, environment: dict[str, str]
) -> None:
    write(tmp_path, project)
    for plugins in (",", "prometheus"):
        settings = load(environment={"EVENTBUS_PLUGINS": plugins, **environment}, folder=tmp_path)
        assert settings.plugin_settings == {}


@pytest.mark.parametrize(
    ("project", "environment", "message"),
    [
        ("[tool.eventbus.statz]\ninterval = 1", {}, "statz; no plugin of that name is used or installed"),
        ("[tool.eventbus]\nstats_interval = 1", {}, "unknown key in .*: stats_interval"),
        ("", {"EVENTBUS_STATZ_INTERVAL": "1"}, "unknown environment variable: EVENTBUS_STATZ_INTERVAL"),
    ],
)
def test_settings_of_a_plugin_that_nobody_knows_are_refused(
    tmp_path: Path, project: str, environment: dict[str, str], message: str
) -> None:
    write(tmp_path, project)
    for plugins in ("stats", ","):
        with pytest.raises(ConfigurationError, match=message):
            load(environment={"EVENTBUS_PLUGINS": plugins, **environment}, folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease", "0.5"),
        ("lease", "soon"),
        ("lease", "1e9"),
        ("poll_interval", "0"),
        ("settle_interval", "-1"),
        ("concurrency", "0"),
        ("concurrency", "1.5"),
        ("batch", "10001"),
        ("max_payload_bytes", str(2**40)),
        ("notify", "perhaps"),
        ("on_restore", "ignore"),
        ("max_crashes", "0"),
    ],
)
def test_a_value_that_cannot_work_stops_the_start_and_names_its_variable(folder: Path, name: str, value: str) -> None:
    variable = f"EVENTBUS_{name.upper()}"
    with pytest.raises(ConfigurationError, match=f"invalid setting {variable}: ") as caught:
        load(environment={variable: value}, folder=folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, "nan", "inf"])
@pytest.mark.parametrize("name", ["lease", "drain_timeout", "settle_interval", "poll_interval"])
def test_a_time_that_never_comes_is_no_time(folder: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=name):
        load({name: value}, environment={}, folder=folder)


def test_every_mistake_is_told_at_once(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"EVENTBUS_LEASE: .*; EVENTBUS_BATCH: "):
        load(environment={"EVENTBUS_LEASE": "x", "EVENTBUS_BATCH": "y"}, folder=folder)


@pytest.mark.parametrize("name", ["", "1bus", "pg_bus", "a b", 'a"b', "a;b", "ü", "x" * 41, "a.b", "bus\n"])
def test_a_schema_name_that_sql_would_misread_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="schema: a schema name is"):
        load({"schema": name}, environment={}, folder=folder)


@pytest.mark.parametrize("name", ["eventbus", "_", "Event-Bus_2", "x" * 40])
def test_the_usual_schema_names_work(folder: Path, name: str) -> None:
    assert load({"schema": name}, environment={}, folder=folder).schema_name == name


@pytest.mark.parametrize("text", ["not = [toml", "tool = 3", "[tool]\neventbus = 3", "[tool.eventbus]\nlease = 'x'"])
def test_a_project_file_with_a_mistake_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigurationError, match=r"pyproject\.toml"):
        load(environment={}, folder=tmp_path)


def test_a_project_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_bytes(b"[tool.eventbus]\nschema = '\xe4'\n")
    with pytest.raises(ConfigurationError, match=r"pyproject\.toml"):
        load(environment={}, folder=tmp_path)


def test_settings_do_not_change_under_a_running_worker() -> None:
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.lease = 1.0  # type: ignore[misc]


def test_a_password_does_not_get_into_a_log(folder: Path) -> None:
    settings = load({"dsn": "postgresql://app:s3cret@db/app", "listen_dsn": "s3cret"}, environment={}, folder=folder)
    assert "s3cret" not in f"{settings!r} {settings}"


def test_a_password_does_not_get_into_an_error(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="dsn") as caught:
        load({"dsn": ["s3cret"]}, environment={}, folder=folder)
    assert "s3cret" not in str(caught.value)


def test_every_setting_says_what_it_is_for() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []
