"""Times for people: 50ms, 0.05s."""

from __future__ import annotations

import re

from edgemoe.errors import UserError

_UNITS = {"ms": 0.001, "s": 1.0}


def parse_duration(text: str) -> float:
    """Parses a time into seconds.

    Raises:
        UserError: no number with the unit ms or s, or 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", text)
    if match and (seconds := float(match[1]) * _UNITS[match[2]]) > 0:
        return seconds
    raise UserError("a time such as 50ms", repr(text), "write it as 50ms or 0.05s")
