"""Writes the first files of a plugin, from the templates in ``plugin_template``."""

from __future__ import annotations

import keyword
import re
import tempfile
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Final

from eventbus.errors import ConfigurationError

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST: Final = 40
_FILES: Final = (
    ("pyproject.txt", "pyproject.toml"),
    ("readme.txt", "README.md"),
    ("package.txt", "eventbus_{name}/__init__.py"),
    ("test.txt", "tests/test_{name}.py"),
)


def write(name: str, folder: Path) -> Path:
    """Make ``folder/eventbus_NAME`` and return it: complete, or not at all.

    Raises :class:`~eventbus.ConfigurationError` for a name that cannot be one, for a name that an installed plugin has,
    and if the folder is there already.
    """
    _require_name(name)
    target = folder / f"eventbus_{name}"
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder}; make it first, or choose another with --folder")
    if target.exists():
        raise ConfigurationError(f"{target} exists already, and nothing of it is overwritten; choose another name")
    with tempfile.TemporaryDirectory(prefix=".eventbus_", dir=folder) as unfinished:
        begun = Path(unfinished) / target.name
        for template, path in _FILES:
            file = begun / path.format(name=name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_filled(template, name), encoding="utf-8")
        begun.rename(target)
    return target


def _require_name(name: str) -> None:
    from eventbus.plugins.loading import installed
    from eventbus.settings import Settings

    if not _NAME.fullmatch(name) or len(name) > _LONGEST or keyword.iskeyword(_class_of(name)):
        raise ConfigurationError(
            f"'{name}' cannot be the name of a plugin: up to {_LONGEST} lower-case letters, digits and single "
            "underscores between them, beginning with a letter, as in tenant_guard"
        )
    if name in Settings.model_fields or name == "schema":
        raise ConfigurationError(f"'{name}' is a setting of the bus, so that a plugin cannot be called so")
    taken = next((known for known in installed() if known.name == name), None)
    if taken is not None:
        raise ConfigurationError(f"{taken.distribution} has a plugin {name} already; choose another name")


def _filled(template: str, name: str) -> str:
    text = (resources.files("eventbus.cli") / "plugin_template" / template).read_text(encoding="utf-8")
    words = {"@name@": name, "@Name@": _class_of(name), "@NAME@": name.upper(), "@na-me@": name.replace("_", "-")}
    words["@version@"] = version("eventbus")
    for mark, word in words.items():
        text = text.replace(mark, word)
    return text


def _class_of(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
