"""Payloads: what a publisher hands in is what a handler gets, or the publish is refused with the path."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import uuid
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from fractions import Fraction
from itertools import pairwise
from time import process_time
from types import MappingProxyType
from typing import Any, NamedTuple, Self
from zoneinfo import ZoneInfo

import orjson
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, Json, RootModel, SecretStr, TypeAdapter, computed_field

from eventbus.errors import InvalidPayload, PayloadMismatch, PayloadTooLarge
from eventbus.payload import decode, encode

LIMIT = 16 * 1024 * 1024


class Color(Enum):
    RED = "red"


class Size(IntEnum):
    SMALL = 1


class Word(StrEnum):
    YES = "yes"


class Label(str):
    __slots__ = ()


class Count(int):
    pass


class Ratio(float):
    pass


class Odd(str, Enum):  # noqa: UP042 - its value is not its text, which StrEnum cannot say
    A = "a"

    def __new__(cls, text: str) -> Self:
        member = str.__new__(cls, text)
        member._value_ = text.upper()
        return member


class Access(Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal
    place: Point | None = None


@pydantic.dataclasses.dataclass
class Parcel:
    weight: float = Field(alias="weightKg")


class Order(BaseModel):
    order_id: uuid.UUID = Field(alias="orderId")
    lines: list[Line]
    placed: datetime
    raw: Json[Any] = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def count(self) -> int:
        return len(self.lines)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    at: datetime
    price: Decimal
    color: Color
    place: tuple[int, ...]
    wait: timedelta

    @computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> Decimal:
        return self.price * 2


def through(value: Any) -> Any:
    return decode(encode(value, max_bytes=LIMIT))


def refused(value: Any) -> InvalidPayload:
    with pytest.raises(InvalidPayload) as caught:
        encode(value, max_bytes=LIMIT)
    str(caught.value).encode()
    return caught.value


def same(left: Any, right: Any) -> bool:
    """Equal, of the same types, down to the sign of zero."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return repr(left) == repr(right)
    return bool(left == right)


def nested(levels: int, wrap: Callable[[Any], Any] = lambda inside: [inside]) -> Any:
    value: Any = wrap(1)
    for _ in range(levels - 1):
        value = wrap(value)
    return value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=30,
)


@given(JSON)
@example({"a": [1.0, -0.0, 1e308, 5e-324, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, True, None, "😀", "a\0b"]})
@example({"\0": "\\u0000"})
def test_what_is_published_is_what_the_handler_gets_down_to_types_and_the_sign_of_zero(value: Any) -> None:
    assert same(through(value), value)


@given(JSON, st.sampled_from([date(2026, 11, 30), 10**40]))
def test_one_rare_value_inside_changes_nothing_about_the_rest(value: Any, rare: Any) -> None:
    assert same(through([value, rare])[0], value)


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**4300 - 1, 1 - 10**4300])
def test_integers_of_any_size_stay_exact_integers(number: int) -> None:
    assert same(through({"n": [number]}), {"n": [number]})
    assert same(through(number), number)


@pytest.fixture
def digits() -> Iterator[Callable[[int], None]]:
    """Sets Python's limit to the digits of an integer, for this test."""
    before = sys.get_int_max_str_digits()
    yield sys.set_int_max_str_digits
    sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("limit", [4300, 0, 1000])
@pytest.mark.parametrize("kind", [int, Count])
def test_an_integer_that_a_handler_could_not_read_is_refused_whatever_the_publishers_own_limit(
    limit: int, kind: type[int], digits: Callable[[int], None]
) -> None:
    digits(limit)
    assert refused({"n": kind(10**4300)}).path == "$.n"
    assert refused({"n": [kind(1 - 10**4301)]}).path == "$.n[0]"


def test_an_integer_beyond_a_lower_limit_of_this_process_is_refused_and_not_a_crash(
    digits: Callable[[int], None],
) -> None:
    digits(1000)
    assert refused({"n": 10**2000}).path == "$.n"


def test_a_huge_integer_is_refused_before_its_digits_are_computed_for_minutes(digits: Callable[[int], None]) -> None:
    digits(0)
    huge = 1 << 20_000_000
    started = process_time()
    refused(huge)
    assert process_time() - started < 1


