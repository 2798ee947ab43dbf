"""``python -m eventbus``: the command line."""

from __future__ import annotations

from eventbus.cli import main

raise SystemExit(main())
