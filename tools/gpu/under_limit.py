"""Times prompts, new tokens and batches of a store under one limit of GPU memory, and writes each figure as it comes.

    python -m tools.synthetic.store --like qwen3-30b-a3b --max-level 4 --layout cuda w1
    python -m tools.gpu.under_limit w1 --vram-limit 12GB --json 12gb.json
    python -m tools.gpu.under_limit w1 --batches 1,2,4,8 --json resident.json
    python -m tools.gpu.under_limit tiny --device cpu --prompts 8 --batches 1,2 --new-tokens 4 --blocks 1

Without --vram-limit everything is resident. With it, DRAM has a tier as large as all experts, unless --dram-limit says
otherwise. In this order:
  - a prompt and some new tokens when no expert is in any memory, unless --warm leaves them out; then the tiers are
    filled from the disk;
  - every length of prompt twice, each after an empty sequence;
  - --blocks blocks of --new-tokens new tokens, with the bytes that each tier moved and the bound;
  - steps of as many sequences as each of --batches says, through the fast path and through transformers' modules.
Every JSON row has its samples in milliseconds. The peak is the driver's own count for this process.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from edgemoe.bench import bandwidth, summary
from edgemoe.bench.sample import Phase
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import EdgemoeError
from edgemoe.experts.records import StepTotals
from edgemoe.experts.step import Study
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.settings import RunSettings
from tools.command_line import failed
from tools.gpu.limit_options import numbers, open_store, parse, settings_of

Row = dict[str, Any]

BATCH_PROMPT = 32
"""Tokens of each sequence before a batch is timed."""

COLD_TOKENS = 16
"""New tokens while experts still come from the disk."""

MODULES_STEPS = 4
"""Steps through transformers' modules that are timed; each takes some 30 times as long as one by captured launches."""


