"""Compiles the grammars of answers on threads that do nothing else, as long as clients wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request

from edgemoe.errors import UserError
from edgemoe.serve.errors import UNAVAILABLE, ApiError

if TYPE_CHECKING:
    from edgemoe.grammar.confined import Cancellation
    from edgemoe.grammar.matcher import Grammar

_THREADS = 8
"""One compiles; the others find grammars that are kept, or wait for their turn."""

_SLICE_SECONDS = 0.2
"""Time between two looks whether the client is still there."""


class Compiling:
    """Threads that compile grammars. For the event loop's thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "edgemoe-grammars")

    async def run(
        self, request: Request, compile_: Callable[[Cancellation], Grammar], seconds: float, field: str
    ) -> Grammar:
        """Compiles a grammar for a request. It is cancelled when the client leaves, or the time is over.

        Args:
            request: the client's request.
            compile_: compiles the grammar, and can be cancelled.
            seconds: time until it must be compiled, the wait for its turn included.
            field: the field of the request that has the schema, for errors.

        Raises:
            ApiError: the schema cannot be enforced, takes too long, or its turn has not come in time.
            ClientDisconnect: the client has left.
        """
        from edgemoe.grammar.confined import Cancellation

        cancellation, end = Cancellation(), time.monotonic() + seconds
        future = asyncio.wrap_future(self._pool.submit(compile_, cancellation))
        try:
            while not (await asyncio.wait({future}, timeout=min(_SLICE_SECONDS, seconds)))[0]:
                if await request.is_disconnected():
                    raise ClientDisconnect
                if time.monotonic() >= end:
                    raise _late(seconds, field, has_begun=cancellation.begun)
            return future.result()
        except UserError as error:
            found = ApiError.of(error)
            found.param = field
            raise found from error
        finally:
            cancellation.cancel()
            future.cancel()


def _late(seconds: float, field: str, *, has_begun: bool) -> ApiError:
    if has_begun:
        message = (
            f"expected a form of answers that compiles within {seconds:g} s, got another: send a smaller one"
        )
        return ApiError(400, message, param=field)
    message = (
        f"expected a turn to compile the form of answers within {seconds:g} s, got none: send it again later"
    )
    return ApiError(503, message, kind=UNAVAILABLE, code=503, headers={"retry-after": "5"})
