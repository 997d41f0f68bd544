"""Collects the seconds that the compiled attention takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from edgemoe.kernels.native.attention import NativeAttention


@contextmanager
def attention_clock() -> Iterator[list[float]]:
    """Collects the seconds of each call of the compiled attention inside the block."""
    seconds, call = list[float](), NativeAttention.__call__

    def timed(attention: NativeAttention, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(attention, *arguments, **options)
        finally:
            seconds.append(time.perf_counter() - start)

    with mock.patch.object(NativeAttention, "__call__", timed):
        yield seconds
