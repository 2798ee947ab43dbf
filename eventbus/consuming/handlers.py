"""Any function that can take one event, adapted once into a value that the consumer can call.

Before it: ``subscriptions`` got a function from a decorator. After it: the consumer calls :attr:`Handler.call` for
every delivery and hands what comes back to :func:`~eventbus.consuming.results.conclude`. All inspection happens
here, at registration; a call costs one closure at most.
"""

from __future__ import annotations

import functools
import inspect
import os.path
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventbus.consuming.calls import Call, specialise, specialise_batch
from eventbus.consuming.parameters import Scope, Terms, Unfit, arguments_of
from eventbus.consuming.payloads import Load
from eventbus.consuming.results import Failure, conclude, failure, outcome_of
from eventbus.errors import ConfigurationError, InvalidHandler
from eventbus.topics import validate_queue_name

__all__ = ["Definition", "Failure", "Handler", "adapt", "conclude", "failure", "outcome_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """Which function it is and where it stands. ``file`` and ``line`` are None for functions not written in Python."""

    function: Callable[..., Any]
    module: str
    qualname: str
    file: str | None
    line: int | None

    @property
    def location(self) -> str:
        """``file:line`` for people and editors."""
        return "not in a Python file" if self.file is None else f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname} ({self.location})"

    def is_same_function(self, other: Definition) -> bool:
        """True for the very same function object; for methods, the same method of the very same object."""
        mine, theirs = self.function, other.function
        if isinstance(mine, types.MethodType) and isinstance(theirs, types.MethodType):
            return mine.__self__ is theirs.__self__ and mine.__func__ is theirs.__func__
        return mine is theirs

    def is_same_code(self, other: Definition) -> bool:
        """True if both were made by the same lines of the same file, however its module was imported."""
        if self.file is None or self.file.startswith("<"):
            return False
        return (self.file, self.line, self.qualname) == (other.file, other.line, other.qualname)


@dataclass(frozen=True, slots=True, eq=False)
class Handler:
    """One handler, ready to be called.

    ``call(event)`` validates the payload and calls the function. ``is_async`` tells where: True means it must be
    called on the event loop and returns an awaitable; False means it may block and belongs into a thread. Either
    way, what it returned goes through :func:`conclude` on the event loop, which waits for a coroutine that a plain
    function returned. ``call`` raises :class:`~eventbus.errors.PayloadMismatch` itself, before anything is awaited.

    ``takes_connection``: it asks for the connection of its transaction, and is called as ``call(event, connection)``.
    A handler of batches is called as ``call(events, payloads)`` or ``call(events, payloads, connection)``; ``load``
    makes one of the payloads, and is None if it asks for none.
    """

    name: str
    is_async: bool
    call: Call
    definition: Definition
    takes_connection: bool = False
    load: Load | None = None

    @property
    def location(self) -> str:
        """``file:line`` of the function."""
        return self.definition.location


def adapt(
    function: Callable[..., Any], name: str | None = None, *, transactional: bool = False, batch: bool = False
) -> Handler:
    """Make ``function`` callable with one event, or with a batch; raises :class:`~eventbus.errors.InvalidHandler`.

    Takes functions, lambdas, methods of objects, objects with ``__call__``, partials and static methods, plain or
    async. ``name`` is the queue's; without it the name is ``module.qualname`` without ``<locals>``. Only a
    ``transactional`` one may ask for a connection.
    """
    definition = _define(function)
    plain = _underlying(function)
    terms = Terms(transactional, inspect.iscoroutinefunction(plain), batch)
    try:
        _refuse_what_never_runs(function, plain)
        arguments = arguments_of(function, _scope(plain), terms)
        queue = _default_name(definition, plain) if name is None else validate_queue_name(name)
    except Unfit as problem:
        raise InvalidHandler(f"{definition} cannot be a handler: {problem}") from None
    return Handler(
        name=queue,
        is_async=terms.is_async,
        call=specialise_batch(function, arguments) if batch else specialise(function, arguments),
        definition=definition,
        takes_connection=any(argument.connection for argument in arguments),
        load=next((argument.load for argument in arguments if batch and argument.load is not None), None),
    )


def _define(function: Any) -> Definition:
    named = _named(function)
    file, line = _place(_underlying(function))
    return Definition(
        function=function,
        module=getattr(named, "__module__", None) or "builtins",
        qualname=named.__qualname__,
        file=file if file is None or file.startswith("<") else os.path.realpath(file),
        line=line,
    )


def _place(plain: Any) -> tuple[str | None, int | None]:
    code = getattr(_innermost(plain), "__code__", None)
    if code is not None:
        return code.co_filename, code.co_firstlineno
    try:
        return inspect.getsourcefile(plain), inspect.getsourcelines(plain)[1]
    except (TypeError, OSError):
        return None, None


def _named(function: Any) -> Any:
    """What gives a handler its name: the function inside a partial, the class of an object that has no name."""
    while isinstance(function, functools.partial | staticmethod | classmethod):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function if isinstance(getattr(function, "__qualname__", None), str) else type(function)


def _underlying(function: Any) -> Any:
    """The function whose body runs: without partials, bound objects and ``__call__`` around it."""
    while not inspect.isfunction(function):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, staticmethod | types.MethodType):
            function = function.__func__
        elif isinstance(function, type) or not inspect.isfunction(getattr(type(function), "__call__", None)):  # noqa: B004
            break
        else:
            function = type(function).__call__
    return function


def _innermost(function: Any) -> Any:
    return inspect.unwrap(function) if callable(function) else function


def _scope(plain: Any) -> Scope:
    innermost = _innermost(plain)
    return Scope(getattr(innermost, "__globals__", {}), getattr(innermost, "__code__", None))


def _refuse_what_never_runs(function: Any, plain: Any) -> None:
    if isinstance(plain, type):
        raise Unfit("it is a class, and making an object handles nothing; subscribe a function or an object's method")
    if isinstance(function, classmethod):
        raise Unfit("it is a class method without its class; subscribe it after the class, subscribe(…)(Class.method)")
    if not callable(function):
        raise Unfit(f"an object of type {type(function).__name__} cannot be called; subscribe a function")
    if inspect.isasyncgenfunction(plain) or inspect.isgeneratorfunction(plain):
        raise Unfit("it is a generator (it has a 'yield') whose body would never run; handle the event without 'yield'")


def _default_name(definition: Definition, plain: Any) -> str:
    module = _module_to_import(definition.module, getattr(_innermost(plain), "__globals__", {}))
    if module is None:
        raise Unfit("no queue name can be made for it because it is in no module; give one with name=…")
    name = f"{module}.{definition.qualname.replace('<locals>.', '')}"
    try:
        return validate_queue_name(name)
    except ConfigurationError:
        raise Unfit(f"its own name makes no queue name, {name!a} is not allowed; give one with name=…") from None


def _module_to_import(module: str, names: dict[str, Any]) -> str | None:
    """The name that ``eventbus consume`` would import, also for the program that was started as ``__main__``."""
    if module == "builtins":
        return None
    if module != "__main__":
        return module
    spec, file = names.get("__spec__"), names.get("__file__")
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    return None if file is None else Path(file).stem
