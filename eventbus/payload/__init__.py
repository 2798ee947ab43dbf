"""From a Python value to JSON text and back, exactly or not at all.

Publishing calls :func:`encode` before any SQL, so that a payload that cannot be published leaves the caller's
transaction untouched; an event calls :func:`decode` when a handler first looks at its payload. ``text`` does both;
``plain`` knows what the types beyond JSON's become.
"""

from eventbus.payload.text import decode, encode

__all__ = ["decode", "encode"]
