"""Functions become handlers: what a user would lose if one were called wrongly, or not at all."""

from __future__ import annotations

import functools
import inspect
import re
import runpy
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import AsyncMock, Mock

import psycopg
import pytest
from pydantic import BaseModel, Field

from eventbus.consuming.handlers import Handler, adapt, conclude
from eventbus.errors import ConfigurationError, InvalidHandler, PayloadMismatch
from eventbus.event import Event
from eventbus.transport import DeadLetter, Done
from tests.importing import forgotten_imports


class Order(BaseModel):
    id: int


def event(payload: str = '{"id": 7}') -> Event:
    return Event(
        event_id="01936d4e-0000-7000-8000-000000000000",
        topic="orders.created",
        payload=payload,
        headers=None,
        key=None,
        published_at=datetime.now(UTC),
        queue="q",
    )


calls: list[Any]


@pytest.fixture(autouse=True)
def _no_calls_yet() -> None:
    global calls
    calls = []


async def asynchronous(event: Event) -> str:
    calls.append(event)
    return "ran"


def synchronous(event: Event) -> str:
    calls.append(event)
    return "ran"


def returns_a_coroutine(event: Event) -> Awaitable[str]:
    return asynchronous(event)


@functools.wraps(asynchronous)
def wrapped(*args: Any, **kwargs: Any) -> Awaitable[str]:
    return asynchronous(*args, **kwargs)


class Callables:
    def __call__(self, event: Event) -> str:
        return synchronous(event)

    def method(self, event: Event) -> str:
        return synchronous(event)

    async def async_method(self, event: Event) -> str:
        return await asynchronous(event)

    @staticmethod
    def static(event: Event) -> str:
        return synchronous(event)

    @classmethod
    def of_class(cls, event: Event) -> str:
        return synchronous(event)


class AsyncCallable:
    async def __call__(self, event: Event) -> str:
        return await asynchronous(event)


class WrapsCallable:
    def __call__(self, event: Event) -> Awaitable[str]:
        return asynchronous(event)


WORKING: list[tuple[Any, bool]] = [
    (synchronous, False),
    (asynchronous, True),
    (functools.partial(synchronous), False),
    (functools.partial(asynchronous), True),
    (functools.partial(functools.partial(asynchronous)), True),
    (functools.partial(AsyncCallable()), True),
    (Callables(), False),
    (AsyncCallable(), True),
    (WrapsCallable(), False),
    (Callables().method, False),
    (Callables().async_method, True),
    (functools.partial(Callables().async_method), True),
    (Callables.static, False),
    (Callables.__dict__["static"], False),
    (staticmethod(asynchronous), True),
    (Callables.of_class, False),
    (lambda event: synchronous(event), False),  # noqa: PLW0108 - the lambda is the case
    (lambda event: asynchronous(event), False),  # noqa: PLW0108 - the same
    (returns_a_coroutine, False),
    (wrapped, False),
    (functools.lru_cache(synchronous), False),
]


@pytest.mark.parametrize(("function", "is_async"), WORKING)
async def test_every_kind_of_function_has_run_to_its_end_before_its_event_is_done(
    function: Callable[..., Any], is_async: bool
) -> None:
    handler = adapt(function, "q")
    given = event()
    result = handler.call(given)
    assert inspect.iscoroutine(result) or not is_async
    assert await conclude(result) == Done()
    assert calls == [given]
    assert handler.is_async is is_async


async def test_mocks_work_as_handlers_in_the_tests_of_users() -> None:
    for mock in (Mock(return_value=None), AsyncMock(return_value=DeadLetter("no"))):
        given = event()
        await conclude(adapt(mock, "q").call(given))
        mock.assert_called_once_with(given)


def test_a_builtin_method_works_as_a_handler() -> None:
    seen: list[Event] = []
    given = event()
    assert adapt(seen.append, "q").call(given) is None
    assert seen == [given]


def order_only(order: Order) -> tuple[Any, ...]:
    return (order,)


