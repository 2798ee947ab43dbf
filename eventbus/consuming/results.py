"""What came out of a handler: an outcome, or a failure in a form that can be stored.

Before it: the consumer called a handler. After it: the engine settles the outcome. Nothing that a handler returned
or raised makes the reading of it fail.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from eventbus.retry import LONGEST_WAIT
from eventbus.transport import DeadLetter, Discard, Done, Outcome, Released, Retry

_DONE: Final = Done()
_LONGEST_TEXT: Final = 8_192
_LONGEST_TYPE_NAME: Final = 300


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as text that PostgreSQL can store as ``text`` and as ``json``.

    ``message`` and ``traceback`` are at most 8 KiB of UTF-8 each, cut in the middle.
    """

    type: str
    message: str
    traceback: str


async def conclude(result: Any) -> Outcome:
    """Wait for what a handler returned, then read it; the last step of every call of a handler.

    Awaits coroutines, other awaitables and futures of a thread pool until something else comes out, so that a plain
    function that returns a coroutine is never done before that coroutine is. What the awaited code raises passes
    through. Run it inside the handler's timeout and context.
    """
    return outcome_of(await finished(result))


async def finished(result: Any) -> Any:
    """What comes out in the end of what a handler returned; see :func:`conclude`."""
    while needs_waiting(result):
        result = await (asyncio.wrap_future(result) if isinstance(result, concurrent.futures.Future) else result)
    return result


def needs_waiting(result: object) -> bool:
    """True for what stands for unfinished work: a coroutine, another awaitable, a future of a thread pool."""
    return result is not None and (inspect.isawaitable(result) or isinstance(result, concurrent.futures.Future))


def outcome_of(result: object) -> Outcome:
    """The outcome that a finished handler's return value means; never raises.

    None is done, an outcome is itself, its class is the outcome without details. Any other plain value is done and
    ignored. What shows that the work did not happen (a generator, a coroutine, a returned exception) or makes no
    sense (``Released``) is a failed attempt with the reason.
    """
    if result is None:
        return _DONE
    if isinstance(result, type) and issubclass(result, Done | Retry | Discard | DeadLetter | Released):
        result = result()
    match result:
        case Done():
            return _DONE
        case Retry(after, reason):
            return _retry(after, reason)
        case Discard(reason):
            return Discard(_reason(reason))
        case DeadLetter(reason):
            return DeadLetter(_reason(reason))
        case _:
            problem = _why_not_done(result)
            return _DONE if problem is None else Retry(reason=problem)


def outcomes_of(result: object, events: int) -> Sequence[Outcome | BaseException]:
    """What the finished call of a handler of batches means for each of its events, in their order.

    A list or a tuple has one result per event, read as by :func:`outcome_of`; an exception in it is the failure of
    its event. Any other value means the same for all events. A list of another length is a failed attempt of all.
    """
    if not isinstance(result, list | tuple):
        return [outcome_of(result)] * events
    if len(result) != events:
        return [Retry(reason=f"the handler returned {len(result)} results for {events} events")] * events
    return [each if isinstance(each, BaseException) else outcome_of(each) for each in result]


def _why_not_done(result: object) -> str | None:
    if isinstance(result, Released):
        return "the handler returned Released, which only the bus may; return Retry(after=…) instead"
    if isinstance(result, BaseException):
        return f"the handler returned {_name(type(result))} instead of raising it"
    if needs_waiting(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        return f"the handler returned a {type(result).__name__} that nobody waited for; await it or loop over it"
    return None


def failure(error: BaseException) -> Failure:
    """What to store about an exception; never raises, whatever the exception's own methods do, and never pickles."""
    return Failure(
        type=_storable(_name(type(error)), _LONGEST_TYPE_NAME),
        message=_storable(_text(error), _LONGEST_TEXT),
        traceback=_storable(_traceback(error), _LONGEST_TEXT),
    )


def _retry(after: object, reason: object) -> Retry:
    if after is None:
        return Retry(None, _reason(reason))
    try:
        seconds = after.total_seconds() if isinstance(after, timedelta) else float(after)  # type: ignore[arg-type]
    except OverflowError:
        seconds = math.inf
    except Exception:  # noqa: BLE001 - what a handler passed may be anything
        seconds = math.nan
    if math.isnan(seconds):
        wrong = f"Retry(after={type(after).__name__}) is no number of seconds, so the retry policy decided"
        return Retry(None, wrong if reason is None else f"{_reason(reason)} ({wrong})")
    return Retry(min(max(seconds, 0.0), LONGEST_WAIT), _reason(reason))


def _reason(reason: object) -> str | None:
    return None if reason is None else _storable(_text(reason), _LONGEST_TEXT)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(value: object) -> str:
    try:
        return "".join([str(value)])  # what __str__ returned may be a text with methods of its own
    except BaseException as error:  # noqa: BLE001 - whatever __str__ does, the failure itself must be recorded
        return f"<no text: str() of {_name(type(value))} raised {_name(type(error))}>"


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as problem:  # noqa: BLE001 - an exception class may override what traceback reads
        return f"<no traceback: formatting it raised {_name(type(problem))}>"


def _storable(text: str, longest: int) -> str:
    """Text without NUL and lone surrogates (shown as escapes), cut in the middle to ``longest`` bytes of UTF-8."""
    if len(text) <= longest:
        clean = _escaped(text)
        if len(clean) <= longest:
            return clean.decode()
    mark = f"\n… {len(text):,} characters, cut here …\n"
    half = (longest - len(mark.encode())) // 2
    head, tail = _escaped(text[:half])[:half], _escaped(text[-half:])[-half:]
    return head.decode(errors="ignore") + mark + tail.decode(errors="ignore")


def _escaped(text: str) -> bytes:
    return text.replace("\0", "\\x00").encode(errors="backslashreplace")


def refuse_unfinished(result: Any) -> Any:
    """The transaction of a plain handler ends with it, so nothing of it may go on later."""
    if not needs_waiting(result):
        return result
    if asyncio.iscoroutine(result):
        result.close()
    raise TypeError(
        f"a plain handler with transactional=True returned a {type(result).__name__}, which would run after its "
        "transaction; make the handler async def"
    )
