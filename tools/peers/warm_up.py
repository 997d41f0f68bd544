"""What a program answers, untimed, before it is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any


def warm_ups(request: dict[str, Any], clock: Callable[[], float] = time.perf_counter) -> Iterator[list[int]]:
    """Token ids of prompts: all of a request's `warm_up`, again and again until `warm_up_s` seconds are over."""
    until = clock() + request.get("warm_up_s", 0)
    while request["warm_up"]:
        yield from request["warm_up"]
        if clock() >= until:
            return
