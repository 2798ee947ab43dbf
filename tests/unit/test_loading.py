"""Importing the user's modules: what a user would lose if a broken module were reported as something else."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eventbus.cli.loading import load_modules
from eventbus.errors import ConfigurationError
from tests.importing import forgotten_imports

Write = Callable[[str, str], Path]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A project folder; what was imported from it is forgotten afterwards."""
    with forgotten_imports():
        yield tmp_path


@pytest.fixture
def write(folder: Path) -> Write:
    def _write(name: str, text: str = "") -> Path:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    return _write


def refusal(name: str, folder: Path) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as refused:
        load_modules([name], folder)
    assert "\n" not in str(refused.value)
    assert "Traceback" not in str(refused.value)
    return refused.value


def test_modules_of_the_working_folder_are_found_without_any_setting(folder: Path, write: Write) -> None:
    write("shop/__init__.py", "")
    write("shop/handlers.py", "value = 1")
    write("mails.py", "value = 2")
    shop, mails = load_modules(["shop.handlers", "mails"], folder)
    assert (shop.module.__name__, shop.module.value, shop.attribute) == ("shop.handlers", 1, None)
    assert (mails.module.__name__, mails.module.value, mails.attribute) == ("mails", 2, None)


def test_the_object_after_the_colon_is_handed_over(folder: Path, write: Write) -> None:
    write("shop.py", "bus = object()")
    ((module, attribute),) = load_modules(["shop:bus"], folder)
    assert attribute is module.bus


@pytest.mark.parametrize(
    ("path", "dotted"),
    [
        ("mails.py", "mails"),
        ("./mails.py", "mails"),
        ("shop/handlers.py", "shop.handlers"),
        ("shop/__init__.py", "shop"),
        ("space/inner.py", "space.inner"),
        ("src/stock/handlers.py", "stock.handlers"),
    ],
)
def test_a_path_imports_the_module_under_the_name_that_its_queues_have_elsewhere(
    folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch, path: str, dotted: str
) -> None:
    for file in ("mails.py", "shop/__init__.py", "shop/handlers.py", "space/inner.py"):
        write(file, "bus = 1")
    write("src/stock/__init__.py", "")
    write("src/stock/handlers.py", "bus = 1")
    monkeypatch.syspath_prepend(folder / "shop")
    monkeypatch.syspath_prepend(folder / "src")
    for name in (path, str(folder / path), f"{path}:bus"):
        assert load_modules([name], folder)[0].module.__name__ == dotted


def test_a_missing_file_is_told_with_its_whole_path(folder: Path) -> None:
    assert str(refusal("shop/handlers.py", folder)).startswith(f"no file {folder}/shop/handlers.py; ")


def test_a_file_that_no_import_path_reaches_is_refused(folder: Path, write: Write) -> None:
    (folder / "project").mkdir()
    outside = write("elsewhere/handlers.py", "")
    assert str(refusal(str(outside), folder / "project")).startswith(f"{outside} lies outside {folder}/project")


@pytest.mark.parametrize("name", ["queue", "queue.py"])
def test_a_module_that_hides_behind_one_of_the_standard_library_is_an_error_instead_of_no_handlers(
    folder: Path, write: Write, name: str
) -> None:
    file = write("queue.py", "")
    assert str(refusal(name, folder)).startswith(
        f"module 'queue' is not {file} but {queue.__file__}, which has the same name; rename yours"
    )


@pytest.mark.parametrize("name", ["", ".", "shop..handlers", ".handlers", "shop:", ":bus", "shop/handlers", "a.b.py/c"])
def test_what_is_no_module_name_is_told_as_such(folder: Path, name: str) -> None:
    assert "write package.module" in str(refusal(name, folder))


def test_a_path_with_a_dot_in_a_folder_is_told_as_such(folder: Path, write: Write) -> None:
    write("v1.2/handlers.py", "")
    assert "has a dot in it" in str(refusal("v1.2/handlers.py", folder))


def test_a_missing_module_is_told_with_the_searched_folder_and_what_was_meant(folder: Path, write: Write) -> None:
    write("handlers.py", "")
    message = str(refusal("handelrs", folder))
    assert message.startswith(f"module 'handelrs' not found; searched {folder} and ")
    assert message.endswith("did you mean 'handlers'?")


def test_a_missing_module_of_a_package_is_told_with_what_the_package_has(folder: Path, write: Write) -> None:
    write("shop/__init__.py", "")
    write("shop/handlers.py", "")
    assert str(refusal("shop.handler", folder)) == (
        f"module 'shop.handler' not found; searched {folder}/shop; did you mean 'shop.handlers'?"
    )
    assert str(refusal("shop.orders.handlers", folder)).startswith(
        "module 'shop.orders.handlers' not found: no 'shop.orders'; searched "
    )


def test_a_dot_where_a_colon_belongs_is_told_as_such(folder: Path, write: Write) -> None:
    file = write("shop.py", "bus = 1")
    assert str(refusal("shop.bus", folder)) == (
        f"module 'shop.bus' not found; 'shop' is a module, not a package ({file}); "
        f"write 'shop', or 'shop:bus' for an object in it"
    )


def test_a_missing_attribute_is_told_with_what_was_meant(folder: Path, write: Write) -> None:
    file = write("shop.py", "event_bus = 1")
    assert str(refusal("shop:eventbus", folder)) == (
        f"module 'shop' ({file}) has no 'eventbus'; did you mean 'shop:event_bus'?"
    )


def test_an_attribute_that_is_none_is_not_taken_for_no_attribute(folder: Path, write: Write) -> None:
    write("shop.py", "bus = None")
    assert "has no 'bus'" in str(refusal("shop:bus", folder))


