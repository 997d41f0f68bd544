"""Connections: places that idle ones give up, clients that read nothing or leave, and a system without descriptors."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from servers import a_model, server_of

from edgemoe.serve import connections
from edgemoe.serve.connections import Connection, Door
from edgemoe.serve.guard import Access
from edgemoe.serve.job import Queue

PLACES = 6
COMPLETION = b'{"prompt": "fox", "max_tokens": 2}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def crowded(tiny_store) -> Iterator[object]:
    """A server of few places, which waits half a second for a reader, and trusts a proxy on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MOST_CONNECTIONS": PLACES, "STALL_SECONDS": 0.5, "PROBE_SECONDS": 0.1}.items():
            patch.setattr(connections, name, value)
        with server_of(a_model(tiny_store), Access(proxies=("127.0.0.1",))) as one:
            yield one


def connected(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


@pytest.mark.e2e
@pytest.mark.parametrize("message", [b"", b"GET / HT", POST % 9 + b"{"])
def test_waiting_connections_give_up_their_places(crowded, message):
    """More of them than there are places keep no request out, and no more than the places stay open."""
    with ExitStack() as stack:
        for _ in range(4 * PLACES):
            stack.enter_context(connected(crowded)).sendall(message)
        assert httpx.get(f"{crowded.url}/health", trust_env=False).status_code == 200
        crowded.wait(lambda: len(crowded.server.server_state.connections) <= PLACES)


@pytest.mark.e2e
def test_a_client_that_reads_nothing_loses_its_connection(crowded):
    """Its answers do not pile up, and its place is free."""
    crowded.client.close()
    crowded.client = httpx.Client(base_url=crowded.url, timeout=60, trust_env=False)
    with connected(crowded) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
        crowded.wait(lambda: any(c.flow.write_paused for c in crowded.server.server_state.connections))
        crowded.wait(lambda: not crowded.server.server_state.connections, 10)


@pytest.mark.e2e
def test_a_client_that_ends_its_sending_side_is_answered(crowded):
    """Its answer comes, after signs of life, and then the connection ends."""
    with connected(crowded) as one:
        one.sendall(POST % len(COMPLETION) + COMPLETION)
        one.shutdown(socket.SHUT_WR)
        came = b"".join(iter(lambda: one.recv(1 << 16), b""))
    assert came.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert b"HTTP/1.1 200 OK" in came
    assert b'"finish_reason":"length"' in came


@pytest.mark.e2e
@pytest.mark.parametrize("host", [b"localhost", b"evil.example"])
def test_a_body_that_is_no_http_ends_its_request(crowded, caplog, monkeypatch, host):
    """The refusal of its chunk is all that goes out, even if the request has its answer before the connection ends."""
    lost = Connection.connection_lost
    monkeypatch.setattr(
        Connection, "connection_lost", lambda c, error: c.loop.call_later(0.2, lost, c, error)
    )
    with connected(crowded) as one:
        one.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nhost: %b\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n" % host
        )
        assert one.makefile("rb").read().startswith(b"HTTP/1.1 400")
    crowded.wait(lambda: not crowded.server.server_state.tasks)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.e2e
def test_a_forwarded_address_counts_from_a_trusted_proxy_alone(crowded, server, monkeypatch):
    """Elsewhere the header is text that any client may send."""
    enter, clients = Queue.enter, []

    def note(self: Queue, client: str) -> None:
        clients.append(client)
        enter(self, client)

    monkeypatch.setattr(Queue, "enter", note)
    for one in (crowded, server):
        sent = {"x-forwarded-for": "2001:db8::9"}
        assert one.client.post("/v1/completions", content=COMPLETION, headers=sent).status_code == 200
    assert clients == ["2001:db8::9", "127.0.0.1"]


def test_no_free_descriptor_is_one_line_a_minute(monkeypatch, caplog):
    """A thousand refusals of the system are one warning, and the connection after them is accepted."""
    monkeypatch.setattr(connections, "_RETRY_SECONDS", 0)
    accepted = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        refusals = [OSError(errno.EMFILE, "Too many open files")] * 1000

        async def accept(listening: socket.socket) -> tuple[socket.socket, object]:
            if refusals:
                raise refusals.pop()
            monkeypatch.undo()
            return await loop.sock_accept(listening)

        monkeypatch.setattr(loop, "sock_accept", accept)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            door = asyncio.create_task(Door(lambda: [], lambda: Noted(accepted)).accept(listening))
            with socket.create_connection(listening.getsockname()):
                async with asyncio.timeout(10):
                    while not accepted:
                        await asyncio.sleep(0.01)
            door.cancel()

    asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records if record.name == "edgemoe.serve"]
    assert lines == ["no connection was accepted: Too many open files; this line comes at most once a minute"]


class Noted(asyncio.Protocol):
    """Notes that it was connected."""

    def __init__(self, notes: list[object]) -> None:
        self._notes = notes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._notes.append(transport)
        transport.close()
