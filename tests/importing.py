"""Modules that a test writes and imports: forgotten again, so that the next test can use the same name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def forgotten_imports() -> Iterator[None]:
    """Restore ``sys.path``, and forget every module that is first imported inside the block."""
    modules, path = set(sys.modules), list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            del sys.modules[name]
