"""The server's own endpoints: the page, a static document, and the state that it shows; health and metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgemoe.serve.errors import not_loaded
from edgemoe.serve.metrics import CONTENT_TYPE
from edgemoe.serve.models import Models
from edgemoe.serve.page.about import about
from edgemoe.serve.page.document import page
from edgemoe.serve.page.monitor import ExpertPictures
from edgemoe.serve.page.state import serving_of_page, state


def page_routes(models: Models) -> list[Route]:
    """The page and its figures (/status, /monitor, /about), /health (200 once the server has started) and /metrics."""
    pictures = ExpertPictures(models)

    async def show(request: Request) -> Response:
        raw, headers = page()
        return Response(raw, media_type="text/html", headers=headers)

    async def status(request: Request) -> Response:
        return JSONResponse(state(models))

    async def monitor(request: Request) -> Response:
        return JSONResponse(pictures.answer())

    async def describe(request: Request) -> Response:
        return JSONResponse(about(serving_of_page(models)))

    async def health(request: Request) -> Response:
        if not models.started:
            raise not_loaded()
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(models.metrics.text(), media_type=CONTENT_TYPE)

    endpoints = {
        "/": show,
        "/status": status,
        "/monitor": monitor,
        "/about": describe,
        "/health": health,
        "/metrics": metrics,
    }
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in endpoints.items()]
