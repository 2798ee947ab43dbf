"""The registry of handlers: what a user would lose if a subscription were lost, doubled or mixed up."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from eventbus.consuming.subscriptions import Subscription, Subscriptions
from eventbus.errors import ConfigurationError, DuplicateQueue, InvalidHandler, InvalidTopic
from eventbus.event import Event
from eventbus.retry import RetryPolicy
from tests.importing import forgotten_imports


def event() -> Event:
    return Event(
        event_id="01936d4e-0000-7000-8000-000000000000",
        topic="orders.created",
        payload="{}",
        headers=None,
        key=None,
        published_at=datetime.now(UTC),
        queue="q",
    )


async def handle(event: Event) -> None: ...
def other(event: Event) -> None: ...


def line_of(function: Any) -> int:
    return inspect.getsourcelines(function)[1]


@pytest.fixture
def subscriptions() -> Subscriptions:
    return Subscriptions()


def test_the_decorated_function_stays_what_it_was_so_that_it_can_be_called_and_tested(
    subscriptions: Subscriptions,
) -> None:
    def handle_payload(payload: dict[str, int]) -> None: ...

    assert subscriptions.subscribe("orders.created")(handle) is handle
    assert subscriptions.subscribe("orders.created")(handle_payload) is handle_payload


def test_a_subscription_keeps_all_that_was_said(subscriptions: Subscriptions) -> None:
    retry = RetryPolicy(max_attempts=3)
    subscriptions.subscribe("orders.*", "refunds.#", name="ledger", retry=retry, timeout=2, concurrency=4)(handle)
    (subscription,) = subscriptions
    assert subscription == Subscription("ledger", ("orders.*", "refunds.#"), subscription.handler, retry, 2, 4)
    assert subscription.handler.call is handle


def test_what_was_not_said_has_the_documented_default(subscriptions: Subscriptions) -> None:
    subscriptions.subscribe("orders.created")(handle)
    (subscription,) = subscriptions
    assert subscription.name == f"{__name__}.handle"
    assert subscription.retry == RetryPolicy(max_attempts=5, first=1, factor=2, cap=300, jitter=True)
    assert subscription.timeout is None
    assert subscription.concurrency is None


def test_a_pattern_that_is_said_twice_binds_once(subscriptions: Subscriptions) -> None:
    subscriptions.subscribe("b", "a", "b")(handle)
    assert next(iter(subscriptions)).patterns == ("b", "a")


def test_lambdas_closures_and_methods_of_temporary_objects_are_still_called_later(
    subscriptions: Subscriptions,
) -> None:
    called = []

    class Temporary:
        def method(self, event: Event) -> None:
            called.append("method")

    def closure_over(word: str) -> Callable[[Event], None]:
        return lambda event: called.append(word)

    subscriptions.subscribe("a", name="lambda")(lambda event: called.append("lambda"))
    subscriptions.subscribe("a", name="closure")(closure_over("closure"))
    subscriptions.subscribe("a", name="method")(Temporary().method)
    subscriptions.subscribe("a", name="partial")(functools.partial(lambda word, event: called.append(word), "partial"))
    gc.collect()
    for subscription in subscriptions:
        subscription.handler.call(event())
    assert called == ["lambda", "closure", "method", "partial"]


def test_two_functions_cannot_share_a_queue_by_accident_and_the_error_names_both(
    subscriptions: Subscriptions,
) -> None:
    subscriptions.subscribe("a", name="ledger")(handle)
    with pytest.raises(DuplicateQueue) as refused:
        subscriptions.subscribe("b", name="ledger")(other)
    assert str(refused.value) == (
        f"queue 'ledger' is claimed by {__name__}.handle ({__file__}:{line_of(handle)}) and by "
        f"{__name__}.other ({__file__}:{line_of(other)}); give one of them another name=…"
    )
    assert [subscription.patterns for subscription in subscriptions] == [("a",)]


def test_two_handlers_of_one_factory_need_names_because_their_own_is_the_same(subscriptions: Subscriptions) -> None:
    def make() -> Callable[[Event], None]:
        def made(event: Event) -> None: ...

        return made

    subscriptions.subscribe("a")(make())
    with pytest.raises(DuplicateQueue) as refused:
        subscriptions.subscribe("a")(make())
    assert f"is claimed by two functions that {__name__}.test_two_handlers" in str(refused.value)
    assert "give each its own name=…" in str(refused.value)
    subscriptions.subscribe("a", name="second")(make())
    assert len(subscriptions) == 2


def test_the_same_method_of_two_objects_needs_two_names(subscriptions: Subscriptions) -> None:
    class Shop:
        def sell(self, event: Event) -> None: ...

    first, second = Shop(), Shop()
    subscriptions.subscribe("a")(first.sell)
    subscriptions.subscribe("a")(first.sell)
    with pytest.raises(DuplicateQueue):
        subscriptions.subscribe("a")(second.sell)


def test_the_same_function_again_is_no_error_and_no_second_queue(subscriptions: Subscriptions) -> None:
    for _ in range(2):
        subscriptions.subscribe("a", name="ledger")(handle)
    assert [subscription.patterns for subscription in subscriptions] == [("a",)]


def test_two_decorators_on_one_function_feed_its_queue_from_both_topics(subscriptions: Subscriptions) -> None:
    @subscriptions.subscribe("refunds.created")
    @subscriptions.subscribe("orders.created")
    def book(event: Event) -> None: ...

    assert [subscription.patterns for subscription in subscriptions] == [("orders.created", "refunds.created")]


@pytest.mark.parametrize(
    "options",
    [{"retry": RetryPolicy(2)}, {"timeout": 5.0}, {"concurrency": 1}, {"ordered": True}, {"discard_on": KeyError}],
)
def test_two_decorators_with_different_options_are_refused_instead_of_one_being_ignored(
    subscriptions: Subscriptions, options: dict[str, Any]
) -> None:
    subscriptions.subscribe("a", name="ledger")(handle)
    with pytest.raises(DuplicateQueue, match="subscribed twice with different options"):
        subscriptions.subscribe("b", name="ledger", **options)(handle)


def test_one_function_may_have_two_queues(subscriptions: Subscriptions) -> None:
    subscriptions.subscribe("a", name="first")(handle)
    subscriptions.subscribe("a", name="second")(handle)
    assert [subscription.name for subscription in subscriptions] == ["first", "second"]


MODULE = """
from registry_of_this_test import subscriptions

