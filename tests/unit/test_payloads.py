"""Payloads become what handlers ask for: what a user would lose if they did not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from typing_extensions import TypedDict

from eventbus.consuming.payloads import NoPayloadType, loader
from eventbus.errors import PayloadMismatch
from eventbus.event import Event


def event(payload: str) -> Event:
    return Event(
        event_id="01936d4e-0000-7000-8000-000000000000",
        topic="orders.created",
        payload=payload,
        headers=None,
        key=None,
        published_at=datetime.now(UTC),
        queue="q",
    )


class Line(BaseModel):
    sku: str
    price: Decimal


class Order(BaseModel):
    id: UUID
    placed: datetime
    due: date
    grace: timedelta
    lines: list[Line]


@dataclass
class Point:
    x: int
    y: int


class Card(TypedDict):
    number: str
    year: int


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    day: date
    total: Decimal


ORDER = """{"id": "01936d4e-0000-7000-8000-000000000000", "placed": "2026-11-30T10:00:00+01:00", "due": "2026-12-24",
            "grace": "P1DT2H", "lines": [{"sku": "a", "price": "19.90"}]}"""


def test_dates_decimals_and_uuids_come_back_as_such_instead_of_text() -> None:
    assert loader(Order)(event(ORDER)) == Order(
        id=UUID("01936d4e-0000-7000-8000-000000000000"),
        placed=datetime(2026, 11, 30, 9, tzinfo=UTC),
        due=date(2026, 12, 24),
        grace=timedelta(days=1, hours=2),
        lines=[Line(sku="a", price=Decimal("19.90"))],
    )


@pytest.mark.parametrize(
    ("annotation", "payload", "value"),
    [
        (Point, '{"x": 1, "y": 2}', Point(1, 2)),
        (Card, '{"number": "4111", "year": 2030}', {"number": "4111", "year": 2030}),
        (list[Point], '[{"x": 1, "y": 2}]', [Point(1, 2)]),
        (Point | None, "null", None),
        (Point | Line, '{"sku": "a", "price": "1"}', Line(sku="a", price=Decimal(1))),
        (Annotated[int, Field(gt=3)], "4", 4),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (int, "7", 7),
        (str, '"text"', "text"),
        (dict, '{"a": [1, null]}', {"a": [1, None]}),
        (Any, "[1, 2]", [1, 2]),
    ],
)
def test_every_documented_kind_of_annotation_gets_its_payload(annotation: Any, payload: str, value: object) -> None:
    loaded = loader(annotation)(event(payload))
    assert loaded == value
    assert type(loaded) is type(value)


@pytest.mark.parametrize("annotation", [Any, int, dict, dict[str, int], Point])
@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30])
def test_an_integer_of_any_size_stays_that_integer(annotation: Any, number: int) -> None:
    payload = {"x": number, "y": 0} if annotation in (dict, dict[str, int], Point) else number
    loaded = loader(annotation)(event(json.dumps(payload)))
    got = loaded.x if annotation is Point else loaded["x"] if isinstance(loaded, dict) else loaded
    assert type(got) is int
    assert got == number


@pytest.mark.parametrize("number", ["12345678901234567.89", "0.12345678901234567890123", "19.90", "3", "-1e-30"])
def test_money_in_a_json_number_keeps_all_its_digits(number: str) -> None:
    assert loader(Line)(event(f'{{"sku": "a", "price": {number}}}')).price == Decimal(number)
    assert loader(list[Decimal])(event(f"[{number}]")) == [Decimal(number)]


def test_a_long_number_in_a_text_does_not_change_how_a_strict_model_is_read() -> None:
    payload = '{"day": "2026-11-30", "total": "1234567890123456789.5"}'
    assert loader(Strict)(event(payload)) == Strict(day=date(2026, 11, 30), total=Decimal("1234567890123456789.5"))


def test_a_number_of_another_field_stays_what_it_is_next_to_long_money() -> None:
    class Priced(BaseModel):
        price: Decimal
        weight: Any

    assert type(loader(Priced)(event('{"price": 12345678901234567.89, "weight": 1.5}')).weight) is float


def test_a_payload_nested_deeper_than_the_json_reader_goes_still_reaches_its_handler() -> None:
    loaded = loader(list[Any])(event("[" * 300 + "]" * 300))
    for _ in range(299):
        (loaded,) = loaded
    assert loaded == []


@pytest.mark.parametrize("annotation", [Any, dict, list[Any], Order])
def test_a_payload_that_nobody_can_decode_is_a_mismatch_and_not_a_crash(annotation: Any) -> None:
    with pytest.raises(PayloadMismatch, match=r"^payload"):
        loader(annotation)(event("[" + "1" * 5_000 + "]"))


def test_the_handler_changes_its_own_copy_of_the_payload() -> None:
    text = '{"a": {"b": []}}'
    first, second = event(text), event(text)
    loader(dict)(first)["a"]["b"].append("changed")
    assert loader(dict)(second) == {"a": {"b": []}}
    assert second.payload_text == text


def test_a_mismatch_tells_every_place_and_its_problem() -> None:
    payload = json.loads(ORDER) | {"due": "never", "lines": [{"sku": "a", "price": "1"}, {"price": []}]}
    with pytest.raises(PayloadMismatch) as mismatch:
        loader(Order)(event(json.dumps(payload)))
    assert str(mismatch.value) == (
        "payload of orders.created does not fit Order: $.due: date_from_datetime_parsing; "
        "$.lines[1].sku: missing; $.lines[1].price: decimal_type"
    )


def test_a_mismatch_of_the_whole_payload_says_so() -> None:
    with pytest.raises(PayloadMismatch, match=r"does not fit dict: \$: dict_type$"):
        loader(dict)(event("[]"))
    with pytest.raises(PayloadMismatch, match=r"does not fit int: \$: int_parsing$"):
        loader(int)(event('"many"'))


class Talkative(BaseModel):
    pin: str
    kind: Literal["a", "b"]
    id: UUID

    @field_validator("pin")
    @classmethod
    def check(cls, pin: str) -> str:
        raise ValueError(f"{pin} is no pin")


def test_a_mismatch_never_shows_the_payload_because_it_is_logged_and_stored() -> None:
    payload = {"pin": "S3CRET", "kind": "S3CRET", "id": "S3CRET", "extra": "S3CRET"}
    with pytest.raises(PayloadMismatch) as mismatch:
        loader(Talkative)(event(json.dumps(payload)))
    error: BaseException | None = mismatch.value
    assert str(error).count("$.") == 3
    while error is not None:
        assert "S3CRET" not in str(error)
        assert not isinstance(error, ValidationError)
        error = error.__cause__ or error.__context__


def test_a_thousand_problems_make_one_short_message() -> None:
    with pytest.raises(PayloadMismatch) as mismatch:
        loader(list[int])(event(json.dumps(["x"] * 1_000)))
    assert str(mismatch.value).endswith("$[9]: int_parsing; and 990 more")
    with pytest.raises(PayloadMismatch) as mismatch:
        loader(dict[str, int])(event(json.dumps({"k" * 1_000_000: "x"})))
    assert len(str(mismatch.value)) < 300


def test_an_error_in_the_users_own_validator_is_a_failed_attempt_and_no_mismatch() -> None:
    class Lookup(BaseModel):
        id: int

        @field_validator("id")
        @classmethod
        def check(cls, value: int) -> int:
            raise ConnectionError("database away")

    with pytest.raises(ConnectionError):
        loader(Lookup)(event('{"id": 1}'))


class Unfinished(BaseModel):
    later: NotYetThere  # type: ignore[name-defined]  # noqa: F821


class Opaque:
    pass


@pytest.mark.parametrize(
    ("annotation", "said"),
    [(Opaque, "Opaque"), (Unfinished, "NotYetThere"), (5, "schema for 5"), (list[Opaque], "Opaque")],
)
def test_a_type_that_no_payload_can_become_is_refused_before_any_event_arrives(annotation: Any, said: str) -> None:
    with pytest.raises(NoPayloadType) as refused:
        loader(annotation)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "arbitrary_types_allowed" not in str(refused.value)
