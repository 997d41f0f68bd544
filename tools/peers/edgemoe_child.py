"""Answers a request of tools/peers/compare.py by edgemoe.

The protocol is that of tools/peers/run.py. The request's model is a store; `settings` are arguments of
edgemoe.commands.options.run_settings (exact, or levels and retention); `vram_limit` is in bytes, or null for a fully
resident model; `fill` says whether loading ends with Engine.fill. The answer's `row` is a row of `edgemoe bench`'s
report, with bandwidths probed after the engine is closed.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from edgemoe import __version__
from edgemoe.bench import bandwidth
from edgemoe.bench.rows import BenchRow
from edgemoe.bench.sample import Sample, take_sample
from edgemoe.bench.summary import row_report
from edgemoe.commands.options import run_settings
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings
from tools.peers.warm_up import warm_ups


def counting(layers: int, experts: int) -> tuple[list[list[int]], Callable[[int, torch.Tensor], None]]:
    """Counts [layer][expert] of chosen experts, all 0, and the callback for Engine.watch that increments them."""
    counts = [[0] * experts for _ in range(layers)]

    def count(layer: int, chosen: torch.Tensor) -> None:
        for expert in chosen.flatten().tolist():
            counts[layer][expert] += 1

    return counts, count


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Serves one request."""
    torch.set_num_threads(request["threads"])
    store = StoreModel.open(Path(request["model"]))
    settings = run_settings(store.manifest.max_level, **request["settings"])
    longest = max(map(len, [request["prompt"], *request["warm_up"]]))
    plan = store.plan(
        vram_limit=request["vram_limit"], settings=settings, context=longest + request["new_tokens"]
    )
    counts, count = counting(store.shape.layers, store.shape.experts_per_layer)
    sample = _run(store, plan, settings, request, count if request["popularity"] else None)
    gc.collect()
    if request["popularity"]:
        return {"counts": counts, "tokens": sample.tokens, "setting": settings.name}
    measured = bandwidth.measure(store, set(settings.levels))
    row = row_report(BenchRow(settings.name, settings), "cold", "given", [sample], store, plan, measured)
    start = sample.ttft_s
    return {
        "load_s": sample.load_s,
        "token_times": [start + sum(sample.itl_s[:i]) for i in range(len(sample.itl_s) + 1)],
        "tokens": sample.tokens,
        "row": {name: value for name, value in row.items() if name != "samples"},
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


def _run(
    store: StoreModel,
    plan: MemoryPlan,
    settings: RunSettings,
    request: dict[str, Any],
    count: Callable[[int, torch.Tensor], None] | None,
) -> Sample:
    """Answers the warm-up prompts, two tokens each, then the request's prompt; returns the latter's sample."""
    started = time.perf_counter()
    with Engine(store, plan, settings) as engine:
        if request["fill"]:
            engine.fill()
        load_s = time.perf_counter() - started
        if count:
            engine.watch(count)
        sequence = engine.new_sequence()
        for warm_up in warm_ups(request):
            take_sample(engine, sequence, partial(list, warm_up), 2)
        return take_sample(
            engine, sequence, partial(list, request["prompt"]), request["new_tokens"], load_s=load_s
        )


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))), flush=True)
