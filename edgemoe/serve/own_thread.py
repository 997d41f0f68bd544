"""Calls slow work on a thread of its own, which does not keep the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


async def on_own_thread(work: Callable[[], Result]) -> Result:
    """Calls a function on a thread that does not keep the process from ending; returns its result, raises its error.

    Nothing here refers to the error after it is raised: the objects in its traceback are freed once it is handled.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    outcome: list[tuple[Any, BaseException | None]] = []

    def end() -> None:
        if not done.done():
            done.set_result(None)

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(end)

    threading.Thread(target=run, name="edgemoe-loader", daemon=True).start()
    await done
    result: Result
    result, error = outcome.pop()
    if error is not None:
        try:
            raise error
        finally:
            del error  # this frame is in its traceback
    return result
