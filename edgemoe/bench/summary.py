"""The samples of one row and arm, combined as one JSON object.

The bound (speed.bound) is of the bytes which a decoded token really moved, at the best rates of this machine.
Look-ahead reads during the dense weights' products too, so their time is not added to the disk's. Bytes are the moved
ones, without cache hits. The disk's rate is the best of the probes and of the samples' own prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from edgemoe.bench.bandwidth import Bandwidth
from edgemoe.bench.rows import BenchRow
from edgemoe.bench.sample import Phase, Sample
from edgemoe.engine.engine import StoreModel
from edgemoe.evaluate.rows import CHOICE_FIELDS
from edgemoe.experts.use import fraction_at
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import format_levels
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.speed.bound import TIERS, slowest, tier_seconds
from edgemoe.storage.base import LEVELS


def summary(values: Sequence[float]) -> dict[str, float | int | None]:
    """Returns mean, p50, p90, p95, p99, std (of the sample) and n; None where undefined."""
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
    """Returns one row of the report. Bytes, hits, levels and the bound count decode steps alone.

    A row is valid if its peak memory is within its limits; both tiers count where both are in RAM.

    Args:
        row: name and settings.
        arm: "cold" or "warm".
        prompts: source of the prompts.
        samples: the row's samples, at least one.
        store: the store of the model.
        plan: the division of the limits.
        bandwidth: includes every level that the row uses.
    """
    decode, prefill = _sum([s.decode for s in samples]), _sum([s.prefill for s in samples])
    peak = max(s.peak_vram_bytes for s in samples)
    return {
        **_settings(row, plan),
        "arm": arm,
        "prompts": prompts,
        "valid": peak <= plan.limit_bytes(store.device),
        "peak_vram_bytes": peak,
        "limit_bytes": plan.limit_bytes(store.device),
        "peak_process_bytes": max(s.peak_process_bytes for s in samples),
        **_times(samples),
        "drafts": {name: sum(s.drafts[name] for s in samples) for name in ("drafted", "accepted")},
        **_experts(decode, row.settings.levels[0]),
        **_bound(decode, samples, store, bandwidth.of_levels(row.settings.levels)),
        "hot": (prefill.counts + decode.counts).transitions if row.settings.hotness else None,
        "lookahead": {"prefill": _lookahead(prefill.counts), "decode": _lookahead(decode.counts)},
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }


def _sum(phases: Sequence[Phase]) -> Phase:
    """Adds the same phase of at least one sample."""
    return Phase(reduce(add, [p.counts for p in phases]), reduce(add, [p.use for p in phases]))


def _settings(row: BenchRow, plan: MemoryPlan) -> dict[str, Any]:
    settings = row.settings
    return {
        "name": row.name,
        "setting": settings.name,
        "levels": format_levels(settings.levels),
        "retention": settings.retention if len(settings.scheduled) > 1 and settings.bits is None else None,
        "bits": settings.bits,
        "exact": settings.exact,
        **{name: getattr(settings, name) for name in CHOICE_FIELDS},
        "cache": settings.cache,
        "prefetch": settings.speculate,
        "draft": settings.drafts,
        "in_place": settings.in_place,
        "eviction": settings.eviction if settings.cache else "none",
        "promotion": settings.promotion,
        "scan": settings.scan,
        "readers": settings.readers,
        "vram_limit_bytes": plan.vram_limit_bytes,
        "dram_limit_bytes": plan.dram_limit_bytes,
        "plan": plan.as_json(),
    }


def _times(samples: Sequence[Sample]) -> dict[str, Any]:
    gaps = [gap for s in samples for gap in s.itl_s]
    return {
        "load_s": summary([s.load_s for s in samples]),
        "ttft_s": summary([s.ttft_s for s in samples]),
        "tpot_s": summary([s.tpot_s for s in samples]),
        "itl_s": summary(gaps),
        "prefill_tok_s": sum(s.prompt_tokens for s in samples) / sum(s.prefill_s for s in samples),
        "decode_tok_s": len(gaps) / sum(gaps),
    }


def _experts(decode: Phase, high: int) -> dict[str, Any]:
    """Where experts were found, and the levels that they were scheduled and computed at. None: no expert at all."""
    counts, use = decode.counts, decode.use
    hits = {"vram": counts.vram_hits, "dram": counts.dram_hits}
    return {
        "hit_rate": {tier: n / counts.requests if counts.requests else None for tier, n in hits.items()},
        "levels_used": {str(level): use.experts.get(level, 0) for level in LEVELS},
        "experts_reused": use.reused,
        "bits_per_weight_read": use.bits_scheduled,
        "effective_retention": fraction_at(use.scheduled, high),
    }


def _bound(
    decode: Phase, samples: Sequence[Sample], store: StoreModel, bandwidth: dict[str, float]
) -> dict[str, Any]:
    """The bound of a row; prompts are probes of the disk too. Its fractions are of the mean TPOT."""
    prompts = [s.prefill.counts.ssd_bytes / s.prefill_s for s in samples]
    bandwidth = bandwidth | {"ssd": max(bandwidth["ssd"], *prompts)}
    steps = sum(len(s.itl_s) for s in samples)
    return decode_bound(decode, steps, float(np.mean([s.tpot_s for s in samples])), store, bandwidth)


def decode_bound(
    decode: Phase, steps: int, mean_s: float, store: StoreModel, bandwidth: dict[str, float]
) -> dict[str, Any]:
    """Bytes moved per decode step, the bandwidths, the bound in seconds per step, and its fraction of `mean_s`.

    Args:
        decode: the records of all decode steps.
        steps: number of steps; each has one token where one sequence runs.
        mean_s: seconds of a step.
        store: the store of the model.
        bandwidth: tier -> bytes per second.
    """
    counts = decode.counts
    moved = {
        "ssd": counts.ssd_bytes,
        "dram": counts.dram_bytes + counts.spilled_bytes,
        # An expert is read from VRAM whole, at the level that it is computed at.
        "vram": sum(store.form.bytes_at(level) * n for level, n in decode.use.experts.items()),
    }
    per_step = {tier: moved[tier] / steps for tier in TIERS}
    dense = store.dense_bytes_per_token
    seconds = tier_seconds(dense, per_step, bandwidth)
    bound_s = slowest(seconds)
    return {
        "bytes_per_token": per_step | {"vram": per_step["vram"] + dense},
        "bandwidth": bandwidth,
        "bound_s": bound_s,
        "bound_per_tier_s": seconds,
        "fraction_of_bound": bound_s / mean_s,
        "fraction_per_tier": {tier: seconds[tier] / mean_s for tier in TIERS},
    }


def _lookahead(counts: TransferCounts) -> dict[str, Any]:
    """Experts, bytes and seconds of the look-ahead in all, and a list with the same per layer (prefetch.base).

    recall is the fraction of requested experts that had been predicted, precision the fraction of predicted experts
    that were then requested; None where there were none.
    """
    layers = [
        {"layer": layer, **dataclasses.asdict(of), "recall": of.recall, "precision": of.precision}
        for layer, of in sorted(counts.lookahead.items())
    ]
    return {
        "speculated": counts.speculated,
        "speculated_used": counts.speculated_used,
        "speculated_cancelled": counts.speculated_cancelled,
        "hidden_bytes": counts.hidden_bytes,
        "wasted_bytes": counts.wasted_bytes,
        "hidden_s": counts.hidden_s,
        "auto_off": counts.auto_off,
        "auto_resting": counts.auto_resting,
        "layers": layers,
    }
