"""Measures what the bus promises, on the machine and the PostgreSQL at hand. ``python -m bench --help``."""
