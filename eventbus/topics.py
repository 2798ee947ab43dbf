"""What travels with an event besides its payload: topics, patterns, queue names, ordering keys, headers, priorities.

Everything here is pure. Publishing checks topic, key, headers and priority before any SQL; a subscription checks its
pattern and queue name at decoration; the relay asks a :class:`Matcher` once per new topic.

A topic is words joined by dots, ``orders.created``: letters, digits, ``_`` and ``-`` of ASCII, case-sensitive,
1 to 255 bytes. A pattern is a topic in which a whole word may be ``*`` (exactly one word) or ``#`` (zero or more
words), the rules of AMQP topic exchanges: ``orders.#`` matches ``orders``, ``a.#.b`` matches ``a.b``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from eventbus.errors import ConfigurationError, InvalidHeaders, InvalidKey, InvalidTopic, PublishError

MAX_TOPIC_BYTES: Final = 255
MAX_QUEUE_NAME_BYTES: Final = 200
MAX_KEY_BYTES: Final = 512
MAX_HEADER_NAME_BYTES: Final = 128
MAX_HEADER_VALUE_BYTES: Final = 8 * 1024
MAX_HEADERS_BYTES: Final = 32 * 1024
MAX_PRIORITY: Final = 9

_TOPIC: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_WORD: Final = re.compile(r"[A-Za-z0-9_-]+")
_QUEUE_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]+")
_HEADER_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]*")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_LONGEST_SHOWN: Final = 80


def validate_topic(topic: object) -> str:
    """``topic`` as plain text; raises :class:`~eventbus.errors.InvalidTopic` with what is wrong with it."""
    if type(topic) is str and len(topic) <= MAX_TOPIC_BYTES and _TOPIC.fullmatch(topic):
        return topic
    text = _topic_text("topic", topic)
    for word in text.split("."):
        if word in {"*", "#"}:
            raise InvalidTopic(f"topic {text!r}: {word!r} is a wildcard of patterns; an event has one exact topic")
        _check_word("topic", text, word)
    return text


def validate_pattern(pattern: object) -> str:
    """``pattern`` as plain text; raises :class:`~eventbus.errors.InvalidTopic` with what is wrong with it."""
    text = _topic_text("pattern", pattern)
    for word in text.split("."):
        if word in {"*", "#"}:
            continue
        if "*" in word or "#" in word:
            raise InvalidTopic(f"pattern {text!r}: a wildcard stands for whole words, so {word!r} means nothing")
        _check_word("pattern", text, word)
    return text


def validate_queue_name(name: object) -> str:
    """``name`` as plain text; raises :class:`~eventbus.errors.ConfigurationError` with the rule it breaks."""
    if isinstance(name, str) and len(name) <= MAX_QUEUE_NAME_BYTES and _QUEUE_NAME.fullmatch(name):
        return str.__str__(name)
    rule = f"1 to {MAX_QUEUE_NAME_BYTES} ASCII letters, digits and the characters _ - . :"
    raise ConfigurationError(f"queue name {_show(name)} is not allowed; use {rule}")


def validate_key(key: object) -> str:
    """``key`` as plain text; raises :class:`~eventbus.errors.InvalidKey` with what is wrong with it."""
    if not isinstance(key, str):
        raise InvalidKey(f"a key is text, not {_kind(key)}; publish with key=str(…)")
    if problem := _unstorable(key):
        raise InvalidKey(f"key {_show(key)}: {problem}")
    size = _size(key)
    if not size:
        raise InvalidKey("a key is not empty; leave it out to publish without an order")
    if size > MAX_KEY_BYTES:
        raise InvalidKey(f"key {_show(key)} has {size} bytes, at most {MAX_KEY_BYTES} are allowed; use a digest of it")
    return str.__str__(key)


def validate_headers(headers: object) -> dict[str, str]:
    """The headers that are present: a value ``None`` means absent.

    Raises :class:`~eventbus.errors.InvalidHeaders` that names the header and what to change.
    """
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise InvalidHeaders(f"headers are a mapping of names to text, not {_kind(headers)}")
    present: dict[str, str] = {}
    for name, value in headers.items():
        _check_header_name(name)
        if value is not None:
            present[str.__str__(name)] = _header_value(name, value)
    total = bytes_of_headers(present)
    if total > MAX_HEADERS_BYTES:
        raise InvalidHeaders(
            f"all headers together have {total} bytes, at most {MAX_HEADERS_BYTES} are allowed; "
            "put the data into the payload"
        )
    return present


def bytes_of_headers(headers: Mapping[str, str]) -> int:
    """What counts against :data:`MAX_HEADERS_BYTES`: the UTF-8 of all names and values."""
    return sum(len(name) + _size(value) for name, value in headers.items())


def validate_priority(priority: object) -> int:
    """``priority`` as a plain integer; raises :class:`~eventbus.errors.PublishError` with the rule it breaks."""
    rule = f"0 (the default) to {MAX_PRIORITY} (handled first)"
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise PublishError(f"a priority is an integer, {rule}, not {_kind(priority)}")
    if not 0 <= priority <= MAX_PRIORITY:
        raise PublishError(f"this priority is out of range; use {rule}")
    return int(priority)


@dataclass(frozen=True, slots=True)
class Matcher:
    """A pattern that is ready to be compared with many topics; built by :func:`compile_pattern`."""

    pattern: str
    words: tuple[str, ...]

    def matches(self, topic: str) -> bool:
        """True if the whole topic fits the pattern; takes at most words of the pattern times words of the topic.

        What is no valid topic because a word is empty fits nothing.
        """
        given = topic.split(".")
        return "" not in given and _fits(self.words, given)


def compile_pattern(pattern: str) -> Matcher:
    """The matcher of ``pattern``; raises :class:`~eventbus.errors.InvalidTopic` if the pattern breaks the rule."""
    checked = validate_pattern(pattern)
    return Matcher(checked, tuple(checked.split(".")))


def matches(pattern: str, topic: str) -> bool:
    """True if the pattern matches the topic. For many topics, :func:`compile_pattern` once."""
    return compile_pattern(pattern).matches(topic)


def _fits(pattern: tuple[str, ...], topic: list[str]) -> bool:
    """Walk both from the left; at a mismatch let the latest ``#`` take one more word.

    Going back to an earlier ``#`` can never help: whatever it could take, the latest one can take as well.
    """
    at = taken = 0
    wild = resume = -1
    while taken < len(topic):
        word = pattern[at] if at < len(pattern) else None
        if word == "#":
            wild, resume = at, taken
            at += 1
        elif word is not None and word in {"*", topic[taken]}:
            at += 1
            taken += 1
        elif wild >= 0:
            resume += 1
            at, taken = wild + 1, resume
        else:
            return False
    return all(word == "#" for word in pattern[at:])


def _topic_text(what: str, given: object) -> str:
    if not isinstance(given, str):
        raise InvalidTopic(f"a {what} is text, not {_kind(given)}")
    if not given:
        raise InvalidTopic(f"a {what} is not empty; it is words joined by dots, as in 'orders.created'")
    size = len(given.encode(errors="surrogatepass"))
    if size > MAX_TOPIC_BYTES:
        raise InvalidTopic(f"{what} {_show(given)} has {size} bytes, at most {MAX_TOPIC_BYTES} are allowed")
    return str.__str__(given)


def _check_word(what: str, text: str, word: str) -> None:
    if not word:
        raise InvalidTopic(f"{what} {text!r} has an empty word; join the words by single dots, none at the ends")
    if not _WORD.fullmatch(word):
        wrong = next(letter for letter in word if not _WORD.fullmatch(letter))
        raise InvalidTopic(f"{what} {text!r}: {wrong!r} is not allowed; use ASCII letters, digits, '_' and '-'")


def _check_header_name(name: object) -> None:
    if not isinstance(name, str):
        raise InvalidHeaders(f"a header name is text, not {_kind(name)}")
    if len(name) > MAX_HEADER_NAME_BYTES:
        raise InvalidHeaders(f"header name {_show(name)} is longer than {MAX_HEADER_NAME_BYTES} bytes")
    if not _HEADER_NAME.fullmatch(name):
        lower = name.lower()
        hint = f"; write {lower!r}" if _HEADER_NAME.fullmatch(lower) else ""
        raise InvalidHeaders(
            f"header name {_show(name)} is not allowed: lower-case letters, digits, '.', '_' and '-', "
            f"the first one a letter or digit{hint}"
        )


def _header_value(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidHeaders(f"header {name!r}: a value is text, not {_kind(value)}; use str(…) or leave it out")
    if problem := _unstorable(value):
        raise InvalidHeaders(f"header {name!r}: {problem}")
    size = _size(value)
    if size > MAX_HEADER_VALUE_BYTES:
        raise InvalidHeaders(
            f"header {name!r} has {size} bytes, at most {MAX_HEADER_VALUE_BYTES} are allowed; "
            "put the data into the payload"
        )
    return str.__str__(value)


def _unstorable(text: str) -> str | None:
    """Why PostgreSQL cannot store this text, or ``None`` if it can."""
    if "\0" in text:
        return "a NUL character cannot be stored; remove it"
    if not text.isascii() and _SURROGATE.search(text):
        return "half of a surrogate pair is no character; decode the text properly or remove it"
    return None


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _show(given: object) -> str:
    """What was given, printable on any terminal and short."""
    shown = ascii(given)
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}…"


def _kind(given: object) -> str:
    return type(given).__name__
