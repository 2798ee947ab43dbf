"""``eventbus metrics``: the metrics of the database, once."""

from __future__ import annotations

import typer

from eventbus.cli.extending import Commands, Invocation, session
from eventbus_prometheus.database import Database, Reading
from eventbus_prometheus.options import Settings
from eventbus_prometheus.scrape import of_build, of_reading, text


def register(commands: Commands, options: Settings) -> None:
    """Add the command."""

    def metrics(invocation: Invocation) -> None:
        """Write the metrics of the database once, in Prometheus's text format; 1 if a part of them cannot be read.

        It is what a scrape of a worker has, without what is counted in that process.
        """
        show(invocation, options)

    commands.add("metrics", metrics, "eventbus metrics", "eventbus metrics > eventbus.prom")


def show(invocation: Invocation, options: Settings) -> None:
    """Read and write them."""
    with session(invocation) as current:
        reading = Database(current.settings, options.timeout, options.statement_timeout).read()
    screen = invocation.screen
    if screen.as_json:
        screen.json(samples(reading))
    else:
        screen.line(text([*of_build(), *of_reading(reading)]).decode().rstrip("\n"))
    for section, reason in reading.failures.items():
        screen.note(f"eventbus: no {section}: {reason}")
    if reading.failures:
        raise typer.Exit(1)


def samples(reading: Reading) -> list[dict[str, object]]:
    """Every value with its name and labels."""
    return [
        {"name": sample.name, "labels": sample.labels, "value": sample.value}
        for family in of_reading(reading)
        for sample in family.samples
    ]
