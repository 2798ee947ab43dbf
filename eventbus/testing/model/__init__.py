"""The engine as a pure state machine: no database, no clock, no threads, no randomness.

It is the executable form of what the engine's SQL promises. Every operation takes ``now``, the database's clock in
seconds, and gives the answer that PostgreSQL gives, or one of those that it may give. Each operation is one
transaction; publishers may have longer ones. A model is copied by ``copy.deepcopy``.

From what is published to what is given back, a module each: ``publishing``, ``relaying``, ``keys`` (order, dead
letters, executions), ``pausing``, ``workers``, ``claiming``, ``exceptions``, ``settling``, ``take_over``.

Not in the model: queues that are filled from the beginning or change their lanes, replays, retention, restored copies.
"""

from __future__ import annotations

from eventbus.testing.model.take_over import TakeOver


class Model(TakeOver):
    """One bus."""


__all__ = ["Model"]
