"""Who may send requests: hosts, origins, keys, and limits on headers and bodies."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from servers import a_model, server_of

from edgemoe.commands.options.serve import AddressOptions
from edgemoe.errors import UserError
from edgemoe.serve import connections
from edgemoe.serve.guard import Access
from edgemoe.serve.server import Address

KEY = "s3cret-schlüssel"
ACCESS = Access(hosts=("model.example",), origins=("https://chat.example.com",), key=KEY)


@pytest.fixture(scope="module")
def guarded(tiny_store) -> Iterator[object]:
    with server_of(a_model(tiny_store), ACCESS) as one:
        yield one


def status(server, path: str = "/v1/models", **headers: str) -> int:
    return server.client.get(path, headers={"authorization": f"Bearer {KEY}".encode()} | headers).status_code


@pytest.mark.e2e
@pytest.mark.parametrize(
    "host", ["evil.example", "", "127.0.0.1.evil.example", "[", "model.example.evil", "a@b:c"]
)
def test_other_names_of_the_server_are_refused(guarded, host):
    """A page on another site that reaches this server under its own name gets nothing (DNS rebinding)."""
    assert status(guarded, host=host) == 403
    assert status(guarded, "/health", host=host) == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:80", "model.example:443"]
)
def test_known_names_are_served(guarded, host):
    """localhost, addresses, and the names given."""
    assert status(guarded, host=host) == 200


def test_pages_of_other_sites_need_to_be_listed(guarded):
    """A listed origin is answered with CORS headers, another is refused before anything runs; ours is served."""
    listed = {"authorization": f"Bearer {KEY}".encode(), "origin": "https://chat.example.com"}
    answer = guarded.client.get("/v1/models", headers=listed)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, listed["origin"])
    preflight = {"origin": listed["origin"], "access-control-request-method": "POST"}
    before = guarded.client.options("/v1/chat/completions", headers=preflight)
    assert before.status_code == 204
    assert "authorization" in before.headers["access-control-allow-headers"]
    names = {"access-control-request-headers": "authorization, x-stainless-os"}
    answered = guarded.client.options("/v1/chat/completions", headers=preflight | names)
    assert answered.headers["access-control-allow-headers"] == names["access-control-request-headers"]
    for origin in ("https://evil.example", "null", "https://chat.example.com.evil", "http:" + "//["):
        refused = guarded.client.get("/v1/models", headers=listed | {"origin": origin})
        assert refused.status_code == 403
        assert "access-control-allow-origin" not in refused.headers
    assert status(guarded, origin=guarded.url) == 200
    assert "access-control-allow-origin" not in guarded.client.get("/health").headers


@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer x", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"]
)
def test_requests_need_the_key(guarded, key):
    """Without the whole key every path but /health is 401."""
    headers = {} if key is None else {"authorization": key.encode()}
    for path in ("/v1/models", "/metrics", "/tokenizer_info", "/nothing"):
        refused = guarded.client.get(path, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert guarded.client.get("/health", headers=headers).status_code == 200
    assert KEY not in repr(ACCESS)


@pytest.mark.parametrize("key", ["", " ", "\t\n"])
def test_a_blank_key_is_refused(key):
    """A key that a script has left empty is an error before the port is open, and no open door."""
    with pytest.raises(UserError, match="a blank one"):
        Access(key=key)
    with pytest.raises(UserError, match="a key in --api-key, got a blank one"):
        AddressOptions(api_key=key).key()


@pytest.mark.parametrize("text", ["fd00::/8", "::1", "127.0.0.1"])
def test_addresses_of_proxies(text):
    """Addresses and networks are taken, another text is refused."""
    assert AddressOptions(trusted_proxy=[text]).proxies() == (text,)
    with pytest.raises(UserError, match="an address in --trusted-proxy, got 'x'"):
        AddressOptions(trusted_proxy=[text, "x"]).proxies()


def test_bodies_are_bounded(server):
    """A body that is too long by its header, or as it comes, is 413; one that comes too slowly is 408."""
    path = "/v1/completions"
    with server.limited(body_bytes=1000):
        assert server.client.post(path, content=b"x" * 1001).status_code == 413
        assert server.client.post(path, content=iter([b"x" * 600] * 2)).status_code == 413
    with (
        server.limited(body_seconds=0.3),
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection,
    ):
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
        start = time.monotonic()
        while connection.recv(4096):
            pass
        assert time.monotonic() - start < 5


def test_headers_are_bounded(server, monkeypatch):
    """Headers beyond 64 KiB are 431, or 400 in parts; slow ones lose the connection, in a second request too."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    long = server.client.get("/health", headers={"x": "y" * (70 << 10)})
    assert long.status_code in (400, 431)
    for before in (b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(before + b"GET /health HTTP/1.1\r\nhost: loc")
            start = time.monotonic()
            while connection.recv(4096):
                pass
            assert time.monotonic() - start < 5


def test_a_taken_port_and_a_strange_host_are_named():
    """Exit code 2, with the address."""
    with Address(port=0).listen() as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"free port at 127.0.0.1:{port}, got Address already in use"):
            Address(port=port).listen()
    for host in ("no.such.host.invalid", "x" * 300, "a..b"):
        with pytest.raises(UserError, match="a free port at"):
            Address(host).listen()
