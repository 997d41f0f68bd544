"""The server's own endpoints: the status page, a static file, and the state that it shows; health and metrics."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from edgemoe.serve.metrics import CONTENT_TYPE
from edgemoe.serve.serving import Serving

Page = tuple[bytes, dict[str, str]]
"""The file, and its headers."""


@cache
def page() -> Page:
    """Reads the page. Its headers allow its own style and script by their hashes, and requests to this server alone."""
    raw = Path(__file__).with_name("page.html").read_bytes()
    style, script = (_hash(raw, tag) for tag in (b"style", b"script"))
    policy = (
        f"default-src 'none'; style-src '{style}'; script-src '{script}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return raw, headers


def _hash(raw: bytes, tag: bytes) -> str:
    (inside,) = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), raw, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(inside).digest()).decode()


def state(serving: Serving) -> dict[str, Any]:
    """The figures that the page shows; the name alone while the model loads."""
    model = serving.model
    if model is None:
        return {"model": serving.name, "state": "loading"}
    status, plan, requests = model.status(), model.engine.plan, _requests(serving)
    return {
        "model": serving.name,
        "state": "ready",
        "context": plan.context,
        "parallel": plan.parallel,
        "waiting": status.waiting,
        "running": status.running,
        "memory": status.memory,
        "limit_bytes": status.limit_bytes,
        "peak_bytes": status.peak_bytes,
        "resident": status.resident,
        "experts": status.experts,
        "expert_requests": status.moved.requests,
        "vram_hits": status.moved.vram_hits,
        "dram_hits": status.moved.dram_hits,
        "ssd_bytes": status.moved.ssd_bytes,
        "dram_bytes": status.moved.dram_bytes,
        "prompt_tokens": serving.prompt_tokens,
        "new_tokens": serving.new_tokens + sum(each["new_tokens"] for each in requests),
        "requests": requests,
    }


def _requests(serving: Serving) -> list[dict[str, Any]]:
    """A row for each answer that is under way."""
    now = time.monotonic()
    return [
        {
            "kind": job.kind,
            "seconds": now - job.start,
            "state": progress.state,
            "prompt_tokens": progress.prompt_tokens,
            "cached_tokens": progress.cached_tokens,
            "done_tokens": progress.done_tokens,
            "new_tokens": progress.new_tokens,
        }
        for job in serving.queue.jobs
        for progress in [future.progress for future in job.futures]
    ]


def page_routes(serving: Serving) -> list[Route]:
    """GET / (the page), /status (what it shows), /health (200 once the model is open) and /metrics (for Prometheus)."""

    async def show(request: Request) -> Response:
        raw, headers = page()
        return Response(raw, media_type="text/html", headers=headers)

    async def status(request: Request) -> Response:
        return JSONResponse(state(serving))

    async def health(request: Request) -> Response:
        serving.require()
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(serving.metrics.text(), media_type=CONTENT_TYPE)

    endpoints = {"/": show, "/status": status, "/health": health, "/metrics": metrics}
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in endpoints.items()]
