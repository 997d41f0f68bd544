"""Reads the bodies of requests, within bounds."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from edgemoe.serve.errors import ApiError
from edgemoe.serve.limits import Limits

_CLOSE = {"connection": "close"}
"""Header of a response to a request whose body is not read to its end."""


async def body_of(request: Request, limits: Limits) -> bytes:
    """Reads a request's body.

    Raises:
        ApiError: it is too long, or comes too slowly.
        ClientDisconnect: the client has left.
    """
    length, body, most = request.headers.get("content-length", "0"), bytearray(), limits.body_bytes
    too_long = ApiError(413, f"expected a body of at most {most} bytes, got more", headers=_CLOSE)
    if length.isdecimal() and int(length[:20]) > most:
        raise too_long
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_long
    except TimeoutError:
        message = f"expected the whole body within {limits.body_seconds:g} s, got a part of it"
        raise ApiError(408, message, headers=_CLOSE) from None
    return bytes(body)
