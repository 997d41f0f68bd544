"""Answers a request of tools/peers/compare.py by edgemoe.

The protocol is that of tools/peers/run.py. The request's model is a store; `settings` are arguments of
edgemoe.models.options.run_settings (exact, or levels and retention); `vram_limit` is in bytes, or null for a fully
resident model; `fill` says whether loading ends with Engine.fill; `context`, `kv_cache` and `kernel`, where given, are
as of tools.peers.compare. The answer's `row` has hit rates, bytes and the bound of the timed decode steps, as `edgemoe
bench` computes them, with bandwidths probed after the engine is closed.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from edgemoe import __version__
from edgemoe.bench import bandwidth
from edgemoe.bench.sample import Phase
from edgemoe.bench.summary import decode_bound
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.pace import WORK_BETWEEN, Pace
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.experts.step import Study
from edgemoe.experts.use import ChoiceCounts
from edgemoe.kernels.registry import select
from edgemoe.kv.formats import KVFormat
from edgemoe.memory.limits import SHARED_ROWS
from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.cache import kernels_directory
from edgemoe.models.options.run_settings import run_settings
from edgemoe.policy.settings import RunSettings
from tools.peers.warm_up import warm_ups


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Serves one request."""
    torch.set_num_threads(request["threads"])
    if "kernel" in request:
        select(request["kernel"], kernels_directory())
    store = StoreModel.open(Path(request["model"]))
    if request.get("kv_cache"):
        store = store.with_kv(KVFormat(request["kv_cache"], request["kv_cache"]))
    settings = run_settings(store.manifest.max_level, **request["settings"])
    prompts = request["prompts"]
    longest = max(map(len, [*prompts, *request["warm_up"]]))
    plan = store.plan(
        vram_limit=request["vram_limit"],
        settings=settings,
        context=request.get("context") or longest + most_tokens(prompts, request["new_tokens"]),
        parallel=len(prompts),
    )
    load_s, last, counts = _run(store, plan, settings, request)
    tokens = last.tokens[last.prompt :]
    gc.collect()
    if request["popularity"]:
        return {"counts": counts.astype(int).tolist(), "tokens": tokens, "setting": settings.name}
    measured = bandwidth.measure(store, set(settings.levels))
    trace = last.trace
    assert trace.tpot is not None
    decode, prompt = Phase(trace.decode.transfers, trace.decode.use), trace.prefill.transfers
    rates = measured.of_levels(settings.levels)
    # The prompt is a probe of the disk too.
    rates["ssd"] = max(rates["ssd"], prompt.ssd_bytes / (trace.token_times[0] - trace.start))
    bound = decode_bound(decode, trace.decode.steps, trace.tpot, store, rates)
    hits = {"vram": decode.counts.vram_hits / decode.counts.requests}
    return {
        "load_s": load_s,
        "token_times": [each - trace.start for each in trace.token_times],
        "tokens": tokens,
        "row": {"hit_rate": hits, "vram_limit_bytes": plan.vram_limit_bytes, **bound},
        "bandwidth": dataclasses.asdict(measured),
        "plan": plan.as_json(),
        "versions": {
            "edgemoe": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kernel": store.compute.name,
            "dense_bits": str(store.manifest.dense_bits),
        },
    }


def most_tokens(prompts: list[list[int]], new_tokens: int) -> int:
    """Most tokens of an answer when the last prompt's has `new_tokens`: those between add some."""
    apart = WORK_BETWEEN, SHARED_ROWS
    return new_tokens + sum(math.ceil(len(prompt) / rows) for prompt in prompts[1:] for rows in apart)


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


def decode_together(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Request:
    """Decodes greedily until the last prompt's answer has `new_tokens`, a token of every prompt in each of its steps.

    Returns:
        the last prompt's request, whose times and counts are those of the steps that all prompts share.
    """
    greedy = Sampling(0, 1, 0, 1, 0, most_tokens(prompts, new_tokens), frozenset())
    scheduler = Scheduler(engine, Pace(every=1))
    start = time.perf_counter()
    requests = [Request(list(prompt), Sampler(greedy), start) for prompt in prompts]
    for request in requests:
        scheduler.submit(request)
    last = requests[-1]
    scheduler.wait(last, lambda: len(last.trace.token_times) == new_tokens)
    scheduler.close()
    return last


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))), flush=True)