@pytest.mark.parametrize("rare", [None, date(2026, 11, 30), 2**70], ids=["fast", "careful", "big integer"])
@pytest.mark.parametrize(
    "number", [math.nan, math.inf, -math.inf, 1e308 * 10, Ratio("nan"), Decimal("NaN"), Decimal("-Infinity")]
)
def test_a_number_that_json_does_not_know_is_refused_with_its_path_instead_of_becoming_null(
    number: float, rare: object
) -> None:
    error = refused({"rare": rare, "lines": [1, None, {"price": number}]})
    assert error.path == "$.lines[2].price"
    assert "no number in JSON" in error.problem


@pytest.mark.parametrize("text", ["\ud83d", "caf\udce9", os.fsdecode(b"caf\xe9"), "😀\ude00", Label("\ud83d")])
def test_half_a_surrogate_pair_is_refused_with_its_path_instead_of_arriving_as_something_else(text: str) -> None:
    assert refused({"names": ["😀", text]}).path == "$.names[1]"
    error = refused({"a": {text: 1}})
    assert error.path == "$.a"
    assert "surrogate" in error.problem


def test_the_six_characters_of_an_escaped_nul_stay_six_characters() -> None:
    assert encode(["\\u0000", "\0"], max_bytes=LIMIT) == '["\\\\u0000","\\u0000"]'


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (b"x", "base64"),
        (bytearray(b"x"), "base64"),
        ({1}, "sorted"),
        (frozenset({1}), "sorted"),
        (object(), "object has no JSON form"),
        (Fraction(1, 3), "Fraction has no JSON form"),
        (1j, "complex has no JSON form"),
        (MappingProxyType({}), "dict"),
        (UserDict(), "dict"),
        ((n for n in [1]), "generator has no JSON form"),
        (len, "has no JSON form"),
        (Line, "the class Line itself"),
        (Order, "the class Order itself"),
        (SecretStr("s"), "SecretStr has no JSON form"),
        (orjson.Fragment(b"{broken"), "Fragment has no JSON form"),
        (orjson.Fragment(b"1"), "Fragment has no JSON form"),
        (datetime(2026, 11, 30), "naive"),  # noqa: DTZ001 - the point of the test
        (time(12, tzinfo=ZoneInfo("Europe/Berlin")), "no offset without a date"),
        (time(12, tzinfo=timezone(timedelta(seconds=1))), "whole minutes"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_json_form_is_refused_with_its_path_and_advice(value: Any, hint: str) -> None:
    error = refused({"lines": [{"price": value}]})
    assert error.path == "$.lines[0].price"
    assert hint in error.problem
    assert hint in refused(value).problem


def test_odd_keys_are_quoted_in_the_path_so_that_it_stays_unambiguous() -> None:
    assert refused({"a b": {"x.y": {"": object()}}}).path == '$["a b"]["x.y"][""]'
    assert refused({"ü": {"a\n": object()}}).path == r'$["\u00fc"]["a\n"]'


def test_a_path_stays_short_enough_for_a_log_line() -> None:
    assert refused({"x" * 999: object()}).path == f'$["{"x" * 64}\\u2026"]'
    deep: Any = object()
    for _ in range(150):
        deep = {"some key": deep}
    path = refused(deep).path
    assert len(path) < 500
    assert path.startswith('$["some key"]')
    assert path.endswith('["some key"]')


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        ({1: "a", "1": "b"}, "same text '1'"),
        ({Size.SMALL: "a", "1": "b"}, "same text '1'"),
        ({Label("1"): "a", 1: "b"}, "same text '1'"),
        ({None: 1}, "NoneType has no text form"),
        ({True: 1, "true": 2}, "bool has no text form"),
        ({(1, 2): 3}, "tuple has no text form"),
        ({1.5: 1}, "float has no text form"),
        ({b"a": 1}, "bytes has no text form"),
        ({Point(1, 2): 1}, "Point has no text form"),
        ({10**5000: 1}, "4300 digits"),
        ({Decimal("NaN"): 1}, "no number"),
        ({datetime(2026, 11, 30): 1}, "naive"),  # noqa: DTZ001 - the point of the test
    ],
)
def test_keys_that_would_collide_or_have_no_text_form_are_refused_instead_of_losing_a_value(
    keys: Any, hint: str
) -> None:
    error = refused({"map": keys})
    assert error.path == "$.map"
    assert hint in error.problem


