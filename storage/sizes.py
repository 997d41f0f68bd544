"""Formats sizes as people write them: 668 MB, or 668MB in an option."""

from __future__ import annotations

_UNITS = ("B", "KB", "MB", "GB", "TB")
"""Powers of 1000."""


def format_size(size: float) -> str:
    """Formats bytes in powers of 1000, to three digits: 1.5 GB."""
    for unit in _UNITS[:-1]:
        if abs(size) < 999.5:  # more would be rounded to 1000
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {_UNITS[-1]}"


def format_least(size: int) -> str:
    """Formats the smallest size of three digits that is not below `size` bytes, as an option takes it.

    >>> format_least(667_972_608), format_least(2_001_000_000), format_least(999_999)
    ('668MB', '2.01GB', '1MB')
    """
    step = _step(size)
    return _in_option(-(-size // step) * step)


def format_most(size: int) -> str:
    """Formats the largest size of three digits that is not above `size` bytes, as an option takes it.

    >>> format_most(667_972_608), format_most(2_001_000_000), format_most(999_999)
    ('667MB', '2GB', '999KB')
    """
    return _in_option(size - size % _step(size))


def _step(size: int) -> int:
    """The difference between two sizes of three digits next to `size`."""
    return int(10 ** max(len(str(size)) - 3, 0))


def _in_option(rounded: int) -> str:
    power = min((len(str(rounded)) - 1) // 3, len(_UNITS) - 1)
    return f"{rounded / 1000**power:g}{_UNITS[power]}"
