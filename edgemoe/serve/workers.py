"""Threads for the work of requests, so that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Workers:
    """A few threads; further work waits, so that the memory of what runs is bounded.

    Args:
        threads: number of threads.
        name: the threads' name.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, f"edgemoe-{name}")

    async def run(self, work: Callable[Given, Result], *args: Given.args, **more: Given.kwargs) -> Result:
        """Calls a function on one of the threads, and returns its result."""
        return await asyncio.wrap_future(self._pool.submit(work, *args, **more))
