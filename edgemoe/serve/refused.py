"""Endpoints of the protocols that this server refuses by name, so that a client learns why."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgemoe.serve.errors import ApiError

_EMBEDDINGS = "embeddings are not computed here, so use another server for them"
_LORA = "LoRA adapters are not applied, so merge them into the model before it is converted"
_TEXT = "the model takes and gives text alone"

_ONE = "the server has the models that it was started with, so start it with another --model"

REFUSED = {
    "/v1/embeddings": _EMBEDDINGS,
    "/embeddings": _EMBEDDINGS,
    "/api/embed": _EMBEDDINGS,
    "/api/embeddings": _EMBEDDINGS,
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
    "/lora-adapters": _LORA,
    "/v1/images/generations": _TEXT,
    "/v1/images/edits": _TEXT,
    "/v1/images/variations": _TEXT,
    "/v1/audio/speech": _TEXT,
    "/v1/audio/transcriptions": _TEXT,
    "/api/pull": _ONE,
    "/api/push": _ONE,
    "/api/create": _ONE,
    "/api/copy": _ONE,
    "/api/delete": _ONE,
}
"""Path -> why."""

_METHODS = ["GET", "POST", "PUT", "DELETE"]


async def _refuse(request: Request) -> Response:
    path = request.url.path
    message = f"expected another endpoint, got {path}: {REFUSED[path]}"
    raise ApiError(501, message, code="not_implemented", headers={"x-should-retry": "false"})


def refused_routes() -> list[Route]:
    """The endpoints, for any method."""
    return [Route(path, _refuse, methods=_METHODS) for path in REFUSED]
