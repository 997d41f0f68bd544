"""Open connections: how many there are, how long they wait for a client, and how they are accepted."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0
"""Time in which all of a request's headers must have come."""

STALL_SECONDS, STALL_BYTES = 30.0, 16 << 10
"""A client that has an answer to read reads so many bytes in this time."""

PROBE_SECONDS = 0.5
"""Time between two signs of life for a client that has ended its sending side."""

MOST_CONNECTIONS = 512
"""Open connections; a further one takes the place of one that waits for its client."""

_RETRY_SECONDS, _SILENT_SECONDS = 0.1, 60.0


class Connection(H11Protocol):
    """HTTP on a connection that a client neither holds by sending slowly nor by reading nothing.

    Attributes:
        waiting_since: when it began to wait for a request, by the loop's time.
    """

    waiting_since = 0.0
    _deadline: asyncio.TimerHandle | None = None
    _left = sys.maxsize  # bytes to send when some were last seen to go out
    _moved = 0.0  # when that was
    _ended = False  # the client sends no more

    @property
    def waits(self) -> bool:
        """Whether no whole request is under way: it is idle, or its headers or its body still come."""
        return self._idle or self.cycle.more_body

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Begins a connection."""
        super().connection_made(transport)
        self.waiting_since = self._moved = self.loop.time()
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._expire)

    def data_received(self, data: bytes) -> None:
        """Takes bytes; the first of a further request begin its time."""
        idle = self._idle
        super().data_received(data)
        if idle and self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._expire)

    def eof_received(self) -> Any:
        """Returns whether the connection stays: a client that ends its sending side after a whole request may wait.

        A client that has left looks the same, but its system refuses signs of life, which ends the connection.
        """
        self._ended = (
            not self.waits and not self.cycle.response_started and self.scope["http_version"] == "1.1"
        )
        if self._ended:
            self._probe()
        return self._ended

    def _probe(self) -> None:
        if not (self._idle or self.cycle.response_started or self.transport.is_closing()):
            sign = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(sign) or b"")
            self.loop.call_later(PROBE_SECONDS, self._probe)

    def on_response_complete(self) -> None:
        """Begins to wait for a further request, where one can come."""
        self.waiting_since = self.loop.time()
        super().on_response_complete()
        if self._ended and self._idle:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are no HTTP; once a response has begun, closes the connection alone.

        A request that is under way sends nothing after it: it finds that its client has left.
        """
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.close()
        if not self._idle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def resume_writing(self) -> None:
        """Notes that the client has read."""
        super().resume_writing()
        self._left = sys.maxsize

    def check(self, now: float) -> None:
        """Ends the connection where its client reads nothing; to be called every second.

        Args:
            now: the loop's time.
        """
        left = self.transport.get_write_buffer_size()
        to_read = left and (self._idle or self.flow.write_paused)
        if not to_read or left <= self._left - STALL_BYTES:
            self._left, self._moved = left or sys.maxsize, now
        elif now - self._moved > STALL_SECONDS:
            self.transport.abort()

    def _expire(self) -> None:
        self._deadline = None
        if self._idle and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends a connection."""
        if self._deadline:
            self._deadline.cancel()
        super().connection_lost(exc)


class Door:
    """Accepts connections one by one, while there are places for them.

    Args:
        connections: returns the open ones.
        make: makes the protocol of a new one.
    """

    def __init__(
        self, connections: Callable[[], Collection[Connection]], make: Callable[[], Connection]
    ) -> None:
        self._connections, self._make, self._noted = connections, make, -_SILENT_SECONDS
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._places = min(MOST_CONNECTIONS, files // 2) if files > 0 else MOST_CONNECTIONS

    async def accept(self, listening: socket.socket) -> None:
        """Accepts until it is cancelled."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            try:
                one, _ = await loop.sock_accept(listening)
            except OSError as error:  # such as no file descriptor that is free
                self._note(error)
                await self._make_place()
                continue
            while len(self._connections()) >= self._places:
                await self._make_place()
            try:
                await loop.connect_accepted_socket(self._make, one)
            except OSError:
                one.close()

    async def watch(self) -> None:
        """Ends connections whose clients read nothing, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, STALL_SECONDS / 4))
            for each in self._connections():
                each.check(loop.time())

    async def _make_place(self) -> None:
        """Ends the connection that waits longest, of the address with most of them; where none waits, pauses."""
        waiting = [each for each in self._connections() if each.waits]
        if waiting:
            number = Counter(_address(each) for each in waiting)
            max(waiting, key=lambda each: (number[_address(each)], -each.waiting_since)).transport.abort()
        await asyncio.sleep(0 if waiting else _RETRY_SECONDS)

    def _note(self, error: OSError) -> None:
        """Logs, at most once a minute, that no connection can be accepted."""
        now = asyncio.get_running_loop().time()
        if now - self._noted >= _SILENT_SECONDS:
            self._noted = now
            message = "no connection was accepted: %s; this line comes at most once a minute"
            logging.getLogger("edgemoe.serve").warning(message, error.strerror or error)


def _address(connection: Connection) -> str:
    return connection.client[0] if connection.client else ""
