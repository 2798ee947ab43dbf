"""Nonsense from a plugin: at the start one line that names it, later a line in the log, never the publisher's error."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar, NoReturn

import pytest
from pydantic import BaseModel, field_validator

from eventbus.consuming.surrounding import Surround
from eventbus.errors import ConfigurationError, PublishVetoed
from eventbus.event import OutboxEvent
from eventbus.plugins import Call, Duty, Finding, Migration, Page, hookimpl
from eventbus.plugins.checking import listed
from eventbus.plugins.loading import Plugin, load
from eventbus.plugins.registry import Complaints, Plugins, loaded
from eventbus.publishing.interception import Interception
from eventbus.publishing.outgoing import Row, prepare
from eventbus.settings import Settings

SETTINGS = Settings(plugins=())


def said(value: object) -> str:
    """The same in every process: without the addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


class Good:
    @hookimpl
    def eventbus_claimed(self) -> None: ...


def problem(plugin: Any) -> str:
    """What is said of a plugin that is given to a bus."""
    with pytest.raises(ConfigurationError) as found:
        loaded(SETTINGS, [plugin], configure=True).require_all()
    assert "\n" not in str(found.value)
    return str(found.value)


def plugin_with(hook: str, answer: Callable[..., Any]) -> Any:
    """An instance of a class ``Faulty`` with one hook. ``answer`` takes the plugin and no argument of the hook."""

    def function(self: Any) -> Any:
        return answer()

    function.__name__ = hook
    return type("Faulty", (), {hook: hookimpl(function)})()


def raises(error: BaseException) -> Callable[..., NoReturn]:
    def raising(*_: Any, **__: Any) -> NoReturn:
        raise error

    return raising


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class SettingsOfNoModel(Good):
    Settings = 42


class SettingsOfAnotherKind(Good):
    class Settings:
        limit = 1


class SettingsThatFail(Good):
    class Settings(BaseModel):
        limit: int = 1

        @field_validator("limit", mode="before")
        @classmethod
        def failing(cls, value: object) -> NoReturn:
            raise KeyError(value)

    def __init__(self, settings: Settings) -> None: ...


class NoVersion(Good):
    minimum_eventbus = "soon"


class NumbersForAVersion(Good):
    minimum_eventbus = (1, 2)


class Ending(Good):
    def __init__(self) -> None:
        raise BaseException("bb")  # noqa: TRY002 - what a plugin may do


class MuteAtFirst(Good):
    def __init__(self) -> None:
        raise Mute


class Async:
    @hookimpl
    async def eventbus_limit_claim(self) -> int:
        return 0


class AsyncOfALostLease:
    @hookimpl
    async def eventbus_lease_lost(self) -> None: ...


class Generator:
    @hookimpl
    def eventbus_veto_publish(self) -> Iterator[str]:
        yield "no"


class AsyncGenerator:
    @hookimpl
    async def eventbus_worker_ready(self) -> AsyncIterator[None]:
        yield


class Static:
    @staticmethod
    @hookimpl
    async def eventbus_settled() -> None: ...


class AnswersEverything:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: name


class WithoutNames(Good):
    def __dir__(self) -> NoReturn:
        raise SystemExit(5)


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (SettingsOfNoModel, "Settings has to be a class, a pydantic model; it is 42"),
        (SettingsOfAnotherKind, "Settings has to be a class, a pydantic model"),
        (NoVersion, "minimum_eventbus is no version: 'soon'; write it as '1.2'"),
        (NumbersForAVersion, "minimum_eventbus is no version: (1, 2); write it as '1.2'"),
        (Ending, "failed to start: BaseException: bb"),
        (MuteAtFirst, "failed to start: Mute: (it cannot say what)"),
        (Async, "eventbus_limit_claim is not awaited; write it as def, not as async def"),
        (AsyncOfALostLease, "eventbus_lease_lost is not awaited"),
        (Static, "eventbus_settled is not awaited"),
        (Generator, "eventbus_veto_publish is a generator, which nobody runs"),
        (AsyncGenerator, "eventbus_worker_ready is an async generator, which nobody runs"),
        (WithoutNames(), "its hooks cannot be found: SystemExit: 5"),
        (plugin_with("eventbus_configure", raises(SystemExit(3))), "eventbus_configure failed: SystemExit: 3"),
        (plugin_with("eventbus_configure", raises(asyncio.CancelledError())), "eventbus_configure failed: Cancelled"),
        (plugin_with("eventbus_configure", raises(Mute())), "eventbus_configure failed: Mute: (it cannot say what)"),
    ],
)
def test_a_plugin_that_cannot_be_one_is_named_with_what_is_wrong(plugin: Any, words: str) -> None:
    assert words in (said := problem(plugin))
    assert said.startswith("plugin ")
    assert "given to EventBus as" in said


