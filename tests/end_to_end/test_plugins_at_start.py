"""A plugin that cannot work ends a worker's start with one line that names it; commands that look go on without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from eventbus.postgres.migrate import migrate
from tests.end_to_end.distributions import NONE, Folder

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
    migrate(empty_dsn, "eventbus")
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
    [line] = done.stderr.splitlines()
    assert [word for word in case.words if word not in line] == []


@each_case
def test_ext_01_a_command_that_only_looks_goes_on(folder: Folder, case: Case) -> None:
    install(folder, case)
    done = folder.run("queues", plugins=case.plugins, **dict(case.settings))
    assert (done.returncode, "no queues yet" in done.stdout) == (0, True), done.stderr
    assert "Traceback" not in done.stderr


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
