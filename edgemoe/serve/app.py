"""The ASGI application: every protocol's endpoints, the server's own, and the error object of each path."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edgemoe.serve.anthropic.endpoints import AnthropicProtocol
from edgemoe.serve.errors import HANDLED, ApiError, request_error
from edgemoe.serve.guard import Access, Guard
from edgemoe.serve.models import Models
from edgemoe.serve.ollama.endpoints import OllamaProtocol
from edgemoe.serve.openai_chat.endpoints import OpenAIProtocol
from edgemoe.serve.openai_responses.endpoints import ResponsesProtocol
from edgemoe.serve.page.endpoints import page_routes
from edgemoe.serve.protocol.base import Protocol
from edgemoe.serve.refused import refused_routes
from edgemoe.serve.router import RouterProtocol


def make_app(models: Models, access: Access) -> ASGIApp:
    """Makes the ASGI application of a server.

    Args:
        models: the models, which are loaded later.
        access: the clients that may send requests.
    """
    protocols = protocols_of(models)

    def refuse(path: str, error: ApiError) -> Response:
        protocol = next(each for each in protocols if path.startswith(each.prefix))
        return error.response(protocol.error_body(error))

    def respond(request: Request, error: Exception) -> Response:
        return refuse(request.url.path, request_error(request, error))

    def leave(request: Request, error: Exception) -> Response:
        return Response(status_code=400)

    handlers = {**dict.fromkeys(HANDLED, respond), ClientDisconnect: leave}
    app = Starlette(routes=[*routes_of(models, protocols), *refused_routes()], exception_handlers=handlers)
    return Guard(app, access, refuse)


def protocols_of(models: Models) -> list[Protocol]:
    """Every protocol, over the models of a server; the first one whose prefix a path has makes the errors of it."""
    return [
        protocol(models)
        for protocol in (AnthropicProtocol, OllamaProtocol, ResponsesProtocol, RouterProtocol, OpenAIProtocol)
    ]


def routes_of(models: Models, protocols: Sequence[Protocol]) -> list[Route]:
    """The endpoints of protocols, and the server's own."""
    return [*page_routes(models), *(route for protocol in protocols for route in protocol.routes())]