def test_other_keys_become_the_documented_text() -> None:
    one = uuid.UUID(int=1)
    keys = {
        1: "a",
        "b": 1,
        one: 2,
        date(2026, 11, 30): 3,
        Decimal("1.50"): 4,
        Size.SMALL + 1: 5,
        Color.RED: 6,
        Word.YES: 7,
    }
    assert list(through(keys)) == ["1", "b", str(one), "2026-11-30", "1.50", "2", "red", "yes"]


@pytest.mark.parametrize("rare", [1, date(2026, 11, 30), 2**70], ids=["fast", "careful", "big integer"])
def test_any_depth_that_is_accepted_is_readable_and_one_level_more_is_refused(rare: Any) -> None:
    deepest = nested(198)
    text = encode([[rare, deepest]], max_bytes=LIMIT)
    assert decode(text)[0][1] == deepest
    assert TypeAdapter(Any).validate_json(text)[0][1] == deepest
    assert "deeper than 200 levels" in refused([[rare, nested(199)]]).problem
    assert (
        "deeper than 200 levels" in refused({"a": {"b": rare, "c": nested(199, lambda inside: {"d": inside})}}).problem
    )


@pytest.mark.parametrize("levels", [201, 254, 255, 300, 1100, 100_000])
def test_a_very_deep_payload_is_an_error_and_never_a_crash(levels: int) -> None:
    assert "deeper than 200 levels" in refused(nested(levels)).problem
    assert "deeper than 200 levels" in refused(nested(levels, lambda inside: {"a": (inside,)})).problem


def test_a_wide_payload_is_not_mistaken_for_a_deep_one() -> None:
    wide = [{"a": [n]} for n in range(1000)]
    assert through(wide) == wide


def test_a_payload_that_contains_itself_is_an_error_and_never_a_crash() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "contains itself" in refused({"a": endless}).problem
    mapping: dict[str, Any] = {}
    mapping["me"] = mapping
    assert "contains itself" in refused(mapping).problem

    class Node(BaseModel):
        parent: Any = None

    node = Node()
    node.parent = node
    assert refused({"n": node}).path.startswith("$.n")


def test_a_payload_published_from_deep_inside_a_program_is_an_error_and_never_a_crash() -> None:
    value = nested(190, lambda inside: (inside,))

    def descend(levels: int) -> InvalidPayload | None:
        if levels:
            return descend(levels - 1)
        try:
            encode(value, max_bytes=LIMIT)
        except InvalidPayload as error:
            return error
        return None

    room = sys.getrecursionlimit()
    outcomes = {type(descend(room - used)).__name__ for used in range(200, 600, 40)}
    assert outcomes == {"NoneType", "InvalidPayload"}


@given(
    st.one_of(
        st.datetimes(timezones=st.timezones()),
        st.datetimes(timezones=st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)),
    )
)
@example(datetime.max.replace(tzinfo=UTC))
@example(datetime(1890, 4, 1, tzinfo=ZoneInfo("Europe/Berlin")))
@example(datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")))
def test_a_moment_comes_back_as_the_same_moment_whatever_its_zone(moment: datetime) -> None:
    try:
        expected = moment.astimezone(UTC)
    except OverflowError:
        expected = None
    for back in typed(datetime, moment) if expected else ():
        assert back.astimezone(UTC) == expected


def test_a_moment_that_no_reader_could_express_is_refused() -> None:
    edge = datetime.min.replace(tzinfo=timezone(timedelta(seconds=1)))
    assert "does not fit into UTC" in refused([edge]).problem


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (date, st.dates()),
        (time, st.times()),
        (time, st.times(timezones=st.integers(-1439, 1439).map(lambda n: timezone(timedelta(minutes=n))))),
        (timedelta, st.timedeltas()),
        (uuid.UUID, st.uuids()),
        (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
        (Color, st.sampled_from(Color)),
        (Size, st.sampled_from(Size)),
        (Odd, st.sampled_from(Odd)),
        (int, st.integers()),
        (float, st.floats(allow_nan=False, allow_infinity=False)),
        (tuple[int, ...], st.lists(st.integers()).map(tuple)),
        (Point, st.builds(Point, st.integers(), st.integers())),
        (
            Line,
            st.builds(
                Line,
                st.text(),
                st.decimals(allow_nan=False, allow_infinity=False),
                st.none() | st.builds(Point, st.integers(), st.integers()),
            ),
        ),
        (dict[int, date], st.dictionaries(st.integers(), st.dates())),
        (dict[uuid.UUID, timedelta], st.dictionaries(st.uuids(), st.timedeltas())),
        (dict[date, time], st.dictionaries(st.dates(), st.times())),
    ],
    ids=str,
)
def test_a_typed_handler_gets_back_exactly_what_was_published(kind: Any, values: st.SearchStrategy[Any]) -> None:
    @given(values)
    def check(value: Any) -> None:
        for back in typed(kind, value):
            assert back == value
            assert type(back) is type(value)

    check()