def event_then_order(event: Event, order: Order) -> tuple[Any, ...]:
    return (event, order)


def order_then_event(order: Order, event: Event, retries: int = 3) -> tuple[Any, ...]:
    return (order, event, retries)


def by_name(order: Order, *, event: Event) -> tuple[Any, ...]:
    return (order, event)


def all_by_name(*, event: Event, order: Order, note: str = "default") -> tuple[Any, ...]:
    return (event, order, note)


def test_each_parameter_gets_its_value_whatever_the_order() -> None:
    given, order = event(), Order(id=7)
    assert adapt(order_only).call(given) == (order,)
    assert adapt(event_then_order).call(given) == (given, order)
    assert adapt(order_then_event).call(given) == (order, given, 3)
    assert adapt(by_name).call(given) == (order, given)
    assert adapt(all_by_name).call(given) == (given, order, "default")


def test_a_payload_that_does_not_fit_is_told_before_the_handler_starts() -> None:
    async def handle(order: Order) -> None:
        raise AssertionError("started")

    with pytest.raises(PayloadMismatch, match=r"does not fit Order: \$\.id: missing"):
        adapt(handle).call(event("{}"))


def test_constraints_in_an_annotation_are_checked() -> None:
    def handle(amount: Annotated[int, Field(gt=0)]) -> int:
        return amount

    assert adapt(handle).call(event("1")) == 1
    with pytest.raises(PayloadMismatch, match=r"greater_than$"):
        adapt(handle).call(event("-1"))


def connection_between(order: Order, conn: psycopg.Connection, event: Event) -> tuple[Any, ...]:
    return (order, conn, event)


def connection_by_name(event: Event, *, conn: psycopg.Connection[Any] | None) -> tuple[Any, ...]:
    return (event, conn)


def test_a_transactional_handler_is_called_with_its_connection_and_others_without() -> None:
    given, order, connection = event(), Order(id=7), object()
    handler = adapt(connection_between, transactional=True)
    assert handler.takes_connection
    assert handler.call(given, connection) == (order, connection, given)
    assert adapt(connection_by_name, transactional=True).call(given, connection) == (given, connection)
    assert not adapt(order_only, transactional=True).takes_connection
    assert adapt(order_only, transactional=True).call(given) == (order,)


def test_a_handler_that_only_takes_the_event_costs_nothing_extra() -> None:
    assert adapt(synchronous).call is synchronous


def generator(event: Event) -> Iterator[None]:
    yield


async def async_generator(event: Event) -> AsyncIterator[None]:
    yield


class Generates:
    async def __call__(self, event: Event) -> AsyncIterator[None]:
        yield


def with_connection(event: Event, conn: psycopg.Connection) -> None: ...


REFUSED: list[tuple[Any, str]] = [
    (generator, "it is a generator"),
    (async_generator, "it is a generator"),
    (functools.partial(async_generator), "it is a generator"),
    (Generates(), "it is a generator"),
    (Callables, "it is a class"),
    (functools.partial(Callables), "it is a class"),
    (Callables.__dict__["of_class"], "it is a class method"),
    (Callables.method, "it is a method without its object"),
    (with_connection, "needs transactional=True: add it"),
    (lambda: None, "no parameter for the event"),
    (lambda first, second: None, "would all get the event"),
    ("not a function", "an object of type str cannot be called"),
    (None, "an object of type NoneType cannot be called"),
]


@pytest.mark.parametrize(("function", "said"), REFUSED)
def test_what_could_never_handle_an_event_is_refused_before_any_event_is_lost(function: Any, said: str) -> None:
    with pytest.raises(InvalidHandler) as refused:
        adapt(function, "q")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_refusal_says_which_function_and_where_it_stands() -> None:
    line = inspect.getsourcelines(generator)[1]
    with pytest.raises(InvalidHandler) as refused:
        adapt(generator)
    assert str(refused.value).startswith(f"{__name__}.generator ({__file__}:{line}) cannot be a handler: ")
    with pytest.raises(InvalidHandler, match=rf"Callables \({__file__}:{inspect.getsourcelines(Callables)[1]}\)"):
        adapt(Callables)


