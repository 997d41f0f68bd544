"""The times and the bound in edgemoe's answer to a request of tools/peers/compare.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers

from edgemoe import __version__
from edgemoe.bench import bandwidth
from edgemoe.bench.sample import Phase
from edgemoe.bench.summary import decode_bound
from edgemoe.engine.engine import StoreModel
from edgemoe.engine.request import Trace
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings


def timed(store: StoreModel, plan: MemoryPlan, settings: RunSettings, trace: Trace) -> dict[str, Any]:
    """Times of the tokens in seconds, the row with hit rate and bound, bandwidths, the plan and versions.

    Probes bandwidths, so the engine must be closed.
    """
    measured = bandwidth.measure(store, set(settings.levels))
    assert trace.tpot is not None
    decode, prompt = Phase(trace.decode.transfers, trace.decode.use), trace.prefill.transfers
    rates = measured.of_levels(settings.levels)
    # The prompt is a probe of the disk too.
    rates["ssd"] = max(rates["ssd"], prompt.ssd_bytes / (trace.token_times[0] - trace.start))
    bound = decode_bound(decode, trace.decode.steps, trace.tpot, store, rates)
    hits = {"vram": decode.counts.vram_hits / decode.counts.requests}
    return {
        "token_times": [each - trace.start for each in trace.token_times],
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
