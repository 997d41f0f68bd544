"""Bounds on the parts of a JSON body, checked before a field is validated: whatever comes costs a bounded time."""

from __future__ import annotations

import re

from pydantic_core import from_json

from edgemoe.serve.errors import ApiError

MOST_PARTS = 1 << 18
"""Most strings, commas, objects and lists of a body together: 262,143 token ids."""

MOST_CONTAINERS = 1 << 13
"""Most objects and lists of a body together: a conversation of some thousand messages with their parts."""

MOST_NAMES = 1 << 11
"""Most fields of one object."""

NUMBER_CHARACTERS = 64
"""Most characters of a number."""

_STRETCH = 1 << 16
"""Bytes that are searched in one call, so that other threads run between two calls."""

_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_STRING = re.compile(rb'"%b"' % _IN_STRING.pattern, re.DOTALL)
_STRINGS = re.compile(rb'(?:[^"]*+%b)*+' % _STRING.pattern, re.DOTALL)
_LONG_NUMBER = re.compile(rb"[0-9.eE+-]{%d}" % (NUMBER_CHARACTERS + 1))
_BOM = b"\xef\xbb\xbf"


def parsed(body: bytes) -> object:
    """Parses a JSON text whose parts are bounded. A byte order mark before it is left out.

    Raises:
        ApiError: it is no JSON, or a bound is exceeded.
    """
    _require_few_parts(body)
    try:
        value: object = from_json(body.removeprefix(_BOM), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"expected a JSON object as the body, got another text: {error}") from None
    _require_few_names(value)
    return value


def _require_few_parts(body: bytes) -> None:
    """Counts the parts of a JSON text without parsing it.

    Raises:
        ApiError: there are too many of them, or a number is too long.
    """
    parts = containers = at = 0
    before = b""
    while at < len(body):
        at, piece = _next_piece(body, at)
        opened = piece.count(b"[") + piece.count(b"{")
        containers += opened
        parts += opened + piece.count(b",") + piece.count(b'"')
        if _LONG_NUMBER.search(before + piece):
            raise _too_large(f"numbers of at most {NUMBER_CHARACTERS} characters", "a longer one")
        if parts > MOST_PARTS:
            raise _too_large(f"at most {MOST_PARTS} values", "more")
        if containers > MOST_CONTAINERS:
            raise _too_large(f"at most {MOST_CONTAINERS} objects and lists", "more")
        before = piece[-NUMBER_CHARACTERS:]


def _next_piece(body: bytes, at: int) -> tuple[int, bytes]:
    """The end of a piece that begins outside of strings, and the piece with a quote in place of each string."""
    found = _STRINGS.match(body, at, at + _STRETCH)
    end = found.end() if found else at
    if end > at:
        return end, _STRING.sub(b'"', body[at:end])
    end = body.find(b'"', at, at + _STRETCH)
    if end < 0:
        end = min(at + _STRETCH, len(body))
        return end, body[at:end]
    return _end_of_string(body, end + 1), body[at : end + 1]


def _end_of_string(body: bytes, at: int) -> int:
    """Index after the quote that ends a string whose text begins at `at`; the body's length where it has no end."""
    while at < len(body):
        found = _IN_STRING.match(body, at, at + _STRETCH)
        end = found.end() if found else at
        if body[end : end + 1] == b'"':
            return end + 1
        if end == at:  # a backslash is the last byte
            break
        at = end
    return len(body)


def _require_few_names(value: object) -> None:
    """Looks at each object of a parsed text.

    Raises:
        ApiError: one has too many fields.
    """
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and len(one) > MOST_NAMES:
            raise _too_large(f"objects of at most {MOST_NAMES} fields", f"one of {len(one)}")
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        waiting += [each for each in inner if isinstance(each, (dict, list))]


def _too_large(expectation: str, finding: str) -> ApiError:
    return ApiError(400, f"expected {expectation} in a body, got {finding}: send less in one request")
