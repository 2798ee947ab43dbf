"""The bus of the engine's tests, for comparing it with the model."""

from __future__ import annotations

from tests.postgres.engine.conftest import bus, rewinding, session, shared_dsn

__all__ = ["bus", "rewinding", "session", "shared_dsn"]
