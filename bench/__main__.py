"""``python -m bench``: run workloads, print a table, and write everything to a JSON file.

Without names all workloads run, in sizes that take about five minutes; ``--full`` takes the sizes of the published
figures. ``claim-cost`` with ten million rows runs only when it is named with ``--rows``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench import machine, report
from bench.claim_cost import claim_cost
from bench.drain import drain, snapshot, sync
from bench.idle import idle
from bench.latency import latency
from bench.memory import memory
from bench.plugins import plugins
from bench.promises import promises
from bench.publishers import publishers
from bench.publishing import bulk, publish
from bench.report import Figure, Workload
from bench.rounds import say
from bench.servers import Choice, Server, server


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    events: int
    """Per drained backlog."""
    rounds: int
    memory_events: int
    latency_events: int
    idle_seconds: float
    block_seconds: float
    """How long sixteen publishers publish in a row."""
    rows: int
    """Waiting deliveries of the large backlog in claim-cost."""


QUICK: Final = Sizes(100_000, 3, 300_000, 500, 30.0, 1.5, 300_000)
FULL: Final = Sizes(200_000, 5, 1_000_000, 500, 60.0, 3.0, 1_000_000)

Measure = Callable[[Server, Sizes], list[Figure]]

WORKLOADS: Final[Mapping[str, Measure]] = {
    "drain": lambda server, sizes: drain(server, sizes.events, sizes.rounds),
    "snapshot": lambda server, sizes: snapshot(server, sizes.events, sizes.rounds),
    "publish": lambda server, sizes: publish(server, 500, sizes.rounds * 3),
    "publishers": lambda server, sizes: publishers(server, sizes.block_seconds, sizes.rounds),
    "latency": lambda server, sizes: latency(server, sizes.latency_events),
    "idle": lambda server, sizes: idle(server, sizes.idle_seconds),
    "memory": lambda server, sizes: memory(server, sizes.memory_events),
    "claim-cost": lambda server, sizes: claim_cost(server, sizes.rows),
    "bulk": lambda server, sizes: bulk(server, 20_000, sizes.rounds),
    "promises": lambda server, sizes: promises(server, sizes.events // 2, sizes.rounds),
    "plugins": lambda server, sizes: plugins(server, sizes.events, sizes.rounds),
    "sync": lambda server, sizes: sync(server, sizes.events // 2, sizes.rounds),
}


def main() -> None:
    """Measure what the arguments say."""
    arguments = _arguments()
    sizes = _sizes(arguments)
    with server(arguments.server) as chosen:
        facts = machine.facts(chosen)
        workloads = [_measure(name, chosen, sizes) for name in arguments.workloads or WORKLOADS]
    print(report.as_markdown(facts, asdict(sizes), workloads))
    arguments.output.mkdir(parents=True, exist_ok=True)
    stamp = str(facts["date"])[:19].replace(":", "")
    file = arguments.output / f"{stamp}-{chosen.kind}.json"
    file.write_text(report.as_json(facts, asdict(sizes), workloads), encoding="utf-8")
    say(f"written to {file}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    choices: tuple[Choice, ...] = ("auto", "machine", "embedded")
    parser.add_argument("workloads", nargs="*", choices=[*WORKLOADS, []], help=", ".join(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--server", choices=choices, default="auto", help="machine: BENCH_DSN; default: auto")
    parser.add_argument("--full", action="store_true", help="the sizes of the published figures")
    parser.add_argument("--events", type=int, help="events per drained backlog")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--rows", type=int, help="waiting deliveries of the large backlog in claim-cost")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON file"
    )
    return parser.parse_args()


def _sizes(arguments: argparse.Namespace) -> Sizes:
    chosen = asdict(FULL if arguments.full else QUICK)
    given = {name: getattr(arguments, name) for name in ("events", "rounds", "rows")}
    return Sizes(**chosen | {name: value for name, value in given.items() if value is not None})


def _measure(name: str, chosen: Server, sizes: Sizes) -> Workload:
    others = machine.busy_percent()
    say(f"{name} (the machine is {others:.0f} % busy with other things)")
    started = time.monotonic()
    figures = WORKLOADS[name](chosen, sizes)
    return Workload(name, figures, time.monotonic() - started, others)


if __name__ == "__main__":
    main()
