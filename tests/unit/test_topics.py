"""Names that travel with an event: what a user would lose if a rule or the matcher were wrong."""

from __future__ import annotations

import random
import re
import time
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventbus.errors import ConfigurationError, InvalidHeaders, InvalidKey, InvalidTopic, PublishError
from eventbus.topics import (
    compile_pattern,
    matches,
    validate_headers,
    validate_key,
    validate_pattern,
    validate_priority,
    validate_queue_name,
    validate_topic,
)


class Topics(StrEnum):
    CREATED = "orders.created"


@pytest.mark.parametrize("topic", ["a", "orders.created", "Orders.Created", "a_b", "a-b.c_d", "0.1", "null", "x" * 255])
def test_a_good_topic_is_accepted_as_it_is_because_capitals_and_underscores_tell_topics_apart(topic: str) -> None:
    assert validate_topic(topic) == topic


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("", "not empty"),
        ("a..c", "empty word"),
        (".a", "empty word"),
        ("a.", "empty word"),
        ("orders.*", "wildcard"),
        ("#", "wildcard"),
        ("a%b", "'%'"),
        ("two words", "' '"),
        ("o'r", '"\'"'),
        ('o"r', "'\"'"),
        ("a;--", "';'"),
        ("a\\b", r"'\\\\'"),
        ("%s", "'%'"),
        ("%(x)s", "'%'"),
        ("orders.created\n", r"'\\n'"),
        ("bücher", "'ü'"),
        ("a\0b", r"'\\x00'"),
        ("a\ud83d", r"'\\ud83d'"),
        ("٣", "'٣'"),
        ("x" * 256, "256 bytes"),
        ("ü" * 200, "400 bytes"),
        (7, "not int"),
        (None, "not NoneType"),
        (b"a", "not bytes"),
    ],
)
def test_a_bad_topic_is_refused_with_what_is_wrong_instead_of_failing_in_sql(topic: Any, hint: str) -> None:
    with pytest.raises(InvalidTopic, match=hint):
        validate_topic(topic)


def test_a_topic_from_an_enum_becomes_plain_text_so_that_no_driver_sends_something_else() -> None:
    assert type(validate_topic(Topics.CREATED)) is str
    assert validate_topic(Topics.CREATED) == "orders.created"


@pytest.mark.parametrize("pattern", ["#", "*", "orders.*", "#.created", "a.#.b", "user_x.*"])
def test_a_good_pattern_is_accepted(pattern: str) -> None:
    assert validate_pattern(pattern) == pattern


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("user_*", "whole words"), ("a.b#", "whole words"), ("**", "whole words"), ("a..#", "empty word"), ("a%", "'%'")],
)
def test_a_wildcard_inside_a_word_is_refused_because_it_would_look_like_a_match_and_never_be_one(
    pattern: str, hint: str
) -> None:
    with pytest.raises(InvalidTopic, match=hint):
        validate_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "fits", "misses"),
    [
        ("orders.*", ["orders.created"], ["orders.created.eu", "orders", "xorders.created", "orders."]),
        ("orders.#", ["orders", "orders.created", "orders.created.eu"], ["order", "xorders", "ordersx.a"]),
        ("a.*.c", ["a.b.c"], ["a.b.x.c", "a.c", "a..c", "a.b.cc"]),
        ("a.#.b", ["a.b", "a.x.b", "a.x.y.b", "a.b.b"], ["a", "b", "a.b.c", "ab"]),
        ("#", ["a", "a.b"], [""]),
        ("*", ["a"], ["a.b", ""]),
        ("#.*", ["a", "a.b"], [""]),
        ("*.#.*", ["a.b", "a.x.b"], ["a"]),
        ("#.a.#", ["a", "a.a", "x.a.y"], ["b", "aa", "x.y"]),
        ("a_b", ["a_b"], ["aXb", "a.b", "a-b"]),
        ("Orders.Created", ["Orders.Created"], ["orders.created"]),
    ],
)
def test_a_queue_gets_exactly_the_topics_that_it_bound(pattern: str, fits: list[str], misses: list[str]) -> None:
    matcher = compile_pattern(pattern)
    assert [topic for topic in fits if not matcher.matches(topic)] == []
    assert [topic for topic in misses if matcher.matches(topic)] == []


def translated(pattern: str) -> re.Pattern[str]:
    """The same rules a second time, as a regular expression over ``.word`` sequences."""
    parts = {"*": r"\.[^.]+", "#": r"(?:\.[^.]+)*"}
    return re.compile("".join(parts.get(word, re.escape("." + word)) for word in pattern.split(".")))