class Report:
    """Rows that are printed and written as they come.

    Args:
        path: the JSON file; None: rows are printed alone.
        about: the measured model, and the machine.
    """

    def __init__(self, path: Path | None, about: Row) -> None:
        self._path, self._whole, self._start = path, {**about, "rows": []}, time.monotonic()

    def add(self, row: Row) -> None:
        """Prints a row without its samples, and writes all rows so far."""
        shown = " ".join(f"{name}={_short(value)}" for name, value in row.items() if name != "samples_ms")
        print(f"{time.monotonic() - self._start:6.1f} s  {shown}", flush=True)
        self._whole["rows"].append(row)
        if self._path:
            self._path.write_text(json.dumps(self._whole))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Timings:
    """Times steps of one engine.

    Args:
        engine: the engine.
        seed: the seed of the random tokens.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._random = engine, torch.Generator().manual_seed(seed)

    def tokens(self, count: int) -> list[int]:
        """Random tokens."""
        vocab = self._engine.shape.vocab
        return torch.randint(3, vocab, (count,), generator=self._random).tolist()

    def prompt(self, sequence: Any, count: int) -> tuple[float, torch.Tensor]:
        """Empties a sequence and runs a prompt. Returns its seconds, and the logits after it, float32 [vocab]."""
        sequence.crop(0)
        tokens = self.tokens(count)
        start = time.perf_counter()
        logits = self._engine.prefill(sequence, tokens)
        return time.perf_counter() - start, logits

    def steps(self, sequences: Sequence[Any], logits: torch.Tensor, count: int) -> list[float]:
        """Appends `count` tokens, each the likeliest, to each sequence, of logits [sequences, vocab].

        Returns:
            the seconds of each step, the choice of its tokens included.
        """
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            chosen = logits.argmax(1).tolist()
            segments = [
                Segment(sequence, (token,)) for sequence, token in zip(sequences, chosen, strict=True)
            ]
            logits = self._engine.step(Step(tuple(segments)))
            seconds.append(time.perf_counter() - start)
        return seconds


def time_prompts(engine: Engine, options: argparse.Namespace, add: Callable[[Row], None]) -> None:
    """Times a prompt and new tokens with no expert in memory, and each length twice once the tiers are filled."""
    timings, sequence, lengths = (
        Timings(engine, options.seed),
        engine.sequences.new(),
        numbers(options.prompts),
    )
    # Kernels are compiled and captured at their first use.
    timings.steps([sequence], timings.prompt(sequence, lengths[0])[1][None], 2)
    if not options.warm:
        _time_cold(engine, timings, sequence, lengths[0], add)
    start = time.perf_counter()
    engine.fill()
    add({"what": "fill", "s": time.perf_counter() - start})
    for count in lengths:
        for arm in ("filled", "again"):
            with engine.recorded() as records:
                seconds = timings.prompt(sequence, count)[0]
            moved = StepTotals.of(records).transfers
            found = {"link_gb": moved.dram_bytes / 1e9, "ssd_gb": moved.ssd_bytes / 1e9}
            add({"what": "prompt", "arm": arm, "tokens": count, "s": seconds, **found})
    engine.sequences.end(sequence)


def _time_cold(
    engine: Engine, timings: Timings, sequence: Any, count: int, add: Callable[[Row], None]
) -> None:
    """Times a prompt of `count` tokens and new tokens while experts come from the disk."""
    engine.forget_experts()
    seconds, logits = timings.prompt(sequence, count)
    add({"what": "prompt", "arm": "cold", "tokens": count, "s": seconds})
    cold = timings.steps([sequence], logits[None], COLD_TOKENS)
    mean = 1e3 * sum(cold) / len(cold)
    add({"what": "new tokens", "block": "cold", "mean_ms": mean, "samples_ms": [1e3 * each for each in cold]})


def time_new_tokens(
    engine: Engine, options: argparse.Namespace, speeds: dict[str, float], add: Callable[[Row], None]
) -> None:
    """Times blocks of new tokens that follow a prompt of 128 tokens."""
    timings, sequence = Timings(engine, options.seed), engine.sequences.new()
    logits = timings.prompt(sequence, 128)[1][None]
    for block in range(options.blocks):
        with engine.recorded() as records:
            seconds = timings.steps([sequence], logits, options.new_tokens)
        total, mean = StepTotals.of(records), sum(seconds) / len(seconds)
        bound = summary.decode_bound(
            Phase(total.transfers, total.use), len(seconds), mean, engine.store, speeds
        )
        add(
            {
                "what": "new tokens",
                "block": block,
                "mean_ms": 1e3 * mean,
                "median_ms": 1e3 * sorted(seconds)[len(seconds) // 2],
                "bound_ms": 1e3 * bound["bound_s"],
                "fraction_of_bound": bound["fraction_of_bound"],
                "link_mb": bound["bytes_per_token"]["dram"] / 1e6,
                "ssd_mb": bound["bytes_per_token"]["ssd"] / 1e6,
                "samples_ms": [1e3 * each for each in seconds],
            }
        )
    engine.sequences.end(sequence)


def time_batches(
    engine: Engine, batches: Sequence[int], steps: int, seed: int, add: Callable[[Row], None]
) -> None:
    """Times steps of several sequences: through the engine's fast path, and through transformers' modules."""
    timings = Timings(engine, seed)
    sequences = [engine.sequences.new() for _ in range(max(batches))]
    logits = torch.stack([timings.prompt(sequence, BATCH_PROMPT)[1] for sequence in sequences])
    for batch in batches:
        for path, study, count in (
            ("fast", Study(), steps),
            ("modules", Study(modules=True), MODULES_STEPS),
        ):
            with engine.studied(study):
                seconds = timings.steps(sequences[:batch], logits[:batch], count + 1)[1:]
            median = sorted(seconds)[len(seconds) // 2]
            add(
                {
                    "what": "batch",
                    "rows": batch,
                    "path": path,
                    "step_ms": 1e3 * median,
                    "tok_s": batch / median,
                    "samples_ms": [1e3 * each for each in seconds],
                }
            )


def open_engine(
    store: StoreModel, settings: RunSettings, options: argparse.Namespace, context: int, parallel: int
) -> Engine:
    """Opens an engine under the limits of the command line, for so many sequences of so many tokens."""
    large = store.shape.experts * store.form.bytes_at(settings.levels[0])
    dram = large if options.dram_limit is None else options.dram_limit
    plan = store.plan(
        vram_limit=options.vram_limit,
        dram_limit=dram if options.vram_limit and store.device else 0,
        settings=settings,
        context=context,
        parallel=parallel,
        prefill_rows=options.prefill_rows,
    )
    return Engine(store, plan, settings)


def run(options: argparse.Namespace) -> None:
    """Measures everything.

    Raises:
        EdgemoeError: no such device or store, or limits too small.
    """
    store = open_store(options)
    settings = settings_of(options, store)
    speeds = bandwidth.measure(store, set(settings.levels)).of_levels(settings.levels)
    about = {
        "device": store.device.name if store.device else "cpu: no figure here is a GPU's",
        "settings": settings.name,
        "vram_limit": options.vram_limit,
        "bytes_a_second": speeds,
    }
    report = Report(options.json, about)
    report.add({"what": "rates", **{tier: rate / 1e9 for tier, rate in speeds.items()}})
    time_one_sequence(store, settings, options, speeds, report.add)
    if numbers(options.batches):
        gc.collect()  # the closed engine is part of cycles, and its weights are on the device until they are gone
        time_several(store, settings, options, report.add)


def time_one_sequence(
    store: StoreModel,
    settings: RunSettings,
    options: argparse.Namespace,
    speeds: dict[str, float],
    add: Callable[[Row], None],
) -> None:
    """Times prompts and new tokens of an engine for one sequence."""
    prompts = numbers(options.prompts)
    tokens = max(*prompts, 128) + max(options.blocks * options.new_tokens, COLD_TOKENS)
    with open_engine(store, settings, options, tokens, 1) as engine:
        time_prompts(engine, options, add)
        time_new_tokens(engine, options, speeds, add)
        add({"what": "peak", "gb": engine.peak.bytes / 1e9})


def time_several(
    store: StoreModel, settings: RunSettings, options: argparse.Namespace, add: Callable[[Row], None]
) -> None:
    """Times steps of an engine for several sequences."""
    batches = numbers(options.batches)
    tokens = BATCH_PROMPT + len(batches) * (options.new_tokens // 4 + MODULES_STEPS + 3)
    with open_engine(store, settings, options, tokens, max(batches)) as engine:
        engine.fill()
        time_batches(engine, batches, max(options.new_tokens // 4, 1), options.seed, add)
        add({"what": "peak", "gb": engine.peak.bytes / 1e9})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        run(parse(__doc__, argv))
    except EdgemoeError as error:
        return failed("tools.gpu.under_limit", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
