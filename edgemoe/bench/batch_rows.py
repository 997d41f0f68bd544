"""Rows of a benchmark of batches: times from arrival, throughput next to its bound, and active experts."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import numpy as np

from edgemoe.bench.bandwidth import Bandwidth
from edgemoe.bench.batch_run import Run
from edgemoe.bench.summary import decode_bound, summary
from edgemoe.engine.engine import StoreModel
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings

PAPER_BATCHES = (1, 2, 4, 8, 16, 32)
PAPER_ACTIVE = {
    "decode": (0.063, 0.116, 0.201, 0.319, 0.465, 0.620),
    "prefill": (0.469, 0.600, 0.734, 0.844, 0.928, 0.966),
}
"""Fraction of a layer's experts that a step of PAPER_BATCHES activates: DynaExq's Tables 1 and 2, Qwen3-30B-A3B."""


def batch_row(
    store: StoreModel, settings: RunSettings, bandwidth: Bandwidth, batch: int, plan: MemoryPlan, run: Run
) -> dict[str, Any]:
    """Returns the row of one batch size. Bytes, the bound and the step's time count decode steps alone.

    Args:
        store: the model's store.
        settings: the engine's settings.
        bandwidth: measured bandwidths, in bytes per second.
        batch: number of sequences that run at once.
        plan: the memory plan for that number of sequences.
        run: the measured run of the requests.
    """
    decode = [step for step in run.steps if step.decodes]
    decode_s, rows = [step.seconds for step in decode], [step.sequences for step in decode]
    mean_s, mean_rows = sum(decode_s) / len(decode_s), sum(rows) / len(rows)
    bound = decode_bound(run.decode, len(decode), mean_s, store, bandwidth.of_levels(settings.levels))
    full = [step.seconds for step in decode if step.sequences == batch]
    counts = run.decode.counts
    return {
        "name": f"{settings.name}, batch {batch}",
        "batch": batch,
        "setting": settings.name,
        "requests": len(run.traces),
        "full": bool(full),
        **_memory(store, plan, run),
        **_times(run),
        "decode_tok_s": sum(step.tokens for step in decode) / sum(decode_s),
        "rows_per_step": mean_rows,
        "most_rows": max(rows),
        "full_tok_s": batch / float(np.median(full)) if full else None,
        "step_s": summary(decode_s),
        **bound,
        "bytes_per_step": bound["bytes_per_token"],
        "bound_tok_s": mean_rows / bound["bound_s"],
        **_active(store, run, batch),
        "missed": counts.requests - counts.vram_hits - counts.dram_hits,
        "hot": counts.transitions if settings.hotness else None,
        "lynx": run.decode.use.agreement if settings.remapping else None,
    }


def not_full(rows: list[dict[str, Any]]) -> list[str]:
    """Returns a sentence for each row none of whose decode steps had as many rows as its batch."""
    return [
        f"batch {row['batch']} is not one: no step had {row['batch']} rows, the largest had {row['most_rows']}, "
        f"the mean was {row['rows_per_step']:.1f}"
        for row in rows
        if not row["full"]
    ]


def _memory(store: StoreModel, plan: MemoryPlan, run: Run) -> dict[str, Any]:
    limit = plan.limit_bytes(store.device)
    return {
        "valid": run.peak_bytes <= limit,
        "peak_vram_bytes": run.peak_bytes,
        "limit_bytes": limit,
        "vram_limit_bytes": plan.vram_limit_bytes,
        "plan": plan.as_json(),
    }


def _times(run: Run) -> dict[str, Any]:
    traces = run.traces
    return {
        "ttft_s": summary([trace.ttft for trace in traces]),
        "tpot_s": summary([trace.tpot for trace in traces if trace.tpot is not None]),
        "itl_s": summary([gap for trace in traces for gap in trace.gaps]),
        "e2e_s": summary([trace.token_times[-1] - trace.start for trace in traces]),
        "tokens_s": sum(len(trace.token_times) for trace in traces) / run.wall_s,
    }


def _active(store: StoreModel, run: Run, batch: int) -> dict[str, Any]:
    """Fractions of a layer's experts that a step activates, by phase: the mean, each layer's, and DynaExq's."""
    every = store.shape.experts_per_layer
    layers = {phase: run.active(decode=phase == "decode") for phase in PAPER_ACTIVE}
    return {
        "active": {
            phase: _fraction(reduce(add, of.values(), list[int]()), every) for phase, of in layers.items()
        },
        "active_per_layer": {
            phase: [
                {"layer": layer, "active": _fraction(counts, every)} for layer, counts in sorted(of.items())
            ]
            for phase, of in layers.items()
        },
        "active_paper": {
            phase: of[PAPER_BATCHES.index(batch)] if batch in PAPER_BATCHES else None
            for phase, of in PAPER_ACTIVE.items()
        },
    }


def _fraction(counts: list[int], experts: int) -> float | None:
    """The mean of counts of active experts, as a fraction of a layer's; None: no step has run."""
    return sum(counts) / len(counts) / experts if counts else None
