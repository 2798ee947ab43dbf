"""Import the modules that hold a program's handlers, or say in one line why that is impossible.

Before it: ``eventbus consume MODULE…`` was typed. After it: the modules' decorators have filled a registry. Only
commands that run handlers come here; all others work without the user's code.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from eventbus.consuming.results import failure
from eventbus.errors import ConfigurationError

_LONGEST_REASON: Final = 500
_SHOWN_PATHS: Final = 3


class Loaded(NamedTuple):
    """An imported module, and the object named after the colon of ``package.module:bus`` if there was one."""

    module: ModuleType
    attribute: Any | None


def load_modules(names: Iterable[str], folder: Path) -> list[Loaded]:
    """Import each of ``names``: ``package.module``, ``package.module:attribute`` or a path to a ``.py`` file.

    ``folder`` goes to the front of ``sys.path`` and stays there. A path is imported under the dotted name that Python
    itself would use, so that queue names do not depend on how a module was named. Raises
    :class:`~eventbus.errors.ConfigurationError` with one line; the cause is the original error. A module that ends
    the program while it is imported is such an error too.
    """
    folder = _absolute(str(folder))
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return [_load(name, folder) for name in names]


def _load(name: str, folder: Path) -> Loaded:
    target, colon, attribute = name.partition(":")
    file = _file_named(target, folder)
    dotted = target if file is None else _name_of_file(file, folder)
    if not all(part and not part.isspace() for part in dotted.split(".")) or (colon and not attribute):
        raise ConfigurationError(f"'{name}' names no module; write package.module or package.module:bus")
    module = _import(dotted, folder)
    _refuse_namesake(module, _files_of_module(dotted, folder) if file is None else [file])
    return Loaded(module, _attribute(module, attribute) if colon else None)


def _attribute(module: ModuleType, attribute: str) -> Any:
    found = getattr(module, attribute, None)
    if found is None:
        close = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean '{module.__name__}:{close[0]}'?" if close else ""
        raise ConfigurationError(f"module '{module.__name__}' ({_file_of(module)}) has no '{attribute}'{hint}")
    return found


def _file_named(target: str, folder: Path) -> Path | None:
    """The file if ``target`` is a path, None if it is a dotted name."""
    if not target.endswith(".py") and os.sep not in target:
        return None
    file = _absolute(str(folder / target))
    if file.suffix != ".py":
        raise ConfigurationError(f"'{target}' is neither a module name nor a .py file; write package.module")
    if not file.is_file():
        raise ConfigurationError(f"no file {file}; name a module (package.module) or an existing .py file")
    return file


def _name_of_file(file: Path, folder: Path) -> str:
    """The dotted name under which Python imports ``file``: from the innermost import path that is no package."""
    roots = [root for root in map(_absolute, sys.path) if root in file.parents and not (root / "__init__.py").exists()]
    if not roots:
        raise ConfigurationError(f"{file} lies outside {folder} and every import path; run the command in its project")
    parts = list(file.relative_to(max(roots, key=lambda root: len(root.parts))).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    if any("." in part for part in parts):
        raise ConfigurationError(f"{file} cannot be imported: a folder or file name on the way has a dot in it")
    return ".".join(parts)


def _files_of_module(dotted: str, folder: Path) -> list[Path]:
    path = folder.joinpath(*dotted.split("."))
    return [file for file in (path / "__init__.py", path.with_name(f"{path.name}.py")) if file.is_file()]


def _refuse_namesake(module: ModuleType, meant: Sequence[Path]) -> None:
    """Python imported something else of that name, for example ``queue`` of the standard library."""
    imported = getattr(module, "__file__", None)
    if meant and (imported is None or Path(imported).resolve().parent not in {file.resolve().parent for file in meant}):
        raise ConfigurationError(
            f"module '{module.__name__}' is not {meant[0]} but {_file_of(module)}, which has the same name; "
            f"rename yours"
        )


def _absolute(entry: str) -> Path:
    return Path(os.path.abspath(entry))  # noqa: PTH100 - sys.path keeps symbolic links, so they stay as they are


def _import(dotted: str, folder: Path) -> ModuleType:
    parts = dotted.split(".")
    module: ModuleType | None = None
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if name not in sys.modules and not _exists(name, module, folder):
            raise ConfigurationError(_not_found(dotted, name, module, folder))
        module = _run(name, folder)
    assert module is not None
    return module


def _exists(name: str, parent: ModuleType | None, folder: Path) -> bool:
    if parent is not None and not hasattr(parent, "__path__"):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except Exception as error:
        raise ConfigurationError(_inner_error(name, error, folder)) from error


def _run(name: str, folder: Path) -> ModuleType:
    """Import one module whose parents are imported; what goes wrong now went wrong in its own code."""
    try:
        with _no_standard_input():
            return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise ConfigurationError(
            f"module '{name}' ended the program while it was imported: exit({error.code!r}){_place(error, folder)}; "
            f"move what it runs under: if __name__ == '__main__'"
        ) from error
    except BaseException as error:  # also what is no Exception may not leave with a traceback
        raise ConfigurationError(_inner_error(name, error, folder)) from error


@contextlib.contextmanager
def _no_standard_input() -> Iterator[None]:
    """Let ``input()`` at import fail at once: nobody would see why the command waits."""
    original = sys.stdin
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = original


def _inner_error(name: str, error: BaseException, folder: Path) -> str:
    recorded = failure(error)
    if isinstance(error, SyntaxError) and error.filename:
        reason, place = str(error.msg), f" ({error.filename}:{error.lineno})"
    else:
        reason, place = " ".join(recorded.message.split()), _place(error, folder)
    if len(reason) > _LONGEST_REASON:
        reason = reason[:_LONGEST_REASON] + "…"
    return f"module '{name}' cannot be imported: {recorded.type.rpartition('.')[2]}: {reason}{place}"


def _place(error: BaseException, folder: Path) -> str:
    """Where it happened: the last line of the user's own code on the way, else the last line of all."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_code(frame.filename)]
    own = [frame for frame in frames if _is_inside(frame.filename, folder)] or frames
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _is_user_code(file: str) -> bool:
    return file != __file__ and not file.startswith("<frozen ") and file != importlib.__file__


def _is_inside(file: str, folder: Path) -> bool:
    path = Path(file)
    return folder in path.parents and "site-packages" not in path.parts


def _not_found(dotted: str, missing: str, parent: ModuleType | None, folder: Path) -> str:
    subject = f"module '{dotted}' not found" + (f": no '{missing}'" if missing != dotted else "")
    if parent is not None and not hasattr(parent, "__path__"):
        attribute = missing.rpartition(".")[2]
        return (
            f"{subject}; '{parent.__name__}' is a module, not a package ({_file_of(parent)}); "
            f"write '{parent.__name__}', or '{parent.__name__}:{attribute}' for an object in it"
        )
    searched = [str(folder)] if parent is None else list(parent.__path__)
    close = _close_matches(missing, searched)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    others = f" and {len(sys.path) - 1} more folders of sys.path" if parent is None else ""
    return f"{subject}; searched {', '.join(searched[:_SHOWN_PATHS])}{others}{hint}"


def _close_matches(missing: str, searched: Sequence[str]) -> list[str]:
    prefix, dot, last = missing.rpartition(".")
    present = [info.name for info in pkgutil.iter_modules(searched)]
    return [f"'{prefix}{dot}{name}'" for name in difflib.get_close_matches(last, present, n=2)]


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or "no file"