@subscriptions.subscribe("a"{name})
def handle(event): ...
"""


@pytest.fixture
def folder(subscriptions: Subscriptions, tmp_path: Path) -> Iterator[Path]:
    """A folder whose modules can be imported and find the registry."""
    registry: Any = types.ModuleType("registry_of_this_test")
    registry.subscriptions = subscriptions
    with forgotten_imports():
        sys.modules[registry.__name__] = registry
        sys.path.insert(0, str(tmp_path))
        yield tmp_path


@pytest.mark.parametrize("name", ["", ", name='ledger'"])
def test_a_module_that_is_imported_under_two_names_gets_no_second_queue_and_says_so(
    subscriptions: Subscriptions, folder: Path, name: str
) -> None:
    (folder / "shop").mkdir()
    file = folder / "shop" / "orders.py"
    file.write_text(MODULE.format(name=name))
    sys.path.insert(0, str(folder / "shop"))
    importlib.import_module("orders")
    with pytest.raises(DuplicateQueue) as refused:
        importlib.import_module("shop.orders")
    assert str(refused.value) == (
        f"{file.resolve()} was imported under two names, 'orders' and 'shop.orders', so that "
        f"handle (line 4) would get two queues; import it under one name everywhere"
    )
    assert len(subscriptions) == 1


def test_a_module_that_is_imported_through_a_symbolic_link_too_gets_no_second_queue(folder: Path) -> None:
    (folder / "orders.py").write_text(MODULE.format(name=""))
    (folder / "linked_orders.py").symlink_to(folder / "orders.py")
    importlib.import_module("orders")
    with pytest.raises(DuplicateQueue, match="imported under two names, 'orders' and 'linked_orders'"):
        importlib.import_module("linked_orders")


def test_code_that_comes_from_no_file_is_not_taken_for_one_module(subscriptions: Subscriptions) -> None:
    for module in ("cell_one", "cell_two"):
        names: dict[str, Any] = {"__name__": module}
        exec("def handle(event): ...", names)
        subscriptions.subscribe("a")(names["handle"])
    assert [subscription.name for subscription in subscriptions] == ["cell_one.handle", "cell_two.handle"]


def test_one_queue_name_in_two_modules_is_refused(folder: Path) -> None:
    for module in ("shop", "stock"):
        (folder / f"{module}.py").write_text(MODULE.format(name=", name='ledger'"))
    importlib.import_module("shop")
    with pytest.raises(
        DuplicateQueue, match=r"by shop\.handle \(.*shop\.py:4\) and by stock\.handle \(.*stock\.py:4\)"
    ):
        importlib.import_module("stock")


@pytest.mark.parametrize("pattern", ["", "a..b", "orders.cre*", "a b", ".a", "größe", 5, None])
def test_a_pattern_that_could_never_match_is_refused_at_the_decorator(
    subscriptions: Subscriptions, pattern: Any
) -> None:
    with pytest.raises(InvalidTopic):
        subscriptions.subscribe("orders.created", pattern)
    assert len(subscriptions) == 0


def test_a_list_of_patterns_is_refused_with_how_to_write_it(subscriptions: Subscriptions) -> None:
    with pytest.raises(InvalidTopic, match=r"one after the other: subscribe\('orders\.\*', 'refunds\.#'\)"):
        subscriptions.subscribe(["a", "b"])  # type: ignore[arg-type]


def test_a_decorator_without_topics_is_refused_instead_of_never_called(subscriptions: Subscriptions) -> None:
    with pytest.raises(ConfigurationError, match="needs the topics"):
        subscriptions.subscribe()
    with pytest.raises(ConfigurationError, match="needs the topics"):
        subscriptions.subscribe(handle)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout", 0),
        ("timeout", -1.0),
        ("timeout", math.nan),
        ("timeout", math.inf),
        ("timeout", "5"),
        ("timeout", True),
        ("timeout", 10**400),
        ("concurrency", 0),
        ("concurrency", 2.5),
        ("concurrency", True),
        ("concurrency", 10_001),
        ("retry", 3),
        ("retry", False),
        ("idempotent", 1),
        ("transactional", None),
        ("ordered", "yes"),
        ("when_exhausted", "stop"),
        ("priorities", 1),
        ("priorities", 11),
        ("priorities", True),
        ("batch", 0),
        ("batch", 10_001),
        ("batch", 2.5),
        ("start", "now"),
        ("start", None),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_its_name(
    subscriptions: Subscriptions, option: str, value: Any
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{option}=.* must be "):
        subscriptions.subscribe("a", **{option: value})


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", True])
def test_a_wait_for_a_batch_that_cannot_work_is_refused(subscriptions: Subscriptions, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^batch_wait=.* must be "):
        subscriptions.subscribe("a", batch=10, batch_wait=value)


def test_a_refused_handler_leaves_nothing_behind(subscriptions: Subscriptions) -> None:
    with pytest.raises(InvalidHandler):
        subscriptions.subscribe("a")(lambda: None)
    with pytest.raises(ConfigurationError, match="queue name"):
        subscriptions.subscribe("a", name="two words")(handle)
    assert list(subscriptions) == []


def test_only_the_chosen_queues_are_run(subscriptions: Subscriptions) -> None:
    for name in ("ledger", "mail", "stock"):
        subscriptions.subscribe("a", name=name)(handle)
    assert [chosen.name for chosen in subscriptions.only(["stock", "ledger", "stock"])] == ["stock", "ledger"]


def test_a_misspelt_queue_is_an_error_that_lists_the_known_ones(subscriptions: Subscriptions) -> None:
    for name in ("mail", "ledger"):
        subscriptions.subscribe("a", name=name)(handle)
    with pytest.raises(ConfigurationError) as refused:
        subscriptions.only(["mail", "leger"])
    assert str(refused.value) == "unknown queue 'leger'; did you mean 'ledger'? known: ledger, mail"
    with pytest.raises(ConfigurationError, match=r"unknown queue 'x'; known: ledger, mail$"):
        subscriptions.only(["x"])
    with pytest.raises(ConfigurationError, match=r"no handler is subscribed at all$"):
        Subscriptions().only(["ledger"])


def test_a_handler_that_subscribes_while_the_registry_is_read_breaks_nothing(subscriptions: Subscriptions) -> None:
    subscriptions.subscribe("a", name="first")(handle)
    for _ in subscriptions:
        subscriptions.subscribe("a", name="second")(handle)
    assert len(subscriptions) == 2


def test_a_plain_function_may_have_a_timeout(subscriptions: Subscriptions) -> None:
    subscriptions.subscribe("orders.*", timeout=3)(other)
    assert next(iter(subscriptions)).timeout == 3


def test_every_option_reaches_the_engine(subscriptions: Subscriptions) -> None:
    patient = RetryPolicy(max_attempts=20)
    subscriptions.subscribe(
        "a", name="ledger", idempotent=True, transactional=True, ordered=True, when_exhausted="skip", batch=100,
        batch_wait=2, retry_on={ConnectionError: patient}, discard_on=KeyError, start="earliest",
    )(lambda events: None)  # fmt: skip
    subscriptions.subscribe("a", name="mail", idempotent=True, priorities=3, retry=patient, retry_on=(OSError,))(other)
    subscriptions.subscribe("a", name="stock")(other)
    ledger, mail, stock = subscriptions
    assert (ledger.kind, ledger.tracking, ledger.when_exhausted) == ("ordered", "transactional", "skip")
    assert (ledger.batch, ledger.batch_wait, ledger.start) == (100, 2, "earliest")
    assert (ledger.retry_on, ledger.discard_on) == (((ConnectionError, patient),), (KeyError,))
    assert (mail.kind, mail.tracking, mail.priorities, mail.retry_on) == (
        "prioritized", "idempotent", 3, ((OSError, patient),),
    )  # fmt: skip
    assert (stock.kind, stock.tracking, stock.when_exhausted) == ("plain", "none", "park")
    assert (stock.batch, stock.start, stock.retry_on, stock.discard_on) == (None, "latest", None, ())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ordered": True, "priorities": 3}, "contradict each other"),
        ({"when_exhausted": "skip"}, "needs ordered=True"),
        ({"when_exhausted": "park"}, "needs ordered=True"),
        ({"batch_wait": 1.0}, "needs batch="),
        ({"retry_on": ()}, "names no exception"),
        ({"retry_on": {}}, "names no exception"),
        ({"retry_on": ConnectionError()}, "is no exception class"),
        ({"retry_on": {"ConnectionError": RetryPolicy()}}, "'ConnectionError' is no exception class"),
        ({"retry_on": {ConnectionError: 3}}, "the value must be a RetryPolicy"),
        ({"retry_on": (OSError, int)}, "int is no exception class"),
        ({"discard_on": "KeyError"}, "is no exception class"),
        ({"discard_on": {KeyError: RetryPolicy()}}, "is no exception class"),
    ],
)
def test_options_that_contradict_each_other_are_refused_at_decoration(
    subscriptions: Subscriptions, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        subscriptions.subscribe("a", **given)(other)
    assert len(subscriptions) == 0
