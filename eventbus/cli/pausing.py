"""``eventbus queues pause`` and ``eventbus queues resume``: one queue stands still, whatever the workers do."""

from __future__ import annotations

from typing import Annotated

import typer

from eventbus.cli.options import Invocation
from eventbus.cli.screen import shown
from eventbus.cli.session import session


def pause(
    invocation: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the queue")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="why; others read it", show_default=False)],
    length: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="go on by itself after 30s, 10m or 2h", show_default=False),
    ] = None,
) -> None:
    """Let nothing of a queue start, in any process, until it is resumed or the time is over.

    Handlers that run finish. What workers hold and have not started goes back, without an attempt. Events still arrive
    and wait. The pause outlives restarts. A queue that is paused by hand already gets the new reason and time.
    """
    from eventbus.postgres.pausing import pause as pause_queue

    seconds = _seconds(length)
    if not reason.strip():
        raise typer.BadParameter("say why, for whoever finds it paused", param_hint="--reason")
    with session(invocation) as current:
        paused = pause_queue(current.connection, current.schema, name, reason.strip(), seconds)
    invocation.screen.answer(paused, f"{name} is {shown(paused.words())}")


def resume(
    invocation: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the queue")],
    every: Annotated[
        bool, typer.Option("--all", help="end the pauses of plugins, too: a circuit breaker's", show_default=False)
    ] = False,
) -> None:
    """End a pause that was made by hand. What a plugin has paused stays so, unless --all is given."""
    from eventbus.postgres.pausing import pauses
    from eventbus.postgres.pausing import resume as resume_queue

    with session(invocation) as current:
        ended = resume_queue(current.connection, current.schema, name, every=every)
        left = [item for item in pauses(current.connection, current.schema) if item.queue == name]
    lines = [f"ended: {name} {shown(item.words()).partition(';')[0]}" for item in ended]
    lines = lines or [f"{name} was not paused{'' if every else ' by hand'}"]
    lines += [f"still: {name} is {shown(item.words())}" for item in left]
    invocation.screen.answer({"ended": ended, "left": left}, "\n".join(lines))


def _seconds(length: str | None) -> float | None:
    from eventbus.cli.event_lines import parse_duration

    if length is None:
        return None
    try:
        seconds = parse_duration(length)
    except (ValueError, OverflowError):
        seconds = 0.0
    if not 0 < seconds <= 365 * 86_400:
        raise typer.BadParameter(f"'{length}' is no length of time: write 30s, 10m, 2h or 1d", param_hint="--for")
    return seconds
