"""The server's process: its port, its signals, and the model that loads meanwhile."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgemoe.errors import UserError
from edgemoe.serve.app import make_app
from edgemoe.serve.guard import HEADER_BYTES, Access
from edgemoe.serve.serving import Serving

if TYPE_CHECKING:
    from edgemoe.api.model import Model

HEADER_SECONDS = 20.0
"""Time in which all of a request's headers must have come."""

MOST_CONNECTIONS = 512
"""Open connections; one more is answered by 503."""


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    Args:
        host: a name or an address.
        port: 0 for any free one.
    """

    host: str = "127.0.0.1"
    port: int = 8080

    def listen(self) -> socket.socket:
        """Opens the port.

        Raises:
            UserError: it is taken, or the host is none of this machine's.
        """
        try:
            family, kind, number, _, place = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            one = socket.socket(family, kind, number)
        except (OSError, UnicodeError) as error:
            raise self._refused(str(error)) from error
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(place)
            one.listen(128)
        except OSError as error:
            one.close()
            raise self._refused(error.strerror or str(error)) from error
        return one

    def _refused(self, found: str) -> UserError:
        where = f"{self.host}:{self.port}"
        return UserError(
            f"a free port at {where}", found, "choose another --port or --host, or end its program"
        )


class Protocol(H11Protocol):
    """HTTP whose headers must come in time, so that slow senders keep no connection."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins a connection."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._expire)

    def data_received(self, data: bytes) -> None:
        """Takes bytes; the first of a further request begin its time."""
        idle = self.cycle is None or self.cycle.response_complete
        super().data_received(data)
        if idle and self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._expire)

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are no HTTP; once a response has begun, closes the connection alone."""
        try:
            super().send_400_response(msg)
        except LocalProtocolError:
            self.transport.close()

    def _expire(self) -> None:
        self._deadline = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends a connection."""
        if self._deadline:
            self._deadline.cancel()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """Serves one model at a port. The first Ctrl-C, or SIGTERM, drains it; the second one raises KeyboardInterrupt.

    Args:
        serving: gets the model.
        access: who may send requests.
        say: prints a line for people.
    """

    def __init__(self, serving: Serving, access: Access, say: Callable[[str], None]) -> None:
        logging.getLogger("uvicorn.error").setLevel(
            logging.CRITICAL
        )  # requests that are no HTTP, and its own steps
        config = uvicorn.Config(
            make_app(serving, access),
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=HEADER_BYTES,
            limit_concurrency=MOST_CONNECTIONS,
        )
        super().__init__(config)
        self._serving, self._say = serving, say
        self._error: BaseException | None = None

    def serve_model(self, load: Callable[[ExitStack], Model], listening: socket.socket) -> None:
        """Serves until a signal has drained it, and closes what loading has opened.

        Args:
            load: opens the model and puts what must be closed on the stack, on another thread, while the port answers.
            listening: the port.

        Raises:
            KeyboardInterrupt: by the second signal; requests are cancelled.
            the error that ended loading.
        """
        with ExitStack() as opened:
            loader = threading.Thread(
                target=self._load, args=(load, opened), name="edgemoe-loader", daemon=True
            )
            loader.start()
            self.run([listening])
        if self._error:
            raise self._error

    def _load(self, load: Callable[[ExitStack], Model], opened: ExitStack) -> None:
        try:
            model = load(opened)
        except BaseException as error:
            self._error, self.should_exit = error, True
            return
        model.keep_warm()
        self._serving.open(model)
        self._say("ready")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self.should_exit:
            raise KeyboardInterrupt
        self.should_exit = True
        n = len(self._serving.queue.jobs)
        after = f" after {n} request{'s' * (n != 1)}; Ctrl-C again ends at once" if n else ""
        self._say(f"ending{after}")
