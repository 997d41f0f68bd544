"""Who may send requests: hosts, origins of web pages, and a key. Plain ASGI."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from edgemoe.errors import UserError
from edgemoe.serve.errors import ApiError

OPEN = {"/", "/health"}
"""Paths without a key: the page, which has no data of its own, and the state for a supervisor."""

HEADER_BYTES = 64 << 10
"""Most bytes of a request's headers."""

_ALLOWED = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "authorization, content-type, x-api-key",
    "access-control-max-age": "600",
}


@dataclass(frozen=True)
class Access:
    """Who may send requests.

    Args:
        hosts: names under which the server is reached, next to addresses and localhost.
        origins: web pages on other sites, such as https://chat.example.com, that may send requests.
        key: text that requests must have, not blank; None: they need none.
        proxies: addresses or networks of proxies whose X-Forwarded-For names the client.
    """

    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    key: str | None = field(default=None, repr=False)
    proxies: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.key is not None and not self.key.strip():
            raise UserError("a key with characters", "a blank one", "write one, or leave the option out")


class Guard:
    """Refuses requests before they reach the server.

    A page on another site can name this server by a host name of its own (DNS rebinding), so only known names are
    served; and it can send requests here, so an Origin must be this server's, or be listed.

    Args:
        app: the server.
        access: the clients that may send requests.
        refuse: makes the response to a request of a path that an error ends.
    """

    def __init__(self, app: ASGIApp, access: Access, refuse: Callable[[str, ApiError], Response]) -> None:
        self._app, self._access, self._refuse = app, access, refuse
        self._hosts = {"localhost", *(host.lower() for host in access.hosts)}
        self._key = access.key.strip().encode() if access.key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        listed = origin in self._access.origins
        answer = self._response(scope, headers, origin, listed=listed) or self._app

        async def allow(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and listed and origin:
                allowed = {"access-control-allow-origin": origin, "vary": "origin"}
                pairs = [(name.encode(), value.encode()) for name, value in allowed.items()]
                message = {**message, "headers": [*message.get("headers", []), *pairs]}
            await send(message)

        await answer(scope, receive, allow)

    def _response(
        self, scope: Scope, headers: Headers, origin: str | None, *, listed: bool
    ) -> Response | None:
        """The response of a request that goes no further; None: it is passed on."""

        def refused(status: int, message: str, **more: Any) -> Response:
            return self._refuse(scope["path"], ApiError(status, message, **more))

        if not self._is_ours(headers.get("host", "")):
            return refused(403, "expected a known Host header: start the server with --allowed-host NAME")
        own = origin is not None and _place(origin) == headers.get("host")
        if origin is not None and not (listed or own):
            return refused(403, "expected a listed Origin: start the server with --cors ORIGIN")
        if scope["method"] == "OPTIONS" and listed:
            return Response(status_code=204, headers=_ALLOWED | _requested(headers))
        if sum(len(name) + len(value) for name, value in headers.raw) > HEADER_BYTES:
            return refused(431, f"expected headers of at most {HEADER_BYTES} bytes, got more")
        if scope["path"] not in OPEN and not self._has_key(headers.raw):
            message = "expected the server's key in the header Authorization: Bearer KEY, or x-api-key: KEY"
            return refused(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header has an address or a known name: another site's name is neither."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ip_address(name)
        except ValueError:
            return name in self._hosts
        return True

    def _has_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        if self._key is None:
            return True
        found = dict(headers)
        kind, _, bearer = found.get(b"authorization", b"").partition(b" ")
        given = [bearer] if kind.lower() == b"bearer" else []
        given += [found[b"x-api-key"]] if b"x-api-key" in found else []
        return any(hmac.compare_digest(each.strip(), self._key) for each in given)


def _requested(headers: Headers) -> dict[str, str]:
    """The headers that a page of a listed origin wants to send: all are allowed."""
    names = headers.get("access-control-request-headers")
    return {"access-control-allow-headers": names} if names else {}


def _place(origin: str) -> str | None:
    """Host and port of an origin; None: it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
