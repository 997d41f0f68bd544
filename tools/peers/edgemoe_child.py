"""Answers a request of tools/peers/compare.py by edgemoe.

The protocol is in tools/peers/run.py. The request's model is a store; `settings` are arguments of
edgemoe.models.options.run_settings (exact, or levels and retention); `vram_limit` is in bytes, or null for a fully
resident model; `fill` says whether loading ends with Engine.fill; `context`, `kv_cache` and `kernel`, where given, are
as of tools.peers.compare. The answer's `row` has hit rates, bytes and the bound of the timed decode steps, as `edgemoe
bench` computes them, with bandwidths probed after the engine is closed.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.request import Request
from edgemoe.experts.step import Study
from edgemoe.experts.use import ChoiceCounts
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings
from tools.peers.opening import opened
from tools.peers.timed import timed
from tools.peers.together import decode_together
from tools.peers.warm_up import warm_ups


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Serves one request."""
    torch.set_num_threads(request["threads"])
    store, plan, settings = opened(request)
    load_s, last, counts = _run(store, plan, settings, request)
    tokens = last.tokens[last.prompt :]
    gc.collect()
    if request["popularity"]:
        return {"counts": counts.astype(int).tolist(), "tokens": tokens, "setting": settings.name}
    return {"load_s": load_s, "tokens": tokens} | timed(store, plan, settings, last.trace)


def _run(
    store: StoreModel,
    plan: MemoryPlan,
    settings: RunSettings,
    request: dict[str, Any],
) -> tuple[float, Request, npt.NDArray[np.float64]]:
    """Answers the warm-up prompts, two tokens each, then the prompts.

    Returns:
        seconds to load, the last request, and how often each expert was chosen, [layers, experts]; all 0 unless the
        request wants popularity.
    """
    started = time.perf_counter()
    with Engine(store, plan, settings) as engine:
        if request["fill"]:
            engine.fill()
        load_s = time.perf_counter() - started
        with engine.studied(Study(choices=request["popularity"])), engine.recorded() as records:
            for warm_up in warm_ups(request):
                decode_together(engine, [warm_up], 2)
            last = decode_together(engine, request["prompts"], request["new_tokens"])
    chosen = ChoiceCounts(store.shape.layers, store.shape.experts_per_layer)
    for record in records:
        if record.choices:
            chosen.merge(record.choices)
    return load_s, last, chosen.counts


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))), flush=True)