def test_a_missing_import_inside_the_module_is_not_reported_as_a_missing_module(folder: Path, write: Write) -> None:
    file = write("shop.py", "x = 1\nimport no_such_package\n")
    refused = refusal("shop", folder)
    assert str(refused) == (
        f"module 'shop' cannot be imported: ModuleNotFoundError: No module named 'no_such_package' ({file}:2)"
    )
    assert isinstance(refused.__cause__, ModuleNotFoundError)


def test_a_missing_import_deeper_down_is_told_where_it_stands(folder: Path, write: Write) -> None:
    write("shop.py", "import inner_orders")
    inner = write("inner_orders.py", "\n\nfrom inner_orders_missing import x")
    assert str(refusal("shop", folder)).endswith(f"No module named 'inner_orders_missing' ({inner}:3)")


def test_a_syntax_error_is_told_with_its_line(folder: Path, write: Write) -> None:
    file = write("shop.py", "def handle(event):\n    return ((\n")
    assert (
        str(refusal("shop", folder))
        == f"module 'shop' cannot be imported: SyntaxError: '(' was never closed ({file}:2)"
    )


def test_a_package_whose_init_fails_is_told_with_its_own_error(folder: Path, write: Write) -> None:
    init = write("shop/__init__.py", "\nraise ValueError('no price list\\nat all')")
    write("shop/handlers.py", "")
    refused = refusal("shop.handlers", folder)
    assert str(refused) == f"module 'shop' cannot be imported: ValueError: no price list at all ({init}:2)"
    assert isinstance(refused.__cause__, ValueError)


def test_an_error_inside_a_library_is_told_with_the_users_line_that_led_there(folder: Path, write: Write) -> None:
    file = write("shop.py", "import json\njson.loads('{')")
    assert str(refusal("shop", folder)).endswith(f"({file}:2)")


def test_an_error_in_a_virtual_environment_of_the_project_is_no_error_of_the_users_code(
    folder: Path, write: Write
) -> None:
    write(".venv/site-packages/price_list.py", "def read():\n    raise ValueError('empty')\n")
    sys.path.append(str(folder / ".venv/site-packages"))
    file = write("shop.py", "import price_list\nprice_list.read()\n")
    assert str(refusal("shop", folder)).endswith(f"ValueError: empty ({file}:2)")


def test_an_error_of_an_installed_module_is_told_with_its_own_line(folder: Path, write: Write) -> None:
    file = write("installed/shop.py", "\n\nraise ValueError('empty')\n")
    sys.path.append(str(folder / "installed"))
    (folder / "project").mkdir()
    assert str(refusal("shop", folder / "project")).endswith(f"ValueError: empty ({file}:3)")


def test_a_refused_handler_is_told_with_its_own_message(folder: Path, write: Write) -> None:
    file = write(
        "shop.py",
        "from eventbus.consuming.subscriptions import Subscriptions\n"
        "@Subscriptions().subscribe('orders.created')\n"
        "def handle(): ...\n",
    )
    message = str(refusal("shop", folder))
    assert message.startswith(f"module 'shop' cannot be imported: InvalidHandler: shop.handle ({file}:2) cannot be a")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("sys.exit(0)", "exit(0)"),
        ("sys.exit(2)", "exit(2)"),
        ("exit()", "exit(None)"),
        ("sys.exit('no')", "exit('no')"),
    ],
)
def test_a_module_that_exits_is_an_error_that_names_it_instead_of_a_quiet_end(
    folder: Path, write: Write, line: str, code: str
) -> None:
    file = write("shop.py", f"import sys\n{line}\n")
    refused = refusal("shop", folder)
    assert str(refused) == (
        f"module 'shop' ended the program while it was imported: {code} ({file}:2); "
        f"move what it runs under: if __name__ == '__main__'"
    )
    assert isinstance(refused.__cause__, SystemExit)


def test_a_module_that_reads_the_command_line_is_named(
    folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write("shop.py", "import argparse\nargparse.ArgumentParser().parse_args()\n")
    monkeypatch.setattr(sys, "argv", ["eventbus", "consume", "shop"])
    assert f"'shop' ended the program while it was imported: exit(2) ({file}:2)" in str(refusal("shop", folder))


def test_a_module_that_asks_for_input_is_named_instead_of_waiting_for_ever(folder: Path, write: Write) -> None:
    file = write("shop.py", "input()\n")
    stdin = sys.stdin
    message = str(refusal("shop", folder))
    assert message.startswith("module 'shop' cannot be imported: EOFError: ")
    assert message.endswith(f"({file}:1)")
    assert sys.stdin is stdin


def test_a_module_that_starts_a_thread_is_imported(folder: Path, write: Write) -> None:
    write("shop.py", "import threading\nt = threading.Thread(target=print, args=('',))\nt.start()\nt.join()\n")
    assert load_modules(["shop"], folder)[0].module.__name__ == "shop"


def test_even_an_error_that_is_no_exception_leaves_no_traceback(folder: Path, write: Write) -> None:
    write("shop.py", "class Odd(BaseException): ...\nraise Odd('odd')\n")
    assert "module 'shop' cannot be imported: Odd: odd (" in str(refusal("shop", folder))


def test_an_endless_message_stays_one_readable_line(folder: Path, write: Write) -> None:
    write("shop.py", "raise ValueError('x\\n' * 100_000)")
    assert len(str(refusal("shop", folder))) < 1_000


def test_ctrl_c_during_the_import_stays_ctrl_c(folder: Path, write: Write) -> None:
    write("shop.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_modules(["shop"], folder)


def test_the_folder_can_be_given_as_it_is_typed(folder: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("shop.py", "")
    monkeypatch.chdir(folder)
    assert load_modules(["shop"], Path())[0].module.__file__ == str(folder / "shop.py")
    assert f"searched {folder} and" in str(refusal("shops", Path()))
