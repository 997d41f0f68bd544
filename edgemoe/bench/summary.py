"""The samples of one row and arm, put together as one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from edgemoe.bench.bandwidth import Bandwidth
from edgemoe.bench.bound import TIERS, bound_of
from edgemoe.bench.lookahead import lookahead_report
from edgemoe.bench.rows import BenchRow
from edgemoe.bench.sample import Phase, Sample
from edgemoe.engine.engine import StoreModel
from edgemoe.experts.use import fraction_at, mean_bits
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import format_levels
from storage.base import LEVELS


def summary(values: Sequence[float]) -> dict[str, float | int | None]:
    """mean, p50, p90, p95, p99, std (of the sample) and n; None where undefined."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "std"), None) | {"n": 0}
    array = np.array(values)
    percentiles = {f"p{p}": float(np.percentile(array, p)) for p in (50, 90, 95, 99)}
    std = float(array.std(ddof=1)) if len(values) > 1 else None
    return {"mean": float(array.mean()), **percentiles, "std": std, "n": len(values)}


def row_report(
    row: BenchRow,
    arm: str,
    prompts: str,
    samples: Sequence[Sample],
    store: StoreModel,
    plan: MemoryPlan,
    bandwidth: Bandwidth,
) -> dict[str, Any]:
    """One row of the report. Bytes, hits, levels and the bound are the decode steps'.

    Args:
        row: name and settings.
        arm: "cold" or "warm".
        prompts: where they are from.
        samples: at least one.
        store: of the model.
        plan: how the limits were divided.
        bandwidth: of every level that the row uses.
    """
    decode, prefill = together([s.decode for s in samples]), together([s.prefill for s in samples])
    return {
        **_settings(row, plan),
        "arm": arm,
        "prompts": prompts,
        "peak_vram_bytes": max(s.peak_vram_bytes for s in samples),
        "peak_process_bytes": max(s.peak_process_bytes for s in samples),
        **_times(samples),
        **_experts(decode, row.settings.levels[0]),
        **_bound_report(decode, samples, store, bandwidth.of_levels(row.settings.levels)),
        "lookahead": {
            "prefill": lookahead_report(prefill.counts),
            "decode": lookahead_report(decode.counts),
        },
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }


def together(phases: Sequence[Phase]) -> Phase:
    """The same phase of several samples as one. At least one."""
    return Phase(reduce(add, [p.counts for p in phases]), reduce(add, [p.use for p in phases]))


def _settings(row: BenchRow, plan: MemoryPlan) -> dict[str, Any]:
    settings = row.settings
    return {
        "name": row.name,
        "setting": settings.name,
        "levels": format_levels(settings.levels),
        "retention": settings.retention if len(settings.levels) > 1 else None,
        "exact": settings.exact,
        "importance": settings.importance,
        "heavy_hitters": settings.heavy_hitters,
        "depth": settings.depth,
        "renormalise": settings.renormalise,
        "cache": settings.cache,
        "prefetch": settings.speculate,
        "cpu_experts": settings.cpu_experts,
        "eviction": settings.eviction if settings.cache else "none",
        "readers": settings.readers,
        "vram_limit_bytes": plan.vram_limit_bytes,
        "dram_limit_bytes": plan.dram_limit_bytes,
        "plan": plan.as_json(),
    }


def _times(samples: Sequence[Sample]) -> dict[str, Any]:
    steps = sum(s.steps for s in samples)
    return {
        "load_s": summary([s.load_s for s in samples]),
        "ttft_s": summary([s.ttft_s for s in samples]),
        "tpot_s": summary([s.tpot_s for s in samples]),
        "itl_s": summary([gap for s in samples for gap in s.itl_s]),
        "prefill_tok_s": sum(s.prompt_tokens for s in samples) / sum(s.prefill_s for s in samples),
        "decode_tok_s": steps / sum(sum(s.itl_s) for s in samples),
    }


def _expert_bytes(decode: Phase, steps: int, store: StoreModel) -> dict[str, float]:
    """Bytes of experts a decoded token, per tier. From VRAM an expert is read whole at the level computed at."""
    counts = decode.counts
    read = sum(store.form.bytes_at(level) * experts for level, experts in decode.use.experts.items())
    return {
        "ssd": counts.ssd_bytes / steps,
        "dram": (counts.dram_bytes + counts.spilled_bytes) / steps,
        "vram": read / steps,
    }


def _hit_rates(decode: Phase) -> dict[str, float | None]:
    """Share of the experts asked for; None where none was."""
    counts = decode.counts
    hits = {"vram": counts.vram_hits, "dram": counts.dram_hits}
    return {tier: n / counts.requests if counts.requests else None for tier, n in hits.items()}


def _experts(decode: Phase, high: int) -> dict[str, Any]:
    """Where experts were found, and the bits they were scheduled and computed at."""
    use = decode.use
    return {
        "hit_rate": _hit_rates(decode),
        "levels_used": {str(level): use.experts.get(level, 0) for level in LEVELS},
        "experts_reused": use.reused,
        "experts_on_cpu": decode.counts.left_below,
        "bits_per_weight_read": mean_bits(use.scheduled),
        "effective_retention": fraction_at(use.scheduled, high),
    }


def disk_rate(sample: Sample) -> float:
    """Bytes a second that the disk gave for a prompt: what it gave it can give."""
    return sample.prefill.counts.ssd_bytes / sample.prefill_s


def _bound_report(
    decode: Phase, samples: Sequence[Sample], store: StoreModel, rates: dict[str, float]
) -> dict[str, Any]:
    """Bytes moved, the bandwidths beside them, and what share of the time they account for."""
    rates = rates | {"ssd": max(rates["ssd"], *map(disk_rate, samples))}
    per_token = _expert_bytes(decode, sum(s.steps for s in samples), store)
    dense = store.dense_bytes_per_token
    bound = bound_of(dense, per_token, rates)
    tpot = float(np.mean([s.tpot_s for s in samples]))
    return {
        "bytes_per_token": per_token | {"vram": per_token["vram"] + dense},
        "bandwidth": rates,
        "bound_s": bound.total_s,
        "bound_per_tier_s": {"dense": bound.dense_s, **bound.tiers_s},
        "fraction_of_bound": bound.total_s / tpot,
        "fraction_per_tier": {tier: bound.tiers_s[tier] / tpot for tier in TIERS},
    }
