"""The choice between moving an expert from DRAM to a device and computing it on the CPU from DRAM's blocks.

The CPU computes experts in steps of one token only. Such a step uses a copied expert for one row; a prompt's step uses
it for many, at the cost of the same copy. With exact answers the CPU computes none: it sums in another order than the
device, so an answer would depend on which experts are resident.

Whether the CPU is faster depends on its speed and the copies' speed, and each slows the other down, since both read the
same memory. So both are measured at once when an engine opens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from cache.plane_tier import PlaneTier
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

_COPIES_ALONE = 16
"""Copies that are timed while the CPU waits."""

_CALLS_BESIDE_COPIES = 8
"""Kernel calls that the copies outlast at the speeds measured alone: the end of the last call then adds little."""

_DISTINCT_BYTES = 1 << 28
"""Most bytes of experts that the kernel reads in turn: more than the processor's caches take."""


@dataclass(frozen=True)
class Pace:
    """Seconds that one expert takes.

    Args:
        computed: by the CPU for one token, while the device copies.
        moved: to the device, while the CPU computes.
        moved_alone: to the device, while the CPU waits.
    """

    computed: float
    moved: float
    moved_alone: float


def split(paces: Sequence[Pace]) -> int:
    """Counts the experts at the end of a list that the CPU computes while the others are moved.

    A layer ends with the slower side. Of equally fast plans, the one that leaves the fewest in DRAM wins.

    Args:
        paces: of each expert, the most important first.
    """
    count, least = 0, sum(pace.moved_alone for pace in paces)
    for left in range(1, len(paces) + 1):
        moved, computed = paces[:-left], paces[-left:]
        seconds = max(sum(pace.moved for pace in moved), sum(pace.computed for pace in computed))
        if seconds < least:
            count, least = left, seconds
    return count


@dataclass(frozen=True)
class CpuOffload:
    """A CPU kernel for experts that the source leaves in DRAM, with its measured paces.

    Args:
        kernel: reads planes in DRAM's layout.
        paces: level -> seconds of one expert.
    """

    kernel: ExpertKernel
    paces: Mapping[int, Pace]

    def split(self, levels: Sequence[int]) -> int:
        """Counts the experts at the end of a list of levels that stay in DRAM (implements prefetch.base.Split)."""
        return split([self.paces[level] for level in levels])

    def pays_for(self, experts: int) -> bool:
        """Whether the CPU computes any of a layer's `experts` misses."""
        return any(self.split([level] * experts) for level in self.paces)


@dataclass(frozen=True)
class Bench:
    """The parts of an engine that a measurement of paces needs.

    Args:
        device: copies blocks.
        vram: an empty tier on the device.
        dram: an empty tier in pinned memory.
        form: of both tiers.
        kernel: reads planes in DRAM's layout.
        clock: returns seconds.
    """

    device: Device
    vram: PlaneTier
    dram: PlaneTier
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
    """Measures in a few tenths of a second whether computing experts from DRAM on the CPU pays.

    Args:
        store: of the model.
        model: its modules.
        plan: its highest level and all levels below are measured.
        settings: cpu_experts turns the offload off.
        tiers: empty.
        wrap_kernel: as in Engine.

    Returns:
        None: there is no device or no DRAM tier, the offload is off, experts have biases, or it does not pay.
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
    offload = CpuOffload(wrap_kernel(kernel), paces)
    return offload if offload.pays_for(top_k) else None


def _have_biases(model: nn.Module) -> bool:
    """Whether experts have biases, which are dense weights on the device."""
    return any(
        getattr(module, "has_bias", False) for module in model.modules() if hasattr(module, "_apply_gate")
    )


def measure_pace(bench: Bench, level: int, hidden: int, top_k: int) -> Pace | None:
    """Measures the seconds of an expert at `level` while the CPU computes and the device copies.

    Where the CPU needs longer for one expert than the device for `top_k` copies, each is measured alone.

    Args:
        bench: the engine's parts; its tiers are empty again afterwards.
        level: of the experts.
        hidden: width of a token.
        top_k: experts of a token.

    Returns:
        None: a tier has no free blocks.
    """
    with ExitStack() as reservations:
        target = _reserve(reservations, bench.vram, 0, level)
        sources: list[Blocks] = []
        while len(sources) * bench.form.bytes_at(level) < _DISTINCT_BYTES:
            blocks = _reserve(reservations, bench.dram, len(sources), level)
            if blocks is None:
                break
            sources.append(blocks)
        if target is None or not sources:
            return None
        x = torch.ones(1, hidden, dtype=torch.bfloat16)
        return _measure(bench, level, x, top_k, sources, target)


def _reserve(reservations: ExitStack, tier: PlaneTier, number: int, level: int) -> Blocks | None:
    """Reserves blocks of a tier until the stack ends; None where none are free."""
    reservation = tier.reserve(ExpertKey(-1, number), level)
    if reservation is None:
        return None
    reservations.callback(tier.abandon, reservation)
    return reservation.into


def _measure(
    bench: Bench, level: int, x: torch.Tensor, top_k: int, sources: Sequence[Blocks], target: Blocks
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

    copy(1).wait()  # the first copy and the first call include initialisation
    compute(0)
    start = clock()
    copy(_COPIES_ALONE).wait()
    moved_alone = (clock() - start) / _COPIES_ALONE
    start = clock()
    compute(1)
    computed_alone = clock() - start
    if computed_alone >= top_k * moved_alone:
        return Pace(computed_alone, moved_alone, moved_alone)
    count = math.ceil(_CALLS_BESIDE_COPIES * computed_alone / moved_alone)
    start = clock()
    last = copy(count)
    calls = 0
    while not calls or (not last.done() and calls < 4 * _CALLS_BESIDE_COPIES):
        compute(calls)
        calls += 1
    computed = (clock() - start) / calls
    last.wait()
    return Pace(computed, (clock() - start) / count, moved_alone)
