"""Trace context in the headers of an event, with whatever propagator is configured globally.

Header names of the bus are lower-case, so the names of a propagator are lowered on both ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry import propagate
from opentelemetry.context import Context, get_current
from opentelemetry.propagators.textmap import Getter, Setter
from opentelemetry.trace import Span, set_span_in_context

_BAGGAGE: Final = "baggage"


class _Lowered(Getter[Mapping[str, str]], Setter[dict[str, str]]):
    def get(self, carrier: Mapping[str, str], key: str) -> list[str] | None:
        value = carrier.get(key.lower())
        return None if value is None else [value]

    def keys(self, carrier: Mapping[str, str]) -> list[str]:
        return list(carrier)

    def set(self, carrier: dict[str, str], key: str, value: str) -> None:
        carrier[key.lower()] = value


_LOWERED: Final = _Lowered()


def extract(headers: Mapping[str, str], current: Context | None = None) -> Context:
    """The context that the headers carry, in place of what ``current`` says; else ``current``, or an empty one."""
    context = Context() if current is None else current
    return propagate.extract(headers, context, _LOWERED) if headers else context


def inject(own: Mapping[str, str | None] | None, headers: dict[str, str]) -> None:
    """Put the current context into ``headers``, in place of what they inherited.

    ``own`` are the headers that the publisher named, which stay as they are: a trace context of theirs keeps the
    current one out, and so does baggage. Where no trace is current, what was inherited stays.
    """
    carrier: dict[str, str] = {}
    propagate.inject(carrier, setter=_LOWERED)
    if not headers and not own:
        headers.update(carrier)
        return
    named = _named(own)
    foreign = not named <= {_BAGGAGE}
    if foreign or not carrier.keys() <= {_BAGGAGE}:
        for name in _fields() - named:
            headers.pop(name, None)
    allowed = ({_BAGGAGE} if foreign else carrier.keys()) - named
    headers.update({name: carrier[name] for name in allowed & carrier.keys()})


def inside(span: Span, context: Context | None = None) -> Context:
    """``context``, or the current one, with this span in it; one that is of no trace changes nothing."""
    if not span.get_span_context().is_valid:  # a tracer without an SDK, in older versions also below a valid parent
        return get_current() if context is None else context
    return set_span_in_context(span, context)


def has_own_trace(own: Mapping[str, str | None] | None) -> bool:
    """Whether the publisher named a trace context in the headers."""
    return not _named(own) <= {_BAGGAGE}


def _named(own: Mapping[str, str | None] | None) -> set[str]:
    return _fields() & own.keys() if own else set()


def _fields() -> set[str]:
    return {name.lower() for name in propagate.get_global_textmap().fields}
