"""The command ``eventbus``: each module of this package registers one group of commands.

A command imports what it needs when it runs, so that ``--help`` is fast and nobody's handlers are imported by a
command that does not run them. Exit codes: 0 fine, 1 what was asked about is not fine, 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Final

GROUPS: Final = (
    "migrating",
    "publishing",
    "scheduled",
    "consuming",
    "queues",
    "dead_letters",
    "replaying",
    "looking",
    "doctor",
    "plugins",
    "demo",
    "torture",
)
"""The modules whose ``register(app)`` adds their commands, in the order in which ``--help`` shows them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. ``arguments`` without the program's name; ``sys.argv`` if not given."""
    import os
    import sys

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - for the whole process

    from eventbus.cli.failures import INTERRUPTED, run
    from eventbus.cli.options import new_app
    from eventbus.cli.plugin_commands import add_commands

    given = list(sys.argv[1:] if arguments is None else arguments)
    app = new_app()
    for group in GROUPS:
        import_module(f"eventbus.cli.{group}").register(app)
    try:
        add_commands(app, given)
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED
    return run(app, given)
