"""Sizes for people: 12GB, 11.5GiB, 800MB, or plain bytes."""

from __future__ import annotations

import re

from storage.errors import UserError

_UNITS = {"": 1, "B": 1}
_UNITS |= {prefix + "B": 1000**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {prefix + "IB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Parses a size into bytes.

    Raises:
        UserError: no number with an optional unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), or 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match and match[2].upper() in _UNITS and (size := int(float(match[1]) * _UNITS[match[2].upper()])) > 0:
        return size
    raise UserError("a size such as 12GB", repr(text), "write it as 12GB, 11.5GiB, 800MB or bytes")


def format_size(size: float) -> str:
    """Formats bytes in powers of 1000, to three digits: 1.5 GB."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
