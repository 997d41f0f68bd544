"""The server's own endpoints: the page, a static document, and the state that it shows; health and metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgemoe.serve.metrics import CONTENT_TYPE
from edgemoe.serve.page.about import about
from edgemoe.serve.page.document import page
from edgemoe.serve.page.monitor import ExpertPictures
from edgemoe.serve.page.state import state
from edgemoe.serve.serving import Serving


def page_routes(serving: Serving) -> list[Route]:
    """The page and its figures (/status, /monitor, /about), /health (200 once the model is open) and /metrics."""
    pictures = ExpertPictures(serving)

    async def show(request: Request) -> Response:
        raw, headers = page()
        return Response(raw, media_type="text/html", headers=headers)

    async def status(request: Request) -> Response:
        return JSONResponse(state(serving))

    async def monitor(request: Request) -> Response:
        return JSONResponse(pictures.answer())

    async def describe(request: Request) -> Response:
        return JSONResponse(about(serving))

    async def health(request: Request) -> Response:
        serving.require()
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(serving.metrics.text(), media_type=CONTENT_TYPE)

    endpoints = {
        "/": show,
        "/status": status,
        "/monitor": monitor,
        "/about": describe,
        "/health": health,
        "/metrics": metrics,
    }
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in endpoints.items()]
