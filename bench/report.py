"""What a benchmark found: figures with their targets, as JSON for machines and Markdown for people.

Before it: workloads return figures. A figure is the median of several rounds; a ratio is computed inside each round,
between neighbours in time, so that a noisy machine disturbs both sides alike.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure has to be; ``>=`` or ``<=`` a bound."""

    sign: Literal[">=", "<="]
    bound: float

    def met(self, value: float) -> bool:
        """Whether ``value`` reaches the target."""
        return value >= self.bound if self.sign == ">=" else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.sign == '>=' else '≤'} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One result. ``rounds`` are the values of which ``value`` is the median, or empty if it was measured once."""

    workload: str
    name: str
    value: float
    unit: str
    target: Target | None = None
    rounds: tuple[float, ...] = ()
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; ``None`` without one."""
        return None if self.target is None else self.target.met(self.value)


@dataclass(frozen=True, slots=True)
class Workload:
    """The figures of one workload, how long it took, and how busy others kept the machine just before it."""

    name: str
    figures: Sequence[Figure]
    seconds: float
    others_percent: float


def median(
    workload: str, name: str, rounds: Sequence[float], unit: str, *, target: Target | None = None, note: str = ""
) -> Figure:
    """A figure from the values of its rounds."""
    return Figure(workload, name, statistics.median(rounds), unit, target, tuple(rounds), note)


def ratio(
    workload: str, name: str, ours: Sequence[float], theirs: Sequence[float], *, target: Target | None = None
) -> Figure:
    """How many times theirs ours is: the median of the ratios of each round."""
    rounds = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return median(workload, name, rounds, "x", target=target)


def as_json(machine: Mapping[str, Any], sizes: Mapping[str, Any], workloads: Sequence[Workload]) -> str:
    """Everything that was measured and where."""
    document = {
        "machine": machine,
        "sizes": sizes,
        "workloads": [
            {
                "name": workload.name,
                "seconds": round(workload.seconds, 1),
                "machine_busy_with_other_things_percent": workload.others_percent,
                "figures": [_plain(figure) for figure in workload.figures],
            }
            for workload in workloads
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def as_markdown(machine: Mapping[str, Any], sizes: Mapping[str, Any], workloads: Sequence[Workload]) -> str:
    """The same as a table that can be pasted into a document."""
    facts = [f"- {key.replace('_', ' ')}: {value}" for key, value in {**machine, "sizes": _brief(sizes)}.items()]
    busy = [workload.others_percent for workload in workloads]
    facts.append(
        f"- busy with other things before the workloads: median {statistics.median(busy):.0f} %, most {max(busy):.0f} %"
    )
    head = ["", "| workload | figure | value | rounds | target | met |", "| --- | --- | ---: | --- | --- | --- |"]
    rows = [_row(figure) for workload in workloads for figure in workload.figures]
    return "\n".join([*facts, *head, *rows, ""])


def _plain(figure: Figure) -> dict[str, Any]:
    plain = asdict(figure)
    del plain["workload"]
    return plain | {"target": None if figure.target is None else str(figure.target), "met": figure.met}


def _row(figure: Figure) -> str:
    name = f"{figure.name} ({figure.note})" if figure.note else figure.name
    target = "" if figure.target is None else str(figure.target)
    met = {None: "", True: "yes", False: "**no**"}[figure.met]
    spread = ""
    if len(figure.rounds) > 1:
        spread = f"{_number(min(figure.rounds))} to {_number(max(figure.rounds))}"
    return f"| {figure.workload} | {name} | {_number(figure.value)} {figure.unit} | {spread} | {target} | {met} |"


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _brief(sizes: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in sizes.items()
    )
