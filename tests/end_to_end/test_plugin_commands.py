"""``eventbus plugins`` shows what is used and what is wrong, and what it starts is a plugin that works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from eventbus.cli.new_plugin import write
from eventbus.errors import ConfigurationError
from tests.end_to_end.distributions import NONE, Folder

GAUGE = '''
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from eventbus.plugins import hookimpl


class Gauge:
    """Measures the pressure.

    More about it.
    """

    class Settings(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

        interval: float = Field(default=5.0, description="seconds between two looks")
        dsn: str = Field(default="postgresql://app:s3cret@db/shop", description="where it writes")
        api_token: str = Field(default="s3cret", description="who it is")
        hidden: SecretStr = Field(default=SecretStr("s3cret"), description="what nobody sees")
        address: str = Field(default="host=db password=s3cret", description="where it looks")
        targets: dict[str, str] = Field(default={"password": "s3cret"}, description="whom it tells")

    def __init__(self, settings):
        self.settings = settings

    @hookimpl
    def eventbus_settled(self, queue, settled): ...

    @hookimpl
    def eventbus_claimed(self, queue): ...
'''
PUMP = '''
class Pump:
    """Adds a command."""

    @hookimpl
    def eventbus_commands(self, commands):
        commands.add("pump", pump, "eventbus pump --times 2")


def pump(invocation, times: int = 1) -> None:
    """Pump some air."""
    invocation.screen.answer({"pumped": times}, f"pumped {times} times")
'''
BROKEN_PUMP = '''
class BrokenPump:
    """Cannot add its command."""

    @hookimpl
    def eventbus_commands(self, commands):
        raise OSError("no air")
'''
VALVE = '''
class Valve:
    """Closes."""
'''


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A distribution with two plugins."""
    folder = Folder(tmp_path)
    folder.write("pressure.py", GAUGE + PUMP + BROKEN_PUMP + VALVE)
    folder.install("acme-pressure", "3.4", gauge="pressure:Gauge", valve="pressure:Valve")
    return folder


def test_plugins_are_listed_in_their_order_with_all_there_is_to_know(folder: Folder) -> None:
    done = folder.run("plugins", "--json", plugins="valve,gauge", gauge_interval="7", gauge_except_queues="internal.*")
    valve, gauge = json.loads(done.stdout)["plugins"]
    assert (done.returncode, done.stderr) == (0, "")
    assert (valve["name"], valve["purpose"], valve["settings"], valve["hooks"]) == ("valve", "Closes.", [], [])
    assert (gauge["name"], gauge["purpose"]) == ("gauge", "Measures the pressure.")
    assert (gauge["distribution"], gauge["version"]) == ("acme-pressure", "3.4")
    assert gauge["origin"] == "entry point pressure:Gauge of acme-pressure"
    assert gauge["hooks"] == ["eventbus_claimed", "eventbus_settled"]
    assert (gauge["queues"], gauge["except_queues"]) == (None, ["internal.*"])
    assert gauge["settings"][0] == {"name": "interval", "value": 7.0, "description": "seconds between two looks"}


def test_what_may_be_secret_is_not_shown(folder: Folder) -> None:
    done = folder.run("plugins", "--json", plugins="gauge")
    [gauge] = json.loads(done.stdout)["plugins"]
    values = {setting["name"]: setting["value"] for setting in gauge["settings"]}
    assert values["dsn"] == "postgresql://app:***@db/shop"
    assert values["address"] == "host=db password=***"
    assert (values["api_token"], values["targets"]) == ("***", {"password": "***"})
    assert "s3cret" not in done.stdout + folder.run("plugins", plugins="gauge").stdout


def test_people_read_the_same(folder: Folder) -> None:
    done = folder.run("plugins", plugins="gauge,valve", gauge_queues="led*,ship")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:6] == [
        "1. gauge 3.4",
        "Measures the pressure.",
        "from entry point pressure:Gauge of acme-pressure",
        "queues led*, ship",
        "hooks claimed, settled",
        "settings interval = 5.0 (seconds between two looks)",
    ]
    assert "2. valve 3.4" in lines


def test_what_is_installed_and_not_used_is_told_with_how_to_use_it(folder: Folder) -> None:
    done = folder.run("plugins", "--json", plugins="gauge")
    others = {other["name"]: other for other in json.loads(done.stdout)["not_enabled"]}
    assert set(others) == {"valve", "stats", "circuit_breaker", "opentelemetry", "prometheus"}
    assert (others["valve"]["distribution"], others["valve"]["version"]) == ("acme-pressure", "3.4")
    assert others["valve"]["enable"] == "EVENTBUS_PLUGINS=gauge,valve"
    assert others["stats"]["version"] == version("eventbus")
    name, _, value = others["valve"]["enable"].partition("=")
    again = folder.run("plugins", "--json", **{name.removeprefix("EVENTBUS_").lower(): value})
    assert [plugin["name"] for plugin in json.loads(again.stdout)["plugins"]] == ["gauge", "valve"]


