"""Sizes for people: 12GB, 12G, 11.5GiB, 800MB, or plain bytes."""

from __future__ import annotations

import re
from decimal import Decimal

from edgemoe.errors import UserError
from edgemoe.storage.sizes import format_least, format_most, format_size

__all__ = ["format_least", "format_most", "format_size", "parse_size"]

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", 1):
    _UNITS |= dict.fromkeys((_prefix, f"{_prefix}B"), 1000**_power)
    _UNITS |= dict.fromkeys((f"{_prefix}I", f"{_prefix}IB"), 1024**_power)


LEAST_PLAIN = 10**5
"""Fewest bytes that may be written without a unit: a smaller number is one whose unit was forgotten."""


def parse_size(text: str) -> int:
    """Parses a size into bytes: K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024, with a B or without.

    Raises:
        UserError: no number with such a unit or none, in any case, or 0; or fewer than LEAST_PLAIN bytes without one.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    if match and match[2].upper() in _UNITS:
        size = int(Decimal(match[1]) * _UNITS[match[2].upper()])  # exact, where 2.01 * 1e9 is not
        if size < LEAST_PLAIN and not match[2] and size:
            raise UserError(
                "a size with a unit",
                f"{text!r}, which is {size} bytes",
                f"write {match[1]}GB or {match[1]}MB",
            )
        if size > 0:
            return size
    raise UserError("a size such as 12GB", repr(text), "write it as 12GB, 12G, 11.5GiB, 800MB or bytes")
