"""The options that every command has, before and after its name, and how a command is declared.

A command is a function whose first parameter is an :class:`Invocation`; the rest is read by typer from the signature.
:class:`Commands` adds the common options to it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from eventbus.cli.screen import OutputClosed, Screen

if TYPE_CHECKING:
    from eventbus.settings import Settings

_PANEL: Final = "Options of every command"

Dsn = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        help="PostgreSQL to use, instead of EVENTBUS_DSN; without both an embedded one in .eventbus/",
        rich_help_panel=_PANEL,
    ),
]
Schema = Annotated[
    str | None,
    typer.Option(
        "--schema", metavar="NAME", help="schema of the bus, instead of EVENTBUS_SCHEMA", rich_help_panel=_PANEL
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="write JSON, for programs", show_default=False, rich_help_panel=_PANEL)
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="show the traceback of an error", show_default=False, rich_help_panel=_PANEL),
]
_COMMON: Final[Mapping[str, tuple[Any, Any]]] = {
    "dsn": (Dsn, None),
    "schema": (Schema, None),
    "as_json": (Json, False),
    "debug": (Debug, False),
}


@dataclass(slots=True)
class Given:
    """The common options as they were found so far, left of the command's name or right of it; the right one wins."""

    dsn: str | None = None
    schema: str | None = None
    as_json: bool = False
    debug: bool = False

    def take(self, values: dict[str, Any]) -> None:
        """Remove the common options from ``values`` and keep those that were given."""
        for name in _COMMON:
            setattr(self, name, values.pop(name) or getattr(self, name))


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of one command: its common options, and where its answer goes."""

    given: Given
    screen: Screen
    command: str
    subcommand: str | None
    """The command below this group that will run, if this is a group."""
    context: typer.Context

    def settings(self, **arguments: Any) -> Settings:
        """The settings with the options of this call; raises :class:`ConfigurationError`."""
        from eventbus.settings import load

        settings = load({"dsn": self.given.dsn, "schema": self.given.schema, **arguments})
        find_own_plugins(settings.plugins)
        return settings


def find_own_plugins(names: Iterable[str]) -> None:
    """Let plugins of the program's own code be found in the working folder, behind everything that is installed."""
    if any(":" in name for name in names) and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


Command = Callable[..., None]


class Commands:
    """Adds commands to a typer application."""

    def __init__(self, app: typer.Typer) -> None:
        self._app = app

    def add(self, name: str, function: Command, *examples: str) -> None:
        """Make ``function`` a command; its docstring is the help."""
        self._app.command(name, help=_help(function), epilog=_epilog(examples))(with_options(function))

    def group(self, name: str, function: Command, *examples: str) -> Commands:
        """Make a group of commands; ``function`` runs when the group is called without one of them."""
        group = typer.Typer(rich_markup_mode="rich")
        group.callback(invoke_without_command=True, help=_help(function), epilog=_epilog(examples))(
            with_options(function)
        )
        self._app.add_typer(group, name=name)
        return Commands(group)


def new_app() -> typer.Typer:
    """The application without commands."""
    app = typer.Typer(
        name="eventbus",
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True, help=_help(_root), epilog=_epilog(_FIRST_STEPS))(with_options(_root))
    return app


def with_options(function: Command) -> Command:
    """``function`` as typer calls it: the common options in its signature, an :class:`Invocation` made of them.

    A subcommand sees the options that its groups were given.
    """
    hints = get_type_hints(function, include_extras=True)
    own = list(inspect.signature(function).parameters.values())[1:]
    keyword = inspect.Parameter.KEYWORD_ONLY

    def call(ctx: typer.Context, **values: Any) -> None:
        given: Given = ctx.find_root().obj
        given.take(values)
        screen = Screen(as_json=given.as_json)
        try:
            function(Invocation(given, screen, str(ctx.command_path), ctx.invoked_subcommand, ctx), **values)
        except BrokenPipeError as error:
            raise OutputClosed from error

    parameters = [
        inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *(item.replace(kind=keyword, annotation=hints[item.name]) for item in own),
        *(
            inspect.Parameter(name, keyword, annotation=kind, default=default)
            for name, (kind, default) in _COMMON.items()
        ),
    ]
    call.__name__ = function.__name__
    call.__doc__ = function.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {item.name: item.annotation for item in parameters}
    return call


def _root(
    invocation: Invocation,
    version: Annotated[bool, typer.Option("--version", help="show the version", show_default=False)] = False,
) -> None:
    """The event bus for Python programs whose data lives in PostgreSQL.

    A program publishes events in its own transactions; [bold]eventbus consume[/] runs the handlers that subscribed to
    them. The other commands show what is where, and put right what went wrong.
    """
    if version:
        from importlib.metadata import version as version_of

        invocation.screen.answer({"version": version_of("eventbus")}, version_of("eventbus"))
    elif invocation.subcommand is None:
        sys.stdout.write(invocation.context.get_help())  # with rich it has printed itself, and this is empty


_FIRST_STEPS: Final = (
    "eventbus migrate",
    "eventbus publish orders.created '{\"order\": 17}'",
    "eventbus consume shop.handlers",
    "eventbus queues",
)


def _help(function: Command) -> str:
    """The docstring, one line per paragraph: the terminal decides where to break it."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


def _epilog(examples: tuple[str, ...]) -> str | None:
    if not examples:
        return None
    title = "Examples" if len(examples) > 1 else "Example"
    return "\n".join([f"[dim]{title}:[/]", *(f"  {example}".replace("[", "\\[") for example in examples)])