def typed(kind: Any, value: Any) -> list[Any]:
    """What a handler gets that asks for ``kind``: validated from the decoded values and from the text."""
    adapter = TypeAdapter(kind)
    text = encode({"inside": [value]}, max_bytes=LIMIT)
    inside = TypeAdapter(dict[str, list[kind]]).validate_json(text)["inside"][0]
    return [adapter.validate_python(decode(text)["inside"][0]), inside]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (datetime(2026, 11, 30, 12, 30, tzinfo=UTC), "2026-11-30T12:30:00+00:00"),
        (datetime(2026, 11, 30, 12, 30, 0, 5, ZoneInfo("Europe/Berlin")), "2026-11-30T12:30:00.000005+01:00"),
        (date(2026, 11, 30), "2026-11-30"),
        (time(12, 30), "12:30:00"),
        (timedelta(0), "PT0S"),
        (timedelta(days=1, hours=2, minutes=3, seconds=4.5), "P1DT2H3M4.5S"),
        (timedelta(days=2), "P2D"),
        (timedelta(hours=2), "PT2H"),
        (timedelta(microseconds=-1), "-PT0.000001S"),
        (timedelta.max, "P999999999DT23H59M59.999999S"),
        (timedelta.min, "-P999999999D"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("10.50"), "10.50"),
        (Decimal("1E+3"), "1E+3"),
        (Color.RED, "red"),
        (Odd.A, "A"),
        (Word.YES, "yes"),
        (Size.SMALL, 1),
        (Access.READ | Access.WRITE, 3),
        (Label("x"), "x"),
        (Count(3), 3),
        (Ratio(0.5), 0.5),
        (True, True),
        ((1, 2), [1, 2]),
        (Point(1, 2), [1, 2]),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (Line("a", Decimal("1.0")), {"sku": "a", "price": "1.0", "place": None}),
        (RootModel[list[int]]([1]), [1]),
        (None, None),
    ],
    ids=repr,
)
def test_each_documented_type_has_the_documented_form(value: Any, text: Any) -> None:
    assert same(through(value), text)
    assert same(through({"a": [value]}), {"a": [text]})


def test_a_model_comes_back_equal_with_aliases_and_json_fields() -> None:
    order = Order(
        orderId=uuid.uuid4(),
        lines=[Line("a", Decimal("19.90"), Point(1, 2))],
        placed=datetime(2026, 11, 30, tzinfo=UTC),
        raw='{"a": 1}',
    )
    back = Order.model_validate_json(encode({"order": order}, max_bytes=LIMIT)[len('{"order":') : -1])
    assert back == order
    assert "orderId" in through(order)


def test_a_strict_model_that_forbids_extra_fields_accepts_its_own_event() -> None:
    one = Strict(at=datetime.now(UTC), price=Decimal("1.10"), color=Color.RED, place=(1, 2), wait=timedelta(1))
    assert Strict.model_validate_json(encode(one, max_bytes=LIMIT)) == one


def test_a_pydantic_dataclass_comes_back_equal() -> None:
    parcel = Parcel(weightKg=2.5)
    assert through([parcel]) == [{"weightKg": 2.5}]
    assert TypeAdapter(Parcel).validate_json(encode(parcel, max_bytes=LIMIT)) == parcel


