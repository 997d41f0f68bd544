"""The server's process: its port, its signals, and the models that load meanwhile."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from edgemoe.errors import UserError
from edgemoe.serve.app import make_app
from edgemoe.serve.connections import Connection, Door
from edgemoe.serve.guard import HEADER_BYTES, Access
from edgemoe.serve.models import Models

DRAIN_SECONDS = 3.0
"""Time in which requests under way may end after SIGTERM, before they are broken off."""

END_SECONDS = 4.8
"""Time after SIGTERM, or after a second signal, at which the process ends, whatever still runs in it."""

TICK_SECONDS = 1.0
"""Time between two looks at the models whose time may be over."""

INTERRUPTED = 130
"""Exit code after a second signal."""


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

    def _refused(self, finding: str) -> UserError:
        where = f"{self.host}:{self.port}"
        return UserError(
            f"a free port at {where}", finding, "choose another --port or --host, or end its program"
        )


class Server(uvicorn.Server):
    """Serves models at a port. Ctrl-C drains it, SIGTERM for some seconds.

    A second signal ends the answers under way by an error, and raises KeyboardInterrupt when it has gone out; a third
    one raises it at once.

    Args:
        models: the models.
        access: the clients that may send requests.
        say: prints a line for people.
    """

    def __init__(self, models: Models, access: Access, say: Callable[[str], None]) -> None:
        logging.getLogger("uvicorn.error").setLevel(
            logging.CRITICAL
        )  # requests that are no HTTP, and its own steps
        config = uvicorn.Config(
            make_app(models, access),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=HEADER_BYTES,
            proxy_headers=bool(access.proxies),
            forwarded_allow_ips=list(access.proxies),
        )
        super().__init__(config)
        self._models, self._say = models, say
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._interrupted = False

    def serve_models(self, listening: socket.socket) -> None:
        """Serves until a signal has drained it, and closes every model.

        Args:
            listening: the port, which answers while the first model loads.

        Raises:
            KeyboardInterrupt: by the second signal; requests are cancelled.
            the error of Models.start.
        """
        try:
            self.run([listening])
        finally:
            self._models.close()
        if self._interrupted:
            raise KeyboardInterrupt
        if self._error:
            raise self._error

    async def _start(self) -> None:
        """Has the first model loaded; where that fails, the server ends."""
        try:
            await self._models.start()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error, self.should_exit = error, True
            return
        self._say("ready")

    async def _tick(self) -> None:
        """Has models unloaded whose time is over."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._models.tick()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections."""
        self.servers, self._loop = [], asyncio.get_running_loop()
        door = Door(self._open, self._connection)
        self._accepting = [asyncio.create_task(door.accept(each)) for each in sockets or ()]
        work = (door.watch(), self._start(), self._tick())
        self._background = [asyncio.create_task(each) for each in work]
        self.started = True

    def _connection(self) -> Connection:
        return Connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def _open(self) -> list[Connection]:
        return [each for each in self.server_state.connections if isinstance(each, Connection)]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends connections without a whole request, and waits for the others; after SIGTERM for some seconds."""
        for task in self._accepting:
            task.cancel()
        if self.config.timeout_graceful_shutdown:
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._break_off)
        self._abort(lambda each: each.waits)
        await super().shutdown(sockets)
        for task in self._background:
            task.cancel()
        self._abort(lambda each: True)

    def _break_off(self) -> None:
        """Ends the answers under way by an error, and soon the connections of clients that do not read it."""
        self._models.break_off()
        asyncio.get_running_loop().call_later(0.5, self._abort, lambda each: True)

    def _abort(self, condition: Callable[[Connection], bool]) -> None:
        for each in filter(condition, self._open()):
            each.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self.should_exit:
            if self._interrupted or self._loop is None:
                raise KeyboardInterrupt
            self._interrupted = True
            self._loop.call_soon_threadsafe(self._break_off)
            _end_later(INTERRUPTED)
            return
        self.should_exit = True
        if sig == signal.SIGTERM:
            self.config.timeout_graceful_shutdown = round(DRAIN_SECONDS) + 1
            _end_later(0)
        n = sum(slot.unfinished for slot in self._models.slots)
        most = f" or {DRAIN_SECONDS:g} s" if sig == signal.SIGTERM else ""
        after = f" after {n} request{'s' * (n != 1)}{most}; Ctrl-C again ends at once" if n else ""
        self._say(f"ending{after}")


def _end_later(code: int) -> None:
    """Ends the process with an exit code after END_SECONDS, whatever still runs in it."""
    last = threading.Timer(END_SECONDS, os._exit, (code,))
    last.daemon = True
    last.start()