def test_without_plugins_it_says_how_to_name_some(folder: Folder) -> None:
    folder.write("pyproject.toml", "[tool.eventbus]\nplugins = []\n")
    done = folder.run("plugins")
    assert done.returncode == 0
    assert "EVENTBUS_PLUGINS" in done.stdout.splitlines()[0]


def test_what_cannot_be_loaded_is_told_with_the_reason_and_the_rest_is_shown(folder: Folder) -> None:
    done = folder.run("plugins", "--json", plugins="gaug,valve")
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert [plugin["name"] for plugin in answer["plugins"]] == ["valve"]
    [problem] = answer["problems"]
    assert problem.startswith("unknown plugin gaug in the setting plugins; did you mean gauge? ")


def test_a_plugin_of_ones_own_code_needs_no_distribution(folder: Folder) -> None:
    done = folder.run("plugins", "--json", plugins="pressure:Valve")
    [valve] = json.loads(done.stdout)["plugins"]
    assert (valve["name"], valve["origin"], valve["distribution"]) == ("valve", "pressure:Valve", None)


def test_a_new_plugin_is_complete_and_its_tests_pass(folder: Folder, tmp_path: Path) -> None:
    done = folder.run("plugins", "new", "tenant_guard", "--json")
    assert done.returncode == 0, done.stderr
    made = tmp_path / "eventbus_tenant_guard"
    assert json.loads(done.stdout)["files"] == [
        "README.md", "eventbus_tenant_guard/__init__.py", "pyproject.toml", "tests/test_tenant_guard.py",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENTBUS_")}
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        check=False, cwd=made, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout
    assert "4 passed" in tested.stdout


def test_the_entry_point_of_a_new_plugin_leads_to_it(tmp_path: Path) -> None:
    made = write("tenant_guard", tmp_path)
    project = tomllib.loads((made / "pyproject.toml").read_text())["project"]
    inside = Folder(made)
    inside.install(project["name"], project["version"], **project["entry-points"]["eventbus"])
    [plugin] = json.loads(inside.run("plugins", "--json", plugins="tenant_guard").stdout)["plugins"]
    assert (plugin["name"], plugin["distribution"]) == ("tenant_guard", "eventbus-tenant-guard")
    assert plugin["hooks"] == ["eventbus_amend_headers", "eventbus_settled"]


def test_nothing_that_exists_is_overwritten(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "eventbus_tenant_guard").mkdir()
    folder.write("eventbus_tenant_guard/mine.txt", "mine")
    done = folder.run("plugins", "new", "tenant_guard")
    assert (done.returncode, done.stdout) == (2, "")
    assert "exists already" in done.stderr
    assert [path.name for path in (tmp_path / "eventbus_tenant_guard").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["Guard", "tenant-guard", "a__b", "_a", "a_", "1a", "", "ü", "none", "a" * 41, "a\n"])
def test_a_name_that_cannot_be_a_package_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be the name of a plugin"):
        write(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [("lease", "is a setting"), ("schema", "is a setting"), ("stats", "eventbus has a plugin stats")],
)
def test_a_name_that_is_taken_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        write(name, tmp_path)


def test_a_folder_that_is_not_there_is_named(folder: Folder) -> None:
    done = folder.run("plugins", "new", "tenant_guard", "--folder", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no folder nowhere" in done.stderr


def test_a_start_that_is_interrupted_leaves_no_half_of_a_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *arguments: object, **options: object) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        write("tenant_guard", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "x" * 40])
def test_what_is_written_is_code_whatever_the_name(tmp_path: Path, name: str) -> None:
    made = write(name, tmp_path)
    for file in made.rglob("*.py"):
        compile(file.read_text(), str(file), "exec")
    assert "@" + "name" not in "".join(file.read_text() for file in made.rglob("*") if file.is_file())


@pytest.mark.hook("eventbus_commands")
def test_a_plugin_adds_a_command_with_the_options_of_all_commands(folder: Folder) -> None:
    done = folder.run("pump", "--times", "3", "--json", plugins="pressure:Pump")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"pumped": 3}), done.stderr
    listed = folder.run("--help", plugins="pressure:Pump")
    assert "Pump some air." in listed.stdout
    assert folder.run("pump", plugins=NONE).returncode == 2


def test_a_plugin_that_cannot_add_its_command_takes_no_other_away(folder: Folder) -> None:
    done = folder.run("pump", plugins="pressure:BrokenPump,pressure:Pump")
    assert (done.returncode, done.stdout) == (0, "pumped 1 times\n"), done.stderr
    assert "plugin broken_pump (pressure:BrokenPump): eventbus_commands failed: OSError: no air" in done.stderr
    assert "Traceback" not in done.stderr
