"""Sizes as people write them: 12GB, 11.5GiB, 800MB, or plain bytes."""

from __future__ import annotations

import re

from storage.errors import UserError

_UNITS = {"": 1, "B": 1}
_UNITS |= {prefix + "B": 1000**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {prefix + "IB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Bytes that `text` stands for.

    Raises:
        UserError: not a number with an optional unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB), or not above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match and match[2].upper() in _UNITS and (size := int(float(match[1]) * _UNITS[match[2].upper()])) > 0:
        return size
    raise UserError("a size was wanted", f"got {text!r}", "Write it as 12GB, 11.5GiB, 800MB or bytes")


def format_size(size: float) -> str:
    """Bytes for people, in powers of 1000: 1.5 GB."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