def test_a_bad_value_inside_a_model_is_refused_with_the_path_through_the_model() -> None:
    class Carrier(BaseModel):
        tags: Any
        lines: list[Line] = []

    assert refused({"m": Carrier(tags=[b"x"])}).path == "$.m.tags[0]"
    assert refused(Carrier(tags={1})).path == "$.tags"
    nan = Line("a", Decimal("NaN"))
    assert refused(Carrier.model_construct(tags=1, lines=[nan])).path == "$.lines[0].price"
    assert refused([nan]).path == "$[0].price"


def test_an_error_in_the_users_own_serializer_keeps_its_cause() -> None:
    class Broken(BaseModel):
        @pydantic.model_serializer
        def dump(self) -> dict[str, Any]:
            raise LookupError("no rate for XYZ")

    error = refused({"rate": Broken()})
    assert error.path == "$.rate"
    assert "no rate for XYZ" in error.problem
    assert error.__cause__ is not None


def test_a_dataclass_without_one_of_its_values_is_refused_and_not_an_attribute_error() -> None:
    line = Line("a", Decimal(1))
    del line.sku
    assert refused([line]).path == "$[0]"


def test_pandas_moments_with_nanoseconds_or_without_a_moment_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    moment = pandas.Timestamp("2026-11-30T12:00:00.000001", tz="UTC")
    assert through(moment) == "2026-11-30T12:00:00.000001+00:00"
    assert "nanoseconds" in refused(moment + pandas.Timedelta(1, "ns")).problem
    assert "nanoseconds" in refused(pandas.Timedelta(1, "ns")).problem
    assert "naive" in refused(pandas.NaT).problem
    assert through(pandas.Timedelta(1, "D")) == "P1D"


def test_numpy_scalars_are_refused_rather_than_guessed() -> None:
    numpy = pytest.importorskip("numpy")
    assert same(through([numpy.float64(0.5)]), [0.5])
    assert refused([numpy.int64(1)]).path == "$[0]"


def test_the_size_limit_counts_bytes_and_names_both_numbers() -> None:
    assert encode("é" * 4, max_bytes=10) == '"éééé"'
    with pytest.raises(PayloadTooLarge, match=r"11 bytes.*10"):
        encode("é" * 4 + "a", max_bytes=10)


def test_the_publishers_object_stays_untouched_and_the_handler_gets_a_copy() -> None:
    value = {"a": [1, {"b": Point(1, 2)}]}
    back = through(value)
    back["a"].append(2)
    assert value == {"a": [1, {"b": Point(1, 2)}]}


def test_order_of_keys_is_kept() -> None:
    names = list("zyxabc")
    for rare in (1, date(2026, 11, 30)):
        assert list(through(dict.fromkeys(names, rare))) == names


@pytest.mark.parametrize(
    "text",
    ["[" * 300 + "]" * 300, '"\\ud83d"', ' { "a" : 1 } ', "1" * 4300],
    ids=["deep", "surrogate", "spaces", "long"],
)
def test_what_sql_accepts_beyond_our_own_rules_is_still_readable(text: str) -> None:
    assert decode(text) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000 + "]" * 100_000, "1" * 4301, "NaN", "-Infinity", "{", ""],
    ids=["deep", "long", "nan", "inf", "cut", "empty"],
)
def test_what_cannot_be_read_is_a_named_error_and_never_a_crash(text: str) -> None:
    with pytest.raises(PayloadMismatch):
        decode(text)


def test_the_fast_path_stays_fast_because_every_publish_pays_for_it() -> None:
    """Counted in work of the interpreter, not in time: no Python function runs per value."""
    small = {"order": [{"sku": "A", "qty": n, "price": 1.5, "note": None} for n in range(20)]}
    calls = {size: _calls(small | {"more": list(range(size))}) for size in (10, 10_000)}
    assert calls[10] == calls[10_000]


def _calls(value: Any) -> int:
    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1

    sys.setprofile(count)
    try:
        encode(value, max_bytes=LIMIT)
    finally:
        sys.setprofile(None)
    return seen


def test_decimals_keep_every_digit_in_order() -> None:
    prices = [Decimal("0.1"), Decimal("0.10"), Decimal("123456789.123456789123456789")]
    assert [str(TypeAdapter(Decimal).validate_python(text)) for text in through(prices)] == list(map(str, prices))
    assert all(left != right for left, right in pairwise(through(prices)))
