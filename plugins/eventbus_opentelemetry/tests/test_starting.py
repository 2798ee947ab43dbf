"""Enabling the plugin: what it needs, and what it says if that is missing."""

from __future__ import annotations

import sys

import pytest

from eventbus.errors import ConfigurationError
from eventbus.plugins.loading import load
from eventbus.settings import Settings
from eventbus_opentelemetry import OpenTelemetry


def test_its_name_loads_it_with_its_settings() -> None:
    settings = Settings(plugins=("opentelemetry",), plugin_settings={"opentelemetry": {"parent": "link"}})
    [plugin], problems = load(settings)
    assert problems == []
    assert isinstance(plugin.instance, OpenTelemetry)
    assert plugin.settings == OpenTelemetry.Settings(parent="link", keys=False)
    assert plugin.purpose.endswith("for OpenTelemetry.")


def test_a_wrong_setting_is_refused() -> None:
    settings = Settings(plugins=("opentelemetry",), plugin_settings={"opentelemetry": {"parent": "both"}})
    _, [problem] = load(settings)
    assert "invalid setting of plugin opentelemetry: parent" in str(problem)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("eventbus_opentelemetry.") and ".tests" not in name:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ConfigurationError, match=r'pip install "eventbus\[opentelemetry\]"'):
        OpenTelemetry(OpenTelemetry.Settings())
