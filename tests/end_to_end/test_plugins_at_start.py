"""A plugin that cannot work ends a worker's start with one line that names it; commands that look go on without it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.distributions import NONE, Folder
from tests.fixtures import migrated

pytestmark = [pytest.mark.usefixtures("major"), pytest.mark.parametrize("major", [18], indirect=True)]

HEAD = """
from pydantic import BaseModel
from eventbus import ConfigurationError
from eventbus.plugins import hookimpl
"""
SHOP = """
from eventbus import subscribe

@subscribe("orders.#", name="ledger")
def book(event): ...
"""
GOOD = """
class Plugin:
    @hookimpl
    def eventbus_configure(self, settings): ...
"""


@dataclass(frozen=True)
class Case:
    """What is wrong with the plugin ``faulty`` of the distribution ``acme-faulty``, and what has to be said."""

    source: str
    words: tuple[str, ...]
    plugins: str = "faulty"
    settings: tuple[tuple[str, str], ...] = ()


WHERE = ("plugin faulty", "entry point faulty_plugin:Plugin of acme-faulty")
CASES = {
    "a misspelt hook": Case(
        "class Plugin:\n    @hookimpl\n    def eventbus_setled(self): ...",
        (*WHERE, "there is no hook eventbus_setled; did you mean eventbus_settled?"),
    ),
    "a hook without its mark": Case(
        "class Plugin:\n    def eventbus_settled(self): ...", (*WHERE, "eventbus_settled is not marked; put @hookimpl")
    ),
    "a hook with an argument that it does not have": Case(
        "class Plugin:\n    @hookimpl\n    def eventbus_settled(self, topic): ...",
        (*WHERE, "eventbus_settled", "topic"),
    ),
    "a plugin listed twice": Case(GOOD, ("plugin faulty", "listed twice"), plugins="faulty,faulty"),
    "an unknown plugin": Case(GOOD, ("unknown plugin faulti", "did you mean faulty?"), plugins="faulti"),
    "a module that is missing": Case(
        "import no_such_module", (*WHERE, "cannot be imported", "No module named 'no_such_module'")
    ),
    "a module that fails": Case("1 / 0", (*WHERE, "cannot be imported: ZeroDivisionError")),
    "a module that ends the program": Case("raise SystemExit(3)", (*WHERE, "cannot be imported")),
    "a class that is missing": Case("", (*WHERE, "cannot be imported", "Plugin")),
    "a constructor that raises": Case(
        "class Plugin:\n    def __init__(self):\n        raise OSError('no\\n disk')",
        (*WHERE, "failed to start: OSError: no disk"),
    ),
    "a hook that fails while it is configured": Case(
        "class Plugin:\n    @hookimpl\n    def eventbus_configure(self, settings):\n        raise OSError('no disk')",
        (*WHERE, "eventbus_configure failed: OSError: no disk"),
    ),
    "a plugin that refuses the settings": Case(
        "class Plugin:\n    @hookimpl\n    def eventbus_configure(self, settings):\n"
        "        raise ConfigurationError('faulty needs a lease below 20')",
        ("faulty needs a lease below 20",),
    ),
    "a newer eventbus is needed": Case(
        "class Plugin:\n    minimum_eventbus = '99.1'", (*WHERE, "needs eventbus 99.1 or newer", "upgrade eventbus")
    ),
    "a version that is none": Case(
        "class Plugin:\n    minimum_eventbus = 'soon'", (*WHERE, "minimum_eventbus is no version: 'soon'")
    ),
    "a hook that ends the program": Case(
        "class Plugin:\n    @hookimpl\n    def eventbus_configure(self, settings):\n        raise SystemExit(3)",
        (*WHERE, "eventbus_configure failed: SystemExit: 3"),
    ),
    "steps that end the program": Case(
        "class Plugin:\n    @hookimpl\n    def eventbus_migrations(self):\n        raise SystemExit(3)",
        (*WHERE, "eventbus_migrations failed: SystemExit: 3"),
    ),
    "steps that are none": Case(
        "class Plugin:\n    @hookimpl\n    def eventbus_migrations(self):\n        return 42",
        (*WHERE, "eventbus_migrations returns a list of Migration objects, not 42"),
    ),
    "duties that are none": Case(
        "class Plugin:\n    @hookimpl\n    def eventbus_duties(self):\n        return [42]",
        (*WHERE, "eventbus_duties returns Duty objects, not 42"),
    ),
    "pages that are none": Case(
        "class Plugin:\n    @hookimpl\n    def eventbus_pages(self):\n        return 42",
        (*WHERE, "eventbus_pages returns a list of Page objects, not 42"),
        settings=(("http_port", "0"),),
    ),
    "what surrounds handlers ends the program": Case(
        "class Plugin:\n    @hookimpl\n    def eventbus_around_handler(self):\n        raise SystemExit(3)",
        (*WHERE, "eventbus_around_handler failed: SystemExit: 3"),
    ),
    "a hook that would have to be awaited": Case(
        "class Plugin:\n    @hookimpl\n    async def eventbus_settled(self): ...",
        (*WHERE, "eventbus_settled is not awaited; write it as def"),
    ),
    "no plugin at all": Case("Plugin = 42", (*WHERE, "42 is no plugin")),
    "settings of no model": Case(
        "class Plugin:\n    Settings = 42", (*WHERE, "Settings has to be a class, a pydantic model; it is 42")
    ),
    "a setting that it does not have": Case(
        "class Plugin:\n    class Settings(BaseModel):\n        limit: int = 1\n    def __init__(self, settings): ...",
        ("unknown setting limits of plugin faulty", "did you mean limit?"),
        settings=(("faulty_limits", "2"),),
    ),
    "a setting that cannot be": Case(
        "class Plugin:\n    class Settings(BaseModel):\n        limit: int = 1\n    def __init__(self, settings): ...",
        ("invalid setting of plugin faulty", "limit"),
        settings=(("faulty_limit", "x"),),
    ),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture
def folder(tmp_path: Path, empty_dsn: str) -> Folder:
    """A program with one handler, on a database in which the bus is installed."""
    migrated(empty_dsn)
    folder = Folder(tmp_path, empty_dsn)
    folder.write("shop.py", SHOP)
    return folder


def install(folder: Folder, case: Case) -> None:
    folder.write("faulty_plugin.py", f"{HEAD}\n{case.source}\n")
    folder.install("acme-faulty", faulty="faulty_plugin:Plugin")


@each_case
def test_ext_01_a_worker_does_not_start_with_a_plugin_that_cannot_work(folder: Folder, case: Case) -> None:
    install(folder, case)
    done = folder.run("consume", "shop", "--until-idle", plugins=case.plugins, **dict(case.settings))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    [line] = [line for line in done.stderr.splitlines() if not line.endswith("consuming ledger")]
    assert [word for word in case.words if word not in line] == []


@each_case
def test_ext_01_a_command_that_only_looks_goes_on(folder: Folder, case: Case) -> None:
    install(folder, case)
    done = folder.run("queues", plugins=case.plugins, **dict(case.settings))
    assert (done.returncode, "no queues yet" in done.stdout) == (0, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["no plugin at all", "settings of no model", "a version that is none"])
def test_the_list_of_plugins_says_what_is_wrong(folder: Folder, name: str) -> None:
    install(folder, CASES[name])
    done = folder.run("plugins", plugins="faulty")
    assert (done.returncode, done.stderr) == (1, "")
    assert [word for word in CASES[name].words if word not in " ".join(done.stdout.split())] == []


@pytest.mark.parametrize("command", ["migrate", "doctor"])
@pytest.mark.parametrize("name", ["steps that end the program", "steps that are none"])
def test_commands_that_need_the_steps_name_the_plugin(folder: Folder, command: str, name: str) -> None:
    install(folder, CASES[name])
    done = folder.run(command, plugins="faulty")
    assert done.returncode == (1 if command == "doctor" else 2)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if CASES[name].words[-1] in line]
    assert [word for word in CASES[name].words if word not in lines[0]] == []
    assert command == "migrate" or "dead letters" in done.stdout, "what else there is to find was not shown"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise SystemExit(9)", "SystemExit: 9"),
        ("yield Finding('purple', 'x', 'x')", "a Finding whose level cannot be 'purple'"),
        ("return 42", "a list of Finding objects, not 42"),
        ("yield Finding('ok', 'x', 'x'); 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_health_check_that_fails_is_one_finding_that_names_the_plugin(folder: Folder, body: str, words: str) -> None:
    source = f"class Plugin:\n    @hookimpl\n    def eventbus_health(self, connection):\n        {body}"
    install(folder, Case(f"from eventbus.plugins import Finding\n{source}", ()))
    done = folder.run("doctor", "--json", plugins="faulty")
    assert (done.returncode, done.stderr) == (1, "")
    said = json.loads(done.stdout)
    [found] = [each for each in said["findings"] if each["check"] == "faulty"]
    assert (said["level"], found["level"], found["code"]) == ("degraded", "degraded", "check_failed")
    assert words in found["message"]


def test_a_plugin_that_cannot_add_its_commands_is_a_warning(folder: Folder) -> None:
    source = "class Plugin:\n    @hookimpl\n    def eventbus_commands(self, commands):\n        raise SystemExit(4)"
    install(folder, Case(source, ()))
    done = folder.run("--help", plugins="faulty")
    assert (done.returncode, "doctor" in done.stdout) == (0, True)
    [line] = done.stderr.splitlines()
    assert [word for word in ("warning", *WHERE, "eventbus_commands failed: SystemExit: 4") if word not in line] == []


def test_ctrl_c_while_plugins_are_loaded_shows_no_traceback(folder: Folder) -> None:
    install(folder, Case("raise KeyboardInterrupt", ()))
    done = folder.run("--help", plugins="faulty")
    assert (done.returncode, done.stderr.strip()) == (130, "")


def test_ext_01_a_broken_plugin_that_is_installed_and_not_used_disturbs_nobody(folder: Folder) -> None:
    install(folder, CASES["a module that ends the program"])
    done = folder.run("consume", "shop", "--until-idle", plugins=NONE)
    assert done.returncode == 0, done.stderr
    assert "faulty" not in done.stderr


def test_a_plugin_that_two_distributions_register_is_refused_with_both_names(folder: Folder) -> None:
    install(folder, Case(GOOD, ()))
    folder.install("other-faulty", faulty="shop:Plugin")
    done = folder.run("consume", "shop", "--until-idle", plugins="faulty")
    assert done.returncode == 2
    assert "acme-faulty" in done.stderr
    assert "other-faulty" in done.stderr


@pytest.mark.hook("eventbus_configure")
def test_a_good_plugin_lets_the_worker_start(folder: Folder) -> None:
    install(folder, Case(GOOD.replace("...", "print('configured with', settings.schema_name)"), ()))
    done = folder.run("consume", "shop", "--until-idle", plugins="faulty")
    assert (done.returncode, set(done.stdout.splitlines())) == (0, {"configured with eventbus"}), done.stderr
