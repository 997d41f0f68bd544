"""Calls slow work on a thread of its own, which does not keep the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


async def on_own_thread(work: Callable[[], Result]) -> Result:
    """Calls a function on a thread that does not keep the process from ending; returns its result, raises its error."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def end(outcome: tuple[Any, BaseException | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = work(), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(end, outcome)

    threading.Thread(target=run, name="edgemoe-loader", daemon=True).start()
    result: Result
    result, error = await done
    if error is not None:
        raise error
    return result