def test_a_handler_tells_where_its_own_code_stands_through_partials_objects_and_decorators() -> None:
    def place(function: Callable[..., Any]) -> str:
        return adapt(function, "q").location

    assert place(functools.partial(synchronous)) == place(synchronous)
    assert place(wrapped) == place(asynchronous)
    assert place(Callables()) == f"{__file__}:{inspect.getsourcelines(Callables.__call__)[1]}"
    assert place([].append) == "not in a Python file"


def factory() -> Callable[[Event], None]:
    def made(event: Event) -> None: ...

    return made


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (synchronous, "synchronous"),
        (functools.partial(synchronous), "synchronous"),
        (Callables().method, "Callables.method"),
        (Callables.static, "Callables.static"),
        (Callables.__dict__["static"], "Callables.static"),
        (Callables(), "Callables"),
        (functools.partial(Callables()), "Callables"),
        (wrapped, "asynchronous"),
        (factory(), "factory.made"),
    ],
)
def test_the_default_queue_name_is_the_same_at_every_start(function: Callable[..., Any], name: str) -> None:
    assert adapt(function).name == f"{__name__}.{name}"


def größe(event: Event) -> None: ...  # noqa: PLC2401 - as some users write


@pytest.mark.parametrize("function", [lambda event: None, größe, [].append])
def test_a_function_without_a_usable_name_asks_for_one(function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidHandler, match=r"give one with name=…$"):
        adapt(function)
    assert adapt(function, "given").name == "given"


def test_a_name_that_no_queue_can_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="queue name 'two words' is not allowed"):
        adapt(synchronous, "two words")


PROGRAM = """
from eventbus.consuming.handlers import adapt

def handle(event): ...

name = adapt(handle).name
"""


def test_a_program_that_is_started_directly_uses_the_queue_that_the_consume_command_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "orders.py").write_text(PROGRAM)
    (tmp_path / "shop" / "__main__.py").write_text(PROGRAM)
    with forgotten_imports():
        monkeypatch.syspath_prepend(tmp_path)
        assert runpy.run_path(str(tmp_path / "shop" / "orders.py"), run_name="__main__")["name"] == "orders.handle"
        assert runpy.run_module("shop.orders", run_name="__main__")["name"] == "shop.orders.handle"
        assert runpy.run_module("shop", run_name="__main__")["name"] == "shop.handle"


def test_an_interactive_session_asks_for_a_queue_name_because_it_has_no_module() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    with pytest.raises(InvalidHandler, match=r"in no module; give one with name=…$"):
        exec(PROGRAM, names)


def test_the_types_of_a_handler_are_looked_up_where_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("elsewhere")
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    source = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Parcel:
    id: int

def handle(parcel: Parcel):
    return parcel

class Sorter:
    def __call__(self, parcel: Parcel):
        return parcel

    def sort(self, parcel: Parcel):
        return parcel
"""
    exec(source, vars(module))

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(function)(lambda *args: function(*args))  # noqa: PLW0108 - it has no types of its own

    sorter = module.Sorter()
    for function in (module.handle, decorated(module.handle), functools.partial(module.handle), sorter, sorter.sort):
        assert adapt(function, "q").call(event()) == module.Parcel(7)


def test_handlers_are_told_apart_by_identity_so_that_no_function_replaces_another() -> None:
    def definition(function: Callable[..., Any]) -> Any:
        handler: Handler = adapt(function, "q")
        return handler.definition

    first, second = Callables(), Callables()
    assert definition(synchronous).is_same_function(definition(synchronous))
    assert definition(first.method).is_same_function(definition(first.method))
    assert not definition(first.method).is_same_function(definition(second.method))
    assert not definition(factory()).is_same_function(definition(factory()))
    assert definition(factory()).is_same_code(definition(factory()))
    assert not re.search("0x", str(definition(first.method)))
