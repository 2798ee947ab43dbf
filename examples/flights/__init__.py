"""A year of flights through the event bus: one publisher, three consumers, their tables, and a check of the result.

Read ``handlers`` first, then ``publish``; ``README.md`` says how to run them by hand. ``eventbus demo`` runs ``demo``.
"""
