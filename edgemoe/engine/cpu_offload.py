"""Experts that are computed on the CPU from the DRAM tier's blocks, beside a device that computes the others.

Only in steps of one token: there a miss is one product of few operations, and copying it costs as much as for a whole
prompt, which shares the copy among its tokens. And never where every expert is computed exactly: a CPU sums in another
order than the device, so an answer would depend on what is resident.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from cache.base import Tier
from edgemoe.engine.cpu_split import Pace, split
from edgemoe.kernels import threads
from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import ExpertKernel, Part
from edgemoe.kernels.registry import beside_device
from edgemoe.memory.plan import MemoryPlan
from edgemoe.memory.tiers import Tiers
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from storage.base import LEVELS, Blocks, ExpertKey, ResidentForm
from storage.device import Device, Event

_COPIES = 16
"""Copies that are timed alone."""

_CALLS = 8
"""Calls of the kernel that copies are to outlast: the last one's overhang is then a small share."""

_APART = 1 << 28
"""Bytes of experts that are computed in turn, at most: more than a processor's caches hold."""


@dataclass(frozen=True)
class CpuOffload:
    """The CPU kernel for experts that the source leaves in DRAM, and how fast it is.

    Args:
        kernel: for planes as they lie in DRAM.
        paces: level -> what one expert takes.
    """

    kernel: ExpertKernel
    paces: Mapping[int, Pace]

    def split(self, levels: Sequence[int]) -> int:
        """How many of the last of some experts are left in DRAM (prefetch.base.Split)."""
        return split([self.paces[level] for level in levels])

    def pays_for(self, experts: int) -> bool:
        """Whether it computes any of so many misses of a layer."""
        return any(self.split([level] * experts) for level in self.paces)


@dataclass(frozen=True)
class Bench:
    """The parts of an engine, still empty, with which paces are measured.

    Args:
        device: copies.
        vram: a tier on it.
        dram: a tier in pinned memory, with the same form.
        form: of both.
        kernel: for planes as they lie in DRAM.
        clock: seconds.
    """

    device: Device
    vram: Tier
    dram: Tier
    form: ResidentForm
    kernel: ExpertKernel
    clock: Callable[[], float] = time.perf_counter


def measure_offload(
    store: StoreModel,
    model: nn.Module,
    plan: MemoryPlan,
    settings: RunSettings,
    tiers: Tiers,
    wrap_kernel: Callable[[ExpertKernel], ExpertKernel],
) -> CpuOffload | None:
    """Measures, in a few tenths of a second, whether computing experts in DRAM on the CPU pays.

    Args:
        store: of the model.
        model: its modules.
        plan: whose levels are measured, and all below.
        settings: say whether at all.
        tiers: empty still.
        wrap_kernel: of Engine.

    Returns:
        None: there is no device or no DRAM, it is turned off, or it does not pay.
    """
    if not (store.device and tiers.dram) or settings.cpu_experts == "off" or _have_biases(model):
        return None
    layout, hidden, top_k = store.compute.layout, store.shape.hidden, store.shape.top_k
    kernel = beside_device(layout)(store.manifest.geometry, layout)
    bench = Bench(store.device, tiers.vram, tiers.dram, store.form, kernel)
    paces = {}
    with torch.inference_mode(), threads.for_step():
        for level in [bits for bits in LEVELS if 0 < bits <= plan.levels[0]]:
            pace = measure_pace(bench, level, hidden, top_k)
            if pace is None:
                return None
            paces[level] = pace
    found = CpuOffload(wrap_kernel(kernel), paces)
    return found if found.pays_for(top_k) else None


def _have_biases(model: nn.Module) -> bool:
    """Whether experts have biases: these are dense weights, and lie on the device."""
    return any(
        getattr(module, "has_bias", False) for module in model.modules() if hasattr(module, "_apply_gate")
    )


def measure_pace(bench: Bench, level: int, hidden: int, top_k: int) -> Pace | None:
    """Seconds of an expert at `level` while the CPU computes and the device copies at once, if that can pay at all.

    Where a single expert takes the CPU longer than moving a whole layer's, the figures are those of each alone.

    Returns:
        None: a tier has no free blocks.
    """
    with ExitStack() as lent:
        target = _lend(lent, bench.vram, 0, level)
        sources: list[Blocks] = []
        while len(sources) * bench.form.bytes_at(level) < _APART:
            blocks = _lend(lent, bench.dram, len(sources), level)
            if blocks is None:
                break
            sources.append(blocks)
        if target is None or not sources:
            return None
        return _timed(bench, level, torch.ones(1, hidden, dtype=torch.bfloat16), top_k, sources, target)


def _lend(lent: ExitStack, tier: Tier, number: int, level: int) -> Blocks | None:
    """Blocks of an empty tier, until the stack ends. None: there are no more."""
    reservation = tier.reserve(ExpertKey(-1, number), level)
    if reservation is None:
        return None
    lent.callback(tier.abandon, reservation)
    return reservation.into


def _timed(
    bench: Bench,
    level: int,
    x: torch.Tensor,
    top_k: int,
    sources: Sequence[Blocks],
    target: Blocks,
) -> Pace:
    device, clock = bench.device, bench.clock

    def compute(number: int) -> None:
        part = Part(sources[number % len(sources)], level, level, 1)
        bench.kernel.forward(x, [part], Activation.gated("silu"), torch.empty_like(x))

    def copy(count: int) -> Event:
        for number in range(count):
            source = sources[number % len(sources)]
            event = device.copy([(source[kind], block) for kind, block in target.items()], None)
        return event

    copy(1).wait()  # the first of either pays for what later ones find
    compute(0)
    start = clock()
    copy(_COPIES).wait()
    moved_alone = (clock() - start) / _COPIES
    start = clock()
    compute(1)
    computed_alone = clock() - start
    if computed_alone >= top_k * moved_alone:
        return Pace(computed_alone, moved_alone, moved_alone)
    count = math.ceil(_CALLS * computed_alone / moved_alone)
    start = clock()
    last = copy(count)
    calls = 0
    while not calls or (not last.done() and calls < 4 * _CALLS):
        compute(calls)
        calls += 1
    computed = (clock() - start) / calls
    last.wait()
    return Pace(computed, (clock() - start) / count, moved_alone)
