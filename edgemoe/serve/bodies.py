"""Reads the bodies of requests, within bounds of each and of all together, and counts the pictures that they leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.requests import Request

from edgemoe.serve.errors import UNAVAILABLE, ApiError
from edgemoe.serve.limits import Limits

_CLOSE = {"connection": "close"}
"""Header of a response to a request whose body is not read to its end."""


class _Coming:
    """A body that is read or used: its bytes so far, and the time that it has left while it comes."""

    def __init__(self) -> None:
        self.size = 0
        self.time: asyncio.Timeout | None = None
        self.displaced = False


class Bodies:
    """The bodies that are read or used at a time. Where they have too many bytes, the largest unfinished one ends."""

    def __init__(self) -> None:
        self._held = set[_Coming]()

    @asynccontextmanager
    async def reading(self, request: Request, limits: Limits) -> AsyncGenerator[bytes, None]:
        """Reads a request's body, which counts among all until the block is left.

        Raises:
            ApiError: its coding is none, it is too long or comes too slowly, or there are too many of them.
            ClientDisconnect: the client has left.
        """
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            message = f"expected a body without Content-Encoding, got {coding[:40]!r}: send it as it is"
            raise ApiError(415, message, headers={"accept-encoding": "identity"})
        one = _Coming()
        self._held.add(one)
        try:
            yield await self._read(one, request, limits)
        finally:
            self._held.remove(one)

    async def _read(self, one: _Coming, request: Request, limits: Limits) -> bytes:
        length, body, most = request.headers.get("content-length", "0"), bytearray(), limits.body_bytes
        # The connection stays open: what is left of the body is read and dropped, so that the client sees this.
        too_long = ApiError(
            413, f"expected a body of at most {most} bytes, got more: send less in one request"
        )
        if length.isdecimal() and int(length[:20]) > most:
            raise too_long
        try:
            async with asyncio.timeout(limits.body_seconds) as one.time:
                async for part in request.stream():
                    if len(body) + len(part) > most:
                        raise too_long
                    self._add(one, len(part), limits.bodies_bytes)
                    body += part
        except TimeoutError:
            if one.displaced:
                raise _too_many(limits) from None
            message = f"expected the whole body within {limits.body_seconds:g} s, got a part of it"
            raise ApiError(408, message, headers=_CLOSE) from None
        finally:
            one.time = None
        return bytes(body)

    def _add(self, one: _Coming, size: int, limit: int) -> None:
        """Counts bytes of a body, and ends the largest unfinished one where all have too many."""
        one.size += size
        while sum(each.size for each in self._held) > limit:
            largest = max((each for each in self._held if each.time), key=lambda each: each.size)
            largest.displaced, largest.size = True, 0
            if largest is one:
                raise TimeoutError
            if largest.time:
                largest.time.reschedule(asyncio.get_running_loop().time())


def _too_many(limits: Limits) -> ApiError:
    message = f"expected bodies of at most {limits.bodies_bytes} bytes at once, got more: send it again later"
    return ApiError(503, message, kind=UNAVAILABLE, headers={"retry-after": "5", **_CLOSE})


class PicturesInMemory:
    """Counts the bytes of the pictures of requests that wait for an answer or get one. For the event loop's thread.

    Attributes:
        nbytes: bytes of all of them.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, nbytes: int, limits: Limits) -> int:
        """Counts the pictures of a request, and returns their bytes. One request's pictures are never too many.

        Raises:
            ApiError: with others' pictures they have too many bytes.
        """
        if nbytes and self.nbytes and self.nbytes + nbytes > limits.pictures_bytes:
            message = (
                f"expected pictures of at most {limits.pictures_bytes} bytes in all requests at once, got "
                f"{self.nbytes + nbytes}: send it again later"
            )
            raise ApiError(503, message, kind=UNAVAILABLE, headers={"retry-after": "5"})
        self.nbytes += nbytes
        return nbytes

    def remove(self, nbytes: int) -> None:
        """Ends the count of a request's pictures."""
        self.nbytes -= nbytes
