"""Times for people: 50ms, 0.05s, 10m, 1h30m."""

from __future__ import annotations

import re

from edgemoe.errors import UserError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)", re.ASCII)
_ALL = re.compile(rf"\s*(?:{_PART.pattern}\s*)+", re.ASCII)


def seconds_of(text: str) -> float | None:
    """Seconds of a time that is written in numbers with units; None: it is written otherwise.

    >>> seconds_of("50ms"), seconds_of("1h30m"), seconds_of("0s"), seconds_of("5")
    (0.05, 5400.0, 0.0, None)
    """
    if len(text) > 64 or not _ALL.fullmatch(text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


def parse_duration(text: str) -> float:
    """Parses a time into seconds.

    Raises:
        UserError: no number with the unit ms, s, m or h, or 0.
    """
    seconds = seconds_of(text)
    if not seconds:
        raise UserError("a time such as 50ms", repr(text), "write it as 50ms, 0.05s, 10m or 1h30m")
    return seconds
