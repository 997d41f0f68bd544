"""The benchmark: rows, runs and arms in turn, and the report on them.

    once: a run of the first row that is not counted, for one-time costs of the process (kernels, threads, code)
    for every run: probe bandwidths; for every row, a different one first each time; for every prompt set:
        open an engine, "cold" run; the same prompt again, "warm" run

So drift of the machine affects all rows alike. One engine is open at a time. Reads of experts bypass the page cache
where the filesystem allows it, so that an expert outside the tiers is always cold.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgemoe.bench import bandwidth
from edgemoe.bench.bandwidth import Bandwidth
from edgemoe.bench.environment import environment
from edgemoe.bench.prompts import RANDOM, Encode, PromptSet, make_prompts
from edgemoe.bench.quality import EvaluationRow, quality_of
from edgemoe.bench.rows import BenchRow
from edgemoe.bench.sample import Sample, take_sample
from edgemoe.bench.summary import row_report
from edgemoe.console.sizes import format_least, format_size
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import ContextExceeded, DoesNotFit
from edgemoe.memory.plan import MemoryPlan

ARMS = ("cold", "warm")

Samples = dict[tuple[str, str, str], list[Sample]]
"""(row's name, prompts' source, arm) -> one sample a run."""

Notify = Callable[[str], None]
"""Called with a description of the run that is about to start."""


@dataclass(frozen=True)
class BenchRequest:
    """Rows, limits and prompts of one benchmark.

    Args:
        rows: the rows, at least one, their names distinct.
        vram_limit: bytes; None: everything resident, or the memory that the machine has free.
        dram_limit: bytes of the second tier.
        prompts: one of prompts.CHOICES.
        prompt_file: text for prompts; None: conversations.
        prompt_tokens: the number of tokens of each prompt.
        new_tokens: number of tokens decoded after each prompt, 2 or more.
        runs: number of runs of each row, prompt set and arm.
        seed: the seed of prompts.
        context: tokens; None: the prompt and the new tokens.
        prefill_rows: most rows of a prompt in one step; None: the plan's choice.
        warm_up: whether a run of the first row that is not counted comes first; False: the process has had one.
        fill: whether free memory is filled with experts before warm runs, as chat does while its user types.
        notes: sentences for the report, such as the rows that are left out.
    """

    rows: tuple[BenchRow, ...]
    vram_limit: int | None = None
    dram_limit: int = 0
    prompts: str = "text"
    prompt_file: Path | None = None
    prompt_tokens: int = 64
    new_tokens: int = 64
    runs: int = 3
    seed: int = 0
    context: int | None = None
    prefill_rows: int | None = None
    warm_up: bool = True
    fill: bool = False
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of context that a run takes."""
        return self.prompt_tokens + self.new_tokens

    def prompt_sets(self, store: StoreModel, count: int) -> list[PromptSet]:
        """Returns the sets of `count` prompts to measure with, text first.

        Raises:
            UserError: as make_prompts.
        """
        return make_prompts(store, self.prompts, self.prompt_file, self.prompt_tokens, count, self.seed)


def run_bench(
    store: StoreModel,
    request: BenchRequest,
    quality: Sequence[EvaluationRow] = (),
    notify: Notify | None = None,
) -> dict[str, Any]:
    """Measures every row and returns the report (names as in the documentation).

    All errors but DamagedData are raised before anything is measured.

    Args:
        store: the store of the model.
        request: rows, limits and prompts.
        quality: rows of an evaluation of the same store, if there is one.
        notify: called before every run.

    Raises:
        UserError: a prompt file is missing or too short, or a setting does not go with the store.
        ContextExceeded: the context is shorter than prompt and new tokens.
        DoesNotFit: a row does not fit the limits.
        DamagedData: an expert cannot be read.
    """
    plans = make_plans(store, request)
    sets = request.prompt_sets(store, request.runs)
    facts = environment(store)
    samples, probes = _measure(store, request, plans, sets, notify or (lambda what: None))
    measured = bandwidth.best(probes)
    rows = [
        row_report(row, arm, prompts.source, samples[row.name, prompts.source, arm], store, plan, measured)
        | {"quality": quality_of(quality, row.settings)}
        for row, plan in zip(request.rows, plans, strict=True)
        for prompts in sets
        for arm in ARMS
    ]
    return {"environment": facts | _conditions(request, sets, rows, probes), "rows": rows}


def require_valid(report: dict[str, Any]) -> None:
    """Refuses a report with an invalid row.

    Raises:
        DoesNotFit: with the row whose peak exceeds its limits the most, and both sizes.
    """
    row = max(report["rows"], key=lambda row: (not row["valid"], row["peak_vram_bytes"]))
    if not row["valid"]:
        limit, peak = row["limit_bytes"], row["peak_vram_bytes"]
        raise DoesNotFit(
            f"a peak of at most {format_size(limit)} in row {row['name']!r}, its limit",
            f"{format_size(peak)}, {format_least(peak - limit)} more: the row is not valid",
            "report this as a bug of edgemoe, with the output above",
            minimum=peak,
        )


