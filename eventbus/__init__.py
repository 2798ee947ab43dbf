"""The event bus for Python programs whose data lives in PostgreSQL."""
