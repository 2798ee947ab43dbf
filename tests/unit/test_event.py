"""The event that a handler sees, and the ids that publishers give."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from eventbus import event as module
from eventbus.event import Event, current_event, new_event_id


def make(**changes: Any) -> Event:
    values: dict[str, Any] = {
        "event_id": "01a22c4e-7596-7514-aa0a-605ce5f1f2a9",
        "topic": "orders.created",
        "payload": '{"n":[1]}',
        "headers": None,
        "key": None,
        "published_at": datetime(2026, 11, 30, tzinfo=UTC),
        "queue": "billing",
    }
    return Event(**(values | changes))


def test_a_payload_that_changes_in_one_handler_is_unchanged_in_the_next() -> None:
    first, second = make(), make()
    first.payload["n"].append(2)
    assert first.payload == {"n": [1, 2]}
    assert second.payload == {"n": [1]}
    assert first.payload_text == '{"n":[1]}'


def test_big_integers_reach_the_handler_exactly() -> None:
    numbers = [2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30]
    payload = make(payload=str(numbers)).payload
    assert payload == numbers
    assert all(type(number) is int for number in payload)


def test_a_payload_is_decoded_once_and_only_if_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def count(text: str) -> object:
        seen.append(text)
        return None

    monkeypatch.setattr(module, "decode", count)
    event = make(payload="null")
    assert seen == []
    assert event.payload is None
    assert event.payload is None
    assert seen == ["null"]


def test_an_event_takes_no_attributes_of_others_so_that_millions_stay_small() -> None:
    with pytest.raises(AttributeError):
        make().extra = 1  # type: ignore[attr-defined]


def test_headers_cannot_be_changed_under_the_next_reader() -> None:
    event = make(headers='{"tenant":"a\\u0000"}')
    assert event.headers == {"tenant": "a\0"}
    assert event.headers.get("other") is None
    with pytest.raises(TypeError):
        event.headers["tenant"] = "b"  # type: ignore[index]
    assert make().headers == {}


@pytest.mark.parametrize(
    ("stored", "read"),
    [('{"a":1,"b":null,"c":["x"]}', {"a": "1", "b": "null", "c": '["x"]'}), ("[1]", {}), ("null", {}), ("7", {})],
)
def test_headers_that_sql_stored_in_another_form_do_not_stop_the_handler(stored: str, read: dict[str, str]) -> None:
    assert make(headers=stored).headers == read


def test_the_correlation_id_is_the_header_or_else_the_event_itself() -> None:
    assert make(headers='{"correlation-id":"request-7"}').correlation_id == "request-7"
    assert make().correlation_id == "01a22c4e-7596-7514-aa0a-605ce5f1f2a9"
    assert make(headers='{"correlation-id":""}').correlation_id == str(make().event_id)


def test_a_handler_can_tell_a_replay_and_a_redriven_dead_letter_from_the_first_time() -> None:
    first, replayed, redriven = make(), make(replay_id=3), make(redriven=True)
    assert (first.replay_id, first.is_replay, first.redriven) == (0, False, False)
    assert (replayed.replay_id, replayed.is_replay, replayed.redriven) == (3, True, False)
    assert (redriven.replay_id, redriven.is_replay, redriven.redriven) == (0, False, True)


def test_the_event_id_is_a_uuid_object() -> None:
    assert make().event_id == uuid.UUID("01a22c4e-7596-7514-aa0a-605ce5f1f2a9")


def test_a_log_line_shows_which_delivery_it_was_and_not_the_payload() -> None:
    shown = repr(make(payload='"secret"', attempt=3))
    assert shown == "<Event orders.created 01a22c4e-7596-7514-aa0a-605ce5f1f2a9 queue=billing attempt=3>"


def same_moment() -> int:
    return 1_795_000_000_000_000_000


async def test_tasks_handle_different_events_at_once_without_mixing_them_up() -> None:
    both_set = asyncio.Barrier(2)

    async def handle(event: Event) -> Event | None:
        current_event.set(event)
        await both_set.wait()
        return current_event.get()

    first, second = make(), make()
    assert list(await asyncio.gather(handle(first), handle(second))) == [first, second]
    assert current_event.get() is None


def test_ids_are_version_7_and_carry_the_time_so_that_indexes_stay_compact() -> None:
    made = new_event_id(lambda: 1_795_000_000_123_456_789)
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == 1_795_000_000_123
    assert (made.int >> 64) & 0xFFF == 456_789 * 4096 // 1_000_000


def test_ids_ascend_with_the_clock_so_that_events_sort_as_they_were_made() -> None:
    ticks = iter(range(1_795_000_000_000_000_000, 1_795_000_000_010_000_000, 250))
    made = [new_event_id(lambda: next(ticks)) for _ in range(40_000)]
    assert made == sorted(made)
    assert len(set(made)) == 40_000


@pytest.mark.parametrize("nanoseconds", [0, 999_999, 1_000_000, 2**48 * 1_000_000 - 1, 2**48 * 1_000_000, -1])
def test_no_moment_even_of_a_clock_that_is_wrong_spills_into_the_version_bits(nanoseconds: int) -> None:
    made = new_event_id(lambda: nanoseconds)
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == nanoseconds // 1_000_000 % 2**48


def test_equally_seeded_programs_never_make_the_same_id() -> None:
    made = set()
    for _ in range(10):
        random.seed(0)
        made.add(new_event_id(same_moment))
    assert len(made) == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # whoever runs the tests may have threads
def test_a_forked_child_never_makes_the_ids_of_its_parent() -> None:
    new_event_id(same_moment)
    children = {_in_child(lambda: new_event_id(same_moment)) for _ in range(4)}
    assert len(children | {new_event_id(same_moment)}) == 5


def _in_child(make_id: Callable[[], uuid.UUID]) -> uuid.UUID:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, make_id().bytes)
        os._exit(0)
    os.waitpid(pid, 0)
    made = os.read(reader, 16)
    os.close(reader)
    os.close(writer)
    return uuid.UUID(bytes=made)
