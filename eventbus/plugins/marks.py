"""The marks of hooks and of their implementations (pluggy)."""

from __future__ import annotations

from typing import Final

import pluggy

PROJECT: Final = "eventbus"
"""Name of the project for pluggy, and of the group of entry points."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's methods. ``@hookimpl(tryfirst=True)`` and ``trylast=True`` precede the order of the setting."""