def test_settings_that_fail_in_their_own_way_are_named() -> None:
    settings = Settings(plugins=(), plugin_settings={"settings_that_fail": {"limit": 2}})
    [found] = loaded(settings, [SettingsThatFail]).problems
    assert "plugin settings_that_fail" in str(found)
    assert "its Settings failed: KeyError: 2" in str(found)


@pytest.mark.parametrize("attribute", ["NOTHING", "NUMBER", "TEXT", "function"])
def test_an_attribute_that_is_no_plugin_is_refused(attribute: str) -> None:
    plugins, problems = load(Settings(plugins=(f"{__name__}:{attribute}",)))
    found = Plugins(plugins, problems).problems
    assert ["is no plugin" in str(each) and __name__ in str(each) for each in found] == [True]


NOTHING, NUMBER, TEXT, ANYTHING = None, 42, "a text", AnswersEverything()


def test_an_object_that_answers_everything_is_asked_nothing() -> None:
    plugins, problems = load(Settings(plugins=(f"{__name__}:ANYTHING",)))
    assert not Plugins(plugins, problems).problems
    assert [plugin.settings for plugin in plugins] == [None]


def function() -> None: ...


class Properties:
    """Nobody looks at its properties."""

    looked: ClassVar[list[str]] = []

    @property
    def connection(self) -> NoReturn:
        self.looked.append("connection")
        raise SystemExit(5)

    @hookimpl
    def eventbus_claimed(self) -> None: ...


def test_no_property_of_a_plugin_runs_because_it_is_loaded() -> None:
    plugins = loaded(SETTINGS, [Properties])
    assert [(plugin.name, plugins.hooks_of(plugin)) for plugin in plugins] == [("properties", ["eventbus_claimed"])]
    assert Properties.looked == []


def test_ctrl_c_is_no_mistake_of_the_plugin_that_it_hits() -> None:
    with pytest.raises(KeyboardInterrupt):
        loaded(SETTINGS, [plugin_with("eventbus_configure", raises(KeyboardInterrupt()))], configure=True)


class Handed:
    """A hook on the instance counts as one."""

    def __init__(self) -> None:
        self.eventbus_claimed = Good().eventbus_claimed


def test_hooks_that_an_instance_got_from_elsewhere_are_found() -> None:
    plugins = loaded(SETTINGS, [Handed()])
    assert not plugins.problems
    assert len(plugins.of("eventbus_claimed")) == 1


async def work(_: Any) -> int:
    return 0


def answer(_: Mapping[str, str]) -> Any:
    """Of a page that nobody opens."""


def unfinished() -> Iterator[Duty]:
    yield Duty("tidy", 1.0, work)
    raise SystemExit(3)


NONE: Any = None
LISTS: Mapping[str, tuple[type, Callable[[Plugins], Any]]] = {
    "eventbus_duties": (Duty, lambda plugins: plugins.duties(SETTINGS)),
    "eventbus_migrations": (Migration, lambda plugins: plugins.migrations()),
    "eventbus_pages": (Page, lambda plugins: plugins.pages(NONE)),
}


@pytest.mark.parametrize("hook", LISTS)
@pytest.mark.parametrize("given", [42, [42], "abc", [NONE], [Good()]], ids=said)
def test_what_is_no_list_of_the_right_things_is_named(hook: str, given: object) -> None:
    kind, ask = LISTS[hook]
    with pytest.raises(ConfigurationError) as refused:
        ask(loaded(SETTINGS, [plugin_with(hook, lambda: given)]))
    assert str(refused.value).startswith("plugin faulty (given to EventBus as Faulty): ")
    assert f"{hook} returns " in str(refused.value)
    assert f"{kind.__name__} objects, not " in str(refused.value)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (Duty("x", -1.0, NONE), "every"),
        (Duty("x", math.inf, work), "every"),
        (Duty("x", True, work), "every"),
        (Duty("x", 1.0, NONE), "run"),
        (Duty("", 1.0, work), "name"),
        (Migration(NONE, NONE), "name"),
        (Migration("0001_x", NONE), "sql"),
        (Migration("0001_x", "-- x", {"x": "SELECT"}), "rights"),  # type: ignore[dict-item]
        (Migration("0001_x", "-- x", NONE), "rights"),
        (Page(NONE, NONE), "path"),
        (Page("/x", NONE), "answer"),
        (Page("/x", answer, NONE), "title"),
        (Finding("purple", "x", "x"), "level"),  # type: ignore[arg-type]
        (Finding(["ok"], "x", "x"), "level"),  # type: ignore[arg-type]
        (Finding("ok", NONE, "x"), "code"),
        (Finding("ok", "x", NONE), "message"),
        (Finding("ok", "x", "x", 3), "hint"),  # type: ignore[arg-type]
    ],
    ids=said,
)
def test_a_value_that_cannot_be_is_named_with_its_field(value: Any, field: str) -> None:
    plugin = Plugin("faulty", Good(), "a test")
    with pytest.raises(ConfigurationError) as refused:
        listed(plugin, "eventbus_x", [value], type(value))
    said = str(refused.value)
    assert said.startswith(
        f"plugin faulty (a test): eventbus_x returns a {type(value).__name__} whose {field} cannot be "
    )