def make_plans(store: StoreModel, request: BenchRequest) -> list[MemoryPlan]:
    """Returns a memory plan for each row.

    Raises:
        UserError: a setting does not go with the store.
        ContextExceeded: the context is shorter than prompt and new tokens.
        DoesNotFit: a row does not fit the limits.
    """
    if request.context is not None and request.context < request.tokens:
        raise ContextExceeded(
            f"a context of {request.tokens} tokens: {request.prompt_tokens} of prompt, {request.new_tokens} new",
            f"--context {request.context}",
            f"use --context {request.tokens}, or leave it out",
        )
    return [
        store.plan(
            vram_limit=request.vram_limit,
            # A DRAM tier is a cache: with one, experts would not be loaded from the disk on demand.
            dram_limit=request.dram_limit if row.settings.cache or row.dram_on_demand else 0,
            settings=row.settings,
            context=request.context or request.tokens,
            prefill_rows=request.prefill_rows,
        )
        for row in request.rows
    ]


def _measure(
    store: StoreModel, request: BenchRequest, plans: list[MemoryPlan], sets: list[PromptSet], notify: Notify
) -> tuple[Samples, list[Bandwidth]]:
    levels = {level for row in request.rows for level in row.settings.levels}
    planned = list(zip(request.rows, plans, strict=True))
    samples: Samples = defaultdict(list)
    probes = []

    if request.warm_up:
        notify("warming up")
        _cold_and_warm(store, *planned[0], sets[0].prompts[0], request.new_tokens)
    for run in range(request.runs):
        notify(f"run {run + 1} of {request.runs}: bandwidths")
        probes.append(bandwidth.measure(store, levels))
        first = run % len(planned)
        for row, plan in planned[first:] + planned[:first]:
            notify(f"run {run + 1} of {request.runs}: {row.name}")
            for prompts in sets:
                both = _cold_and_warm(
                    store, row, plan, prompts.prompts[run], request.new_tokens, fill=request.fill
                )
                for arm, sample in zip(ARMS, both, strict=True):
                    samples[row.name, prompts.source, arm].append(sample)
    probes.append(bandwidth.measure(store, levels))
    return samples, probes


def _cold_and_warm(
    store: StoreModel, row: BenchRow, plan: MemoryPlan, encode: Encode, new_tokens: int, *, fill: bool = False
) -> list[Sample]:
    """Runs a prompt for every arm on one engine, which is opened for it and freed; `fill` as in BenchRequest.

    Prompt sets do not share an engine: eviction and look-ahead keep statistics even of evicted experts.
    """
    started = time.perf_counter()
    with Engine(store, plan, row.settings) as engine:
        load_s = time.perf_counter() - started
        sequence = engine.sequences.new()
        samples = []
        for arm in ARMS:
            if fill and arm == "warm":
                engine.fill()
            samples.append(take_sample(engine, sequence, encode, new_tokens, load_s=load_s))
    # The engine's memory is freed now: the next engine or probe could not allocate its own otherwise.
    del engine, sequence
    gc.collect()
    return samples


def _conditions(
    request: BenchRequest, sets: list[PromptSet], rows: list[dict[str, Any]], probes: list[Bandwidth]
) -> dict[str, Any]:
    """Returns the conditions of the measurement, as part of the environment."""
    sources = [prompts.source for prompts in sets]
    notes = list(request.notes)
    if request.prompts != "random" and sources == [RANDOM]:
        notes.append("the store has no tokenizer: prompts are random tokens, whose routing is not a text's")
    direct = all(probe.direct for probe in probes)
    return {
        "prompt": sources[0],
        "prompts": sources,
        "prompt_tokens": request.prompt_tokens,
        "new_tokens": request.new_tokens,
        "runs": request.runs,
        "seed": request.seed,
        "vram_limit_asked_bytes": request.vram_limit,
        "dram_limit_asked_bytes": request.dram_limit,
        "page_cache": "bypassed" if direct else "used, dropped after each read",
        "cold": "expert cache empty, engine just opened",
        "warm_up": "one run of the first row, not counted"
        if request.warm_up
        else "none: an earlier report had one",
        "warm": "the same prompt again, "
        + ("once free memory was filled from the disk" if request.fill else "right after the cold run"),
        "load_s": max(row["load_s"]["mean"] for row in rows),
        "peak_process_bytes": max(row["peak_process_bytes"] for row in rows),
        "bandwidth_probes": [asdict(probe) for probe in probes],
        "notes": notes,
    }
