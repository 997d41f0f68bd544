"""The state of the server, as the page shows it."""

from __future__ import annotations

import time
from typing import Any

from edgemoe.serve.serving import Serving


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