def test_a_list_that_fails_half_way_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"plugin faulty .*eventbus_duties.*SystemExit: 3"):
        loaded(SETTINGS, [plugin_with("eventbus_duties", unfinished)]).duties(SETTINGS)


@pytest.mark.parametrize(
    "value",
    [
        Duty("tidy", 1, work),
        Migration("0001_x", "-- x", {"x": ("SELECT",)}),
        Page("/x", answer),
        Finding("stalled", "x", "x", "do"),
    ],
)
def test_values_that_can_be_are_taken_from_a_list_or_a_generator(value: Any) -> None:
    plugin = Plugin("good", Good(), "a test")
    for given in ([value], (value,), iter([value])):
        assert listed(plugin, "eventbus_x", given, type(value)) == [value]


def publish(plugin: Any, *topics: str) -> Sequence[Row]:
    """Publish events with nothing but this plugin, and no database."""
    plugins = loaded(SETTINGS, [plugin])
    assert not plugins.problems
    events = [OutboxEvent(topic, 1) for topic in topics]
    rows = [prepare(event, max_bytes=1_000) for event in events]
    with Interception(plugins, None).publish(events, rows) as sent:
        return sent


@pytest.mark.parametrize("said", [False, True, "", " ", 0, 42, [], Mute()], ids=said)
def test_what_is_no_reason_refuses_no_event_and_is_complained_about(
    said: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(publish(plugin_with("eventbus_veto_publish", lambda: said), "a")) == 1
    [line] = caplog.records
    assert line.getMessage().startswith("plugin faulty: eventbus_veto_publish failed and is left out: TypeError: ")


def test_a_reason_refuses_the_event() -> None:
    with pytest.raises(PublishVetoed, match="plugin faulty refuses to publish on a: closed"):
        publish(plugin_with("eventbus_veto_publish", lambda: "closed"), "a")


class Clearing:
    @hookimpl
    def eventbus_around_publish(self, events: Any) -> None:
        events.clear()


class Replacing:
    @hookimpl
    def eventbus_around_publish(self, events: Any) -> None:
        events[0] = None


@pytest.mark.parametrize("plugin", [Clearing(), Replacing()])
def test_who_surrounds_a_publish_cannot_take_its_events_away(plugin: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert [row.topic for row in publish(plugin, "a", "b")] == ["a", "b"]
    assert "eventbus_around_publish failed and is left out" in caplog.text


class Surrounding:
    """Notes what it is told, and waits where it is told to."""

    def __init__(self, waits: str) -> None:
        self.waits = waits
        self.notes: list[str] = []
        self.waiting = asyncio.Event()

    async def at(self, point: str) -> None:
        if point == self.waits:
            self.waiting.set()
            await asyncio.Event().wait()

    @contextmanager
    def outer(self, _: Call) -> Iterator[None]:
        try:
            yield
        finally:
            self.notes.append("outer left")

    @asynccontextmanager
    async def first(self, _: Call) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.notes.append("first left")

    @asynccontextmanager
    async def second(self, _: Call) -> AsyncIterator[None]:
        await self.at("enter")
        try:
            yield
        finally:
            await self.at("leave")

    async def attempt(self) -> None:
        self.notes.append("handled")
        await self.at("handle")


@pytest.mark.parametrize(
    ("waits", "handled"), [("enter", []), ("handle", ["handled"]), ("leave", ["handled"])], ids=str
)
async def test_a_call_that_is_cancelled_leaves_all_that_was_entered(waits: str, handled: list[str]) -> None:
    them = Surrounding(waits)
    surround = Surround("q", Complaints(), [("o", them.outer)], [("f", them.first), ("s", them.second)])
    attempt = them.attempt()
    call = asyncio.create_task(surround.running([], attempt))
    await asyncio.wait_for(them.waiting.wait(), 5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert them.notes == [*handled, "first left", "outer left"]
    with pytest.raises(RuntimeError, match="cannot reuse"):
        await attempt


def test_two_steps_of_one_name_are_refused_before_one_of_them_is_lost() -> None:
    step = Migration("0001_notes", "-- Notes.\nCREATE TABLE {schema}.notes (n integer);")
    twice = loaded(SETTINGS, [plugin_with("eventbus_migrations", lambda: [step, step])])
    with pytest.raises(
        ConfigurationError, match="plugin faulty: eventbus_migrations returns two steps named 0001_notes"
    ):
        twice.migrations()
    others = [type(name, (), {"eventbus_migrations": hookimpl(lambda self: [step])})() for name in ("One", "Two")]
    assert [name for name, _ in loaded(SETTINGS, others).migrations()] == ["one", "two"]