def test_the_matcher_agrees_with_the_rules_written_a_second_time_on_10_000_random_pairs() -> None:
    draw = random.Random(20261130)
    found = set()
    for _ in range(10_000):
        pattern = ".".join(draw.choices(["a", "b", "c", "*", "#"], k=draw.randint(1, 5)))
        topic = ".".join(draw.choices(["a", "b", "c"], k=draw.randint(1, 6)))
        expected = translated(pattern).fullmatch("." + topic) is not None
        assert matches(pattern, topic) is expected, (pattern, topic)
        found.add(expected)
    assert found == {True, False}


@pytest.mark.parametrize(
    "pattern", [".".join(["#"] * 100 + ["a"]), ".".join(["#", "b"] * 60 + ["a"]), ".".join(["#", "*"] * 60 + ["a"])]
)
def test_a_hostile_pattern_cannot_stall_the_relay(pattern: str) -> None:
    topic = ".".join(["b"] * 127)
    matcher = compile_pattern(pattern)
    started = time.process_time()
    assert not matcher.matches(topic)
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    "name", ["billing", "BillingService", "image-worker-queue", "two_words", "app.mail:send", "q" * 200]
)
def test_a_good_queue_name_is_kept_letter_for_letter_so_that_two_names_never_share_storage(name: str) -> None:
    assert validate_queue_name(name) == name


@pytest.mark.parametrize("name", ["", "two words", "a'b", 'a"b', "a;b", "a--\n", "a\\b", "%s", "ü", "q" * 201, None, 3])
def test_a_bad_queue_name_is_refused_with_the_rule_instead_of_failing_in_sql(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="1 to 200 ASCII letters"):
        validate_queue_name(name)


@pytest.mark.parametrize("key", ["k", "order 7", "ключ", "😀", "k" * 512, "é" * 256, "'; --"])
def test_any_text_is_a_key_within_its_bytes(key: str) -> None:
    assert validate_key(key) == key


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("", "not empty"),
        ("k" * 513, "513 bytes"),
        ("é" * 257, "514 bytes"),
        ("a\0b", "NUL"),
        ("\ud83d", "surrogate"),
        (7, "not int"),
        (b"k", "not bytes"),
    ],
)
def test_a_key_that_postgresql_cannot_store_is_refused_before_it_breaks_the_transaction(key: Any, hint: str) -> None:
    with pytest.raises(InvalidKey, match=hint):
        validate_key(key)


def test_a_header_that_is_none_is_absent_rather_than_the_text_none() -> None:
    assert validate_headers({"example-extension": "1", "tenant": None}) == {"example-extension": "1"}
    assert validate_headers(None) == {}


@pytest.mark.parametrize(
    ("headers", "hint"),
    [
        ({"Trace_ID": "1"}, "write 'trace_id'"),
        ({"-x": "1"}, "the first one a letter or digit"),
        ({"": "1"}, "not allowed"),
        ({"a b": "1"}, "not allowed"),
        ({"trace\n": "1"}, "not allowed"),
        ({"ü": "1"}, "not allowed"),
        ({"a\0": "1"}, "not allowed"),
        ({"x" * 129: "1"}, "longer than 128 bytes"),
        ({7: "1"}, "not int"),
        ({"retries": 3}, "'retries': a value is text, not int"),
        ({"a": "x\0y"}, "'a': a NUL"),
        ({"a": "caf\udce9"}, "'a': half of a surrogate"),
        ({"a": "x" * 8193}, "8193 bytes"),
        ({"a": "é" * 4097}, "8194 bytes"),
        ({f"h{n}": "x" * 8000 for n in range(5)}, "40010 bytes"),
        (["a"], "not list"),
        ("a", "not str"),
    ],
)
def test_a_bad_header_is_refused_by_name_because_stricter_receivers_would_refuse_the_event(
    headers: Any, hint: str
) -> None:
    with pytest.raises(InvalidHeaders, match=hint):
        validate_headers(headers)


def test_headers_up_to_the_limits_are_accepted() -> None:
    headers: dict[str, str | None] = {"x" * 128: "x" * 8192, "b": "é" * 4096, "c": "x" * 8192}
    assert validate_headers(headers) == headers


@given(st.text(max_size=20), st.one_of(st.text(), st.none()))
def test_no_name_or_value_of_a_header_gets_past_the_rules_as_an_unexpected_error(name: str, value: str | None) -> None:
    try:
        accepted = validate_headers({name: value})
    except InvalidHeaders as refused:
        str(refused).encode()
    else:
        assert accepted == ({} if value is None else {name: value})


@pytest.mark.parametrize("priority", [0, 5, 9])
def test_a_priority_is_one_of_ten(priority: int) -> None:
    assert validate_priority(priority) == priority


@pytest.mark.parametrize("priority", [-1, 10, 10**5000, True, False, 1.0, "1", None], ids=range(8))
def test_what_is_no_priority_is_refused_with_the_rule(priority: object) -> None:
    with pytest.raises(PublishError, match=r"0 \(the default\) to 9"):
        validate_priority(priority)
