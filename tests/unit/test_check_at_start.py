"""The look at the database before a consumer starts: a server that goes away meanwhile is waited for."""

from __future__ import annotations

from typing import Never

import psycopg
import pytest

from eventbus.cli import consuming
from eventbus.plugins.registry import Plugins
from eventbus.postgres import migrate
from eventbus.settings import Settings


@pytest.fixture(params=[psycopg.errors.AdminShutdown, psycopg.OperationalError], ids=["terminated", "cut"])
def trouble(request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch) -> str:
    def lost(*_: object) -> Never:
        raise request.param("the connection is gone")

    monkeypatch.setattr(migrate, "require_current", lost)
    return dsn


@pytest.mark.parametrize("major", [18], indirect=True)
def test_a_consumer_whose_first_connection_is_cut_starts_all_the_same(trouble: str) -> None:
    consuming._check_rights(Settings(dsn=trouble), trouble, Plugins(), wait=True)


@pytest.mark.parametrize("major", [18], indirect=True)
def test_a_consumer_that_is_not_to_wait_says_that_its_connection_was_cut(trouble: str) -> None:
    with pytest.raises(psycopg.OperationalError):
        consuming._check_rights(Settings(dsn=trouble), trouble, Plugins(), wait=False)
