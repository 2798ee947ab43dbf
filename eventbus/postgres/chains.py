"""Deliveries of an ordered queue, linked by their key, so that each starts when the one before it is done.

Before it: a claim has brought them in their order. After it: the consumer runs the first of each key.
"""

from __future__ import annotations

from typing import Any

from eventbus.transport import Delivery


class Chains:
    """Links deliveries of the same key, in the order in which they come."""

    def __init__(self) -> None:
        self._last: dict[Any, Delivery] = {}

    def begins(self, key: Any, delivery: Delivery) -> bool:
        """Whether this is the first delivery of its key; otherwise it follows the one before. No key: always."""
        if key is None:
            return True
        before = self._last.get(key)
        self._last[key] = delivery
        if before is None:
            return True
        before.following = delivery
        return False
