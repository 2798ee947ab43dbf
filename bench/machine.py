"""Where and when a measurement was taken: hardware, versions, the server's settings, and what else was running."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
import psycopg

from bench.servers import Server

SETTINGS: Final = (
    "shared_buffers",
    "synchronous_commit",
    "fsync",
    "full_page_writes",
    "max_wal_size",
    "autovacuum",
    "wal_sync_method",
)
"""What changes these figures most."""


def facts(server: Server) -> Mapping[str, Any]:
    """What a reader needs to judge the figures."""
    with psycopg.connect(server.admin_dsn) as connection:
        version = connection.execute("SHOW server_version").fetchone()
        settings = connection.execute(
            "SELECT name, current_setting(name) FROM unnest(%s::text[]) AS name", [list(SETTINGS)]
        ).fetchall()
    assert version is not None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "postgresql": f"{version[0]} ({server.kind})",
        "server_settings": ", ".join(f"{name} {value}" for name, value in settings),
    }


def busy_percent(seconds: float = 0.5) -> float:
    """How busy the whole machine is now, in percent of all cores; call it while nothing of ours runs."""
    return psutil.cpu_percent(interval=seconds)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit that was measured; with ``+`` when the package differs from it."""
    folder = Path(__file__).parent.parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", "eventbus"], cwd=folder, check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")
