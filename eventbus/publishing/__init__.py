"""From the caller's transaction to rows in the outbox.

``outgoing`` checks and encodes an event, ``connections`` knows the caller's connection, ``outbox`` puts the two
together.
"""
