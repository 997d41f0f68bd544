"""The prompts that a program answers, untimed, before its measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any


def warm_ups(request: dict[str, Any], clock: Callable[[], float] = time.perf_counter) -> Iterator[list[int]]:
    """Yields the token ids of a request's `warm_up` prompts in whole rounds until `warm_up_s` seconds are over."""
    until = clock() + request.get("warm_up_s", 0)
    while request["warm_up"]:
        yield from request["warm_up"]
        if clock() >= until:
            return
