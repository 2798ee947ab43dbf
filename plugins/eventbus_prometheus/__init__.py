"""Metrics of the bus for Prometheus: a page of the worker's HTTP port, a WSGI application, a function and a command."""

from eventbus.errors import ConfigurationError

try:
    import prometheus_client  # noqa: F401 - to say early and clearly that it is missing
except ImportError as error:
    raise ConfigurationError('prometheus-client is not installed: pip install "eventbus[prometheus]"') from error

from eventbus_prometheus.plugin import Prometheus
from eventbus_prometheus.standing_alone import make_wsgi_app, render

__all__ = ["Prometheus", "make_wsgi_app", "render"]
