"""Statistics of the bus: what was published, handled and failed, and how long it took, per minute and queue."""

from eventbus_stats.plugin import Stats

__all__ = ["Stats"]
