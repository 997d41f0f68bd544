"""The state of the server, as the page shows it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from edgemoe.serve.errors import unloaded
from edgemoe.serve.job import Job
from edgemoe.serve.models import Models
from edgemoe.serve.serving import Serving


def serving_of_page(models: Models) -> Serving:
    """The model that the page shows: the loaded one that was used last.

    Raises:
        ApiError: every model is unloaded. A model that is being loaded is returned before it is open.
    """
    slot = models.latest
    if models.started and slot.state in ("unloading", "unloaded"):
        raise unloaded(slot.name)
    return slot.serving


def state(models: Models) -> dict[str, Any]:
    """The figures that the page shows, of the loaded model that was used last; its name alone while none is loaded."""
    slot = models.latest
    serving, listed = slot.serving, [{"model": each.name, "state": each.state} for each in models.slots]
    model = serving.model
    if model is None:
        state = slot.state if models.started else "loading"
        return {"model": serving.name, "state": state, "models": listed}
    status, plan, own = model.status(), model.engine.plan, _requests(serving.queue.jobs)
    return {
        "model": serving.name,
        "state": "ready",
        "models": listed,
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
        "new_tokens": serving.new_tokens + sum(each["new_tokens"] for each in own),
        "requests": _requests(models.jobs),
    }


def _requests(jobs: Sequence[Job]) -> list[dict[str, Any]]:
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
        for job in jobs
        for progress in [future.progress for future in job.futures]
    ]
