"""Ollama's `keep_alive`: how long a model stays loaded after a request."""

from __future__ import annotations

import re

from edgemoe.console.durations import seconds_of
from edgemoe.serve.errors import ApiError

FOREVER = float("inf")

_NUMBER = re.compile(r"\d{1,15}(\.\d{1,9})?", re.ASCII)


def keep_alive_seconds(value: object) -> float | None:
    """Seconds for which a model stays, FOREVER for a negative time; None: the request does not say it.

    Args:
        value: a number of seconds, or a text such as "5m", "1h30m", "-1" or "0".

    Raises:
        ApiError: it is neither.

    >>> keep_alive_seconds("5m"), keep_alive_seconds(-1), keep_alive_seconds("0"), keep_alive_seconds(None)
    (300.0, inf, 0.0, None)
    """
    if value is None or value == "":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return FOREVER if value < 0 else float(value)
    seconds = None
    if isinstance(value, str):
        negative, size = value.startswith("-"), value.removeprefix("-")
        seconds = float(size) if _NUMBER.fullmatch(size) else seconds_of(size)
        if negative and seconds is not None:
            return FOREVER
    if seconds is None:
        message = f"expected a time such as 5m, 0 or -1 in keep_alive, got {repr(value)[:60]}: send one"
        raise ApiError(400, message, param="keep_alive")
    return seconds
