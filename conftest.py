"""The fixtures of every test, of the bus and of its plugins."""

pytest_plugins = ["tests.fixtures", "tests.end_to_end.fixtures"]
