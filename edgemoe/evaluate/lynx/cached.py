"""One setting with a cache that holds a part of the experts: windows token by token, and the bytes that they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch

from edgemoe.console.progress import CountProgress
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.evaluate.arm import Arm
from edgemoe.evaluate.cache_front import changed_by
from edgemoe.evaluate.metrics import Quality
from edgemoe.evaluate.reference import LogitFile
from edgemoe.evaluate.rows import EvalRow, setting_row
from edgemoe.evaluate.score import Measurement, Text, Windows
from edgemoe.experts.records import StepTotals
from edgemoe.experts.use import ExpertUse
from edgemoe.kv.step import Segment, Step
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.policy.settings import RunSettings


@dataclass(frozen=True)
class Cached:
    """A measurement with a cache.

    Args:
        quality: the quality over all windows.
        use: the use of experts from the second window on, when the cache is full.
        read_bytes: bytes read from disk, from the second window on.
        dram_bytes: bytes read from the second tier, from the second window on.
        tokens: number of tokens from the second window on.
    """

    quality: Quality
    use: ExpertUse
    read_bytes: int
    dram_bytes: int
    tokens: int


def cached_plan(
    store: StoreModel, settings: RunSettings, cache: float, context: int, dram: float = 0.0
) -> MemoryPlan:
    """A plan whose tiers of experts have fractions of the bytes that all experts take at 4 bits.

    Args:
        store: the store of the model.
        settings: the settings of the engine.
        cache: fraction of the fastest tier.
        context: tokens.
        dram: fraction of a second tier; 0: there is none.

    Raises:
        DoesNotFit: fewer than two experts fit.
    """
    least = store.plan(vram_limit=None, settings=settings, context=context)
    experts = sum(len(layer.records) for layer in store.manifest.layers.values())
    tier, slower = (int(fraction * experts * store.form.bytes_at(4)) for fraction in (cache, dram))
    return store.plan(
        vram_limit=least.fixed_bytes + tier, dram_limit=slower, settings=settings, context=context
    )


def cached_rows(
    store: StoreModel, arms: Sequence[Arm], windows: Windows, logits: LogitFile | None
) -> list[EvalRow]:
    """Measures every arm that has a cache, with the rule of its variation; shows progress on stderr.

    Args:
        store: the store of the model.
        arms: each with a cache.
        windows: token ids of two or more windows.
        logits: the reference's of the same windows, or None.

    Raises:
        DoesNotFit: from cached_plan.
    """
    rows: list[EvalRow] = []
    for number, arm in enumerate(arms, 1):
        with CountProgress(f"{arm.name} ({number} of {len(arms)})", len(windows)) as progress:
            text = Text(windows, logits, progress.advance)
            run = cached_quality(store, arm.settings, arm.cache, text, partial(changed_by, arm), arm.dram)
        scheduled = run.use.scheduled
        wanted = sum(scheduled.values())
        bits = BITS_PER_WEIGHT[4] / store.form.bytes_at(4) / wanted
        rows.append(
            replace(
                setting_row(arm, "decode", run.quality, run.use),
                bytes_per_token=run.read_bytes / run.tokens,
                bits_from_disk=run.read_bytes * bits,
                bits_from_dram=run.dram_bytes * bits,
                bits_scheduled=run.use.bits_scheduled,
                skipped=scheduled.get(0, 0) / wanted,
            )
        )
    return rows


def cached_quality(
    store: StoreModel,
    settings: RunSettings,
    cache: float,
    text: Text,
    change: Callable[[Engine], AbstractContextManager[None]],
    dram: float = 0.0,
) -> Cached:
    """Measures one setting in steps of one token, with an engine of its own.

    Args:
        store: the store of the model.
        settings: the settings of the engine; planes in memory are used above their level unless they are exact.
        cache: fraction of the bytes that all experts take at 4 bits.
        text: two windows or more.
        change: engine -> a block inside of which it runs.
        dram: fraction of a second tier; 0: there is none.

    Raises:
        DoesNotFit: from cached_plan.
    """
    plan = cached_plan(store, settings, cache, max(map(len, text.windows)), dram)
    total = StepTotals()
    with Engine(store, plan, settings) as engine, change(engine):
        sequence, measured = engine.sequences.new(), Measurement(text, ())
        for number, window in enumerate(text.windows):
            sequence.crop(0)
            with engine.recorded() as records:
                measured.add(
                    number, torch.cat([engine.step(Step((Segment(sequence, (token,)),))) for token in window])
                )
            if number:
                total += StepTotals.of(records)
    moved, (quality, _) = total.transfers, measured.result()
    return Cached(quality, total.use, moved.ssd_bytes, moved.dram_bytes, total.rows)
