"""Reading what a handler returned or raised: what a user would lose if it were read wrongly."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from eventbus.consuming.results import Failure, conclude, failure, needs_waiting, outcome_of
from eventbus.retry import LONGEST_WAIT
from eventbus.transport import DeadLetter, Discard, Done, Outcome, Released, Retry
from tests.servers import Server


def reason_of(outcome: Outcome) -> str:
    assert isinstance(outcome, Retry | Discard | DeadLetter)
    assert outcome.reason is not None
    return outcome.reason


@pytest.mark.parametrize("result", [None, Done(), Done, 0, False, True, "text", {"id": 1}, [], object()])
def test_a_handler_that_returns_some_value_of_its_own_is_done_and_not_repeated(result: object) -> None:
    assert outcome_of(result) == Done()


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (Retry(after=5.0, reason="busy"), Retry(after=5.0, reason="busy")),
        (Retry, Retry()),
        (Discard("test order"), Discard("test order")),
        (Discard, Discard()),
        (DeadLetter("fraud"), DeadLetter("fraud")),
        (DeadLetter, DeadLetter()),
    ],
)
def test_a_returned_outcome_or_its_class_is_what_happens(result: object, outcome: Outcome) -> None:
    assert outcome_of(result) == outcome


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        (3, 3.0),
        (timedelta(minutes=5), 300.0),
        (Decimal("1.5"), 1.5),
        (-4.2, 0.0),
        (0, 0.0),
        (math.inf, LONGEST_WAIT),
        (10**400, LONGEST_WAIT),
        (timedelta.max, LONGEST_WAIT),
    ],
)
def test_a_retry_wait_of_any_number_fits_the_database_instead_of_failing_the_settle(after: Any, seconds: float) -> None:
    assert outcome_of(Retry(after=after)) == Retry(after=seconds)


@pytest.mark.parametrize("after", [math.nan, "soon", object(), [1]])
def test_a_retry_wait_that_is_no_number_leaves_the_wait_to_the_policy_and_says_so(after: Any) -> None:
    outcome = outcome_of(Retry(after=after, reason="busy"))
    assert isinstance(outcome, Retry)
    assert outcome.after is None
    assert reason_of(outcome).startswith("busy (")
    assert "no number of seconds" in reason_of(outcome)
    assert "no number of seconds" in reason_of(outcome_of(Retry(after=after)))


@pytest.mark.parametrize("kind", [Retry, Discard, DeadLetter])
def test_a_reason_that_postgresql_cannot_store_does_not_fail_the_settle(kind: Any) -> None:
    assert reason_of(outcome_of(kind(reason="a\0b \ud83d"))) == "a\\x00b \\ud83d"
    assert reason_of(outcome_of(kind(reason=ValueError("no text")))) == "no text"
    assert 8_100 < len(reason_of(outcome_of(kind(reason="x" * 1_000_000))).encode()) <= 8_192


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("result", [generator(), async_generator(), concurrent.futures.Future()])
def test_work_that_was_only_prepared_is_never_done(result: object) -> None:
    outcome = outcome_of(result)
    assert isinstance(outcome, Retry)
    assert type(result).__name__ in reason_of(outcome)


def test_a_coroutine_that_nobody_waited_for_is_never_done() -> None:
    async def work() -> None: ...

    coroutine = work()
    outcome = outcome_of(coroutine)
    coroutine.close()
    assert isinstance(outcome, Retry)
    assert "coroutine" in reason_of(outcome)


def test_an_exception_that_was_returned_instead_of_raised_is_never_done() -> None:
    outcome = outcome_of(ValueError("card refused"))
    assert isinstance(outcome, Retry)
    assert "ValueError" in reason_of(outcome)


@pytest.mark.parametrize("result", [Released(), Released])
def test_a_handler_cannot_give_its_event_back_for_ever_without_an_attempt(result: object) -> None:
    outcome = outcome_of(result)
    assert isinstance(outcome, Retry)
    assert "Released" in reason_of(outcome)


async def test_a_returned_coroutine_runs_to_its_end_before_the_event_is_done() -> None:
    ran = []

    async def inner() -> Retry:
        ran.append("inner")
        return Retry(after=7)

    async def outer() -> Any:
        ran.append("outer")
        return inner()

    assert await conclude(outer()) == Retry(after=7.0)
    assert ran == ["outer", "inner"]


async def test_a_returned_task_or_pool_future_is_waited_for() -> None:
    async def refuse() -> DeadLetter:
        return DeadLetter("no")

    assert await conclude(asyncio.ensure_future(refuse())) == DeadLetter("no")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        gate = threading.Event()
        waiting = asyncio.ensure_future(conclude(pool.submit(lambda: gate.wait() and Discard("seen"))))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        assert await waiting == Discard("seen")


async def test_what_a_returned_coroutine_raises_is_a_failure_of_the_handler() -> None:
    async def fail() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await conclude(fail())


async def test_plain_results_need_no_waiting() -> None:
    for result in (None, 1, "text", Retry(), generator()):
        assert not needs_waiting(result)
    assert await conclude(None) == Done()


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__()
        self.code = code
        self.text = text


class HoldsLock(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Treacherous(str):
    """A text whose methods cannot be relied on."""

    __slots__ = ()

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def replace(self, *args: Any, **kwargs: Any) -> str:
        raise RuntimeError("no replacement")


class PrintsTreacherously(Exception):
    def __str__(self) -> str:
        return Treacherous("a text")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class PrintsNothing(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]  # noqa: PLE0307 - what a careless class does


class ExitsWhenPrinted(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def raised(error: BaseException) -> Failure:
    with pytest.raises(type(error)) as caught:
        raise error
    return failure(caught.value)


def local_error() -> BaseException:
    class Local(Exception):
        pass

    return Local("inside a function")


def with_note() -> BaseException:
    error = ValueError("with a note")
    error.add_note("note \0 with NUL")
    return error


HOSTILE = [
    ValueError("a\0b"),
    ValueError("half \ud83d of a pair"),
    ValueError(b"\xff\x00 bytes", 3),
    ValueError("x" * 1_000_000),
    ValueError("\0" * 1_000_000),
    ValueError("€" * 3_000),
    ValueError("a" + "😀" * 30_000_000),
    ValueError("\ud83d" * 3_000),
    PrintsTreacherously(),
    TwoArguments(4, "four"),
    HoldsLock(),
    Unprintable(),
    PrintsNothing(),
    ExitsWhenPrinted(),
    local_error(),
    with_note(),
    ExceptionGroup("many", [ValueError("a\0"), Unprintable()]),
    SystemExit(0),
    KeyboardInterrupt(),
    GeneratorExit(),
]


@pytest.mark.parametrize("error", HOSTILE, ids=lambda error: type(error).__name__)
def test_every_failure_can_be_recorded_so_that_no_event_is_stuck_behind_its_own_error(error: BaseException) -> None:
    recorded = raised(error)
    for text, longest in ((recorded.type, 300), (recorded.message, 8_192), (recorded.traceback, 8_192)):
        assert "\0" not in text
        assert len(text.encode()) <= longest
    assert type(error).__qualname__ in recorded.type
    assert recorded.traceback.startswith(("Traceback", "  + Exception Group Traceback"))


def test_postgresql_takes_every_recorded_failure_as_text_and_as_json(server: Server) -> None:
    with psycopg.connect(server.admin_dsn, autocommit=True) as conn:
        for error in HOSTILE:
            recorded = raised(error)
            document = json.dumps({"message": recorded.message, "traceback": recorded.traceback})
            row = conn.execute(
                "SELECT %s::text, %s::jsonb ->> 'message', %s::json ->> 'traceback'",
                (recorded.message, document, document),
            ).fetchone()
            assert row == (recorded.message, recorded.message, recorded.traceback)


def test_the_type_and_text_of_a_failure_are_what_its_author_wrote() -> None:
    recorded = raised(ValueError("amount is 3.50 €"))
    assert (recorded.type, recorded.message) == ("ValueError", "amount is 3.50 €")
    assert recorded.traceback.endswith("ValueError: amount is 3.50 €\n")
    assert raised(TwoArguments(1, "b")).type == f"{__name__}.TwoArguments"
    assert raised(ValueError("a\0b")).message == "a\\x00b"


def test_a_huge_message_hides_neither_where_it_happened_nor_how_it_ends() -> None:
    recorded = raised(ValueError("start " + "x" * 1_000_000 + " end"))
    assert recorded.message.startswith("start x")
    assert recorded.message.endswith("x end")
    assert "1,000,010 characters, cut here" in recorded.message
    assert "in raised" in recorded.traceback


def test_a_failure_without_a_readable_text_still_tells_its_type() -> None:
    recorded = raised(Unprintable())
    assert recorded.message == f"<no text: str() of {__name__}.Unprintable raised RuntimeError>"


def test_the_cut_is_at_8_kib_of_utf_8_and_never_inside_a_character() -> None:
    assert raised(ValueError("x" * 8_192)).message == "x" * 8_192
    assert raised(ValueError("€" * 2_730)).message == "€" * 2_730
    recorded = raised(ValueError("€" * 2_731)).message
    assert "2,731 characters, cut here" in recorded
    assert 8_100 < len(recorded.encode()) <= 8_192
    assert set(recorded.replace("\n… 2,731 characters, cut here …\n", "")) == {"€"}
