"""JSON text out of a payload and back.

Plain dicts, lists, text, numbers, booleans and ``None`` take the fast path: orjson writes them, and the text is
accepted if it reads back as an equal value. That one comparison finds whatever orjson would change on the way, such
as NaN that becomes null. Everything else, and every mistake, takes the careful path of ``plain``, which turns the rest
of the documented types into these and knows the path to whatever has no JSON form.
"""

from __future__ import annotations

import json
from typing import Any, Final

import orjson
from pydantic_core import from_json

from eventbus.errors import InvalidPayload, PayloadMismatch, PayloadTooLarge
from eventbus.payload.plain import MAX_DEPTH, NoPlainForm, to_plain

_ONLY_PLAIN: Final = (
    orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS
)


def encode(value: Any, *, max_bytes: int) -> str:
    """``value`` as JSON text of at most ``max_bytes`` bytes of UTF-8.

    Raises :class:`~eventbus.errors.InvalidPayload` with the path to a value that has no JSON form, and
    :class:`~eventbus.errors.PayloadTooLarge`. Never changes a value silently.
    """
    encoded = _encode_plain(value)
    if encoded is None:
        encoded = _encode_carefully(value)
    if len(encoded) > max_bytes:
        raise PayloadTooLarge(
            f"payload has {len(encoded)} bytes, max_payload_bytes is {max_bytes}; "
            "publish a reference to the data, or raise the setting for publishers"
        )
    return encoded.decode()


def decode(text: str) -> Any:
    """JSON text as Python values; integers of any size stay exact.

    Raises :class:`~eventbus.errors.PayloadMismatch` for text that Python cannot hold. :func:`encode` never writes
    such text, but ``json`` columns accept it from SQL: an integer of more than 4,300 digits, very deep nesting.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError:
        pass
    try:  # slower, but reads what PostgreSQL accepts from others: deeper nesting, half a surrogate pair
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        problem = str(error)
    raise PayloadMismatch(f"payload cannot be decoded: {problem}")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _encode_plain(value: Any) -> bytes | None:
    """What the fast path can prove to be exact, else ``None``."""
    try:
        encoded = orjson.dumps(value, option=_ONLY_PLAIN)
        exact = orjson.loads(encoded) == value
    except Exception:  # noqa: BLE001 - whatever it is, the careful path finds it again and says where it is
        return None
    if not exact or (len(encoded) > 2 * MAX_DEPTH and _is_deep(encoded, value)):
        return None
    return encoded


def _is_deep(encoded: bytes, value: Any) -> bool:
    """True if plain containers are nested more than ``MAX_DEPTH`` levels. Looks at each level as a whole."""
    if encoded.count(b"[") + encoded.count(b"{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if type(parent) is dict else parent)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True


def _encode_carefully(value: Any) -> bytes:
    try:
        plain = to_plain(value)
    except NoPlainForm as refused:
        raise InvalidPayload(refused.path, refused.problem) from refused.__cause__
    try:
        return orjson.dumps(plain)
    except orjson.JSONEncodeError:  # an integer of more than 64 bits
        return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
