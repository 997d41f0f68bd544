"""The parts of an engine, opened in order: tiers, reader, compensators, the expert source, the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.engine.load_model import load_model
from edgemoe.engine.model_runner import ModelRunner
from edgemoe.experts.runtime import ExpertRuntime
from edgemoe.experts.use import HeldExperts
from edgemoe.kernels.base import ExpertKernel
from edgemoe.kernels.device_compensators import AnyCompensators, open_compensators
from edgemoe.memory.plan import MemoryPlan
from edgemoe.memory.tiers import form_of, open_tiers
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch import workers
from edgemoe.prefetch.base import ExpertSource
from edgemoe.prefetch.fetcher import Fetcher
from edgemoe.storage.store.reader import RecordReader


@dataclass(frozen=True)
class EngineParts:
    """The opened parts of an engine.

    Args:
        vram, dram: tiers of experts; dram is None where there is no slower one.
        fetcher: brings experts.
        source: the fetcher, or what wraps it.
        expert_places: where the planes of each expert lie.
        compensators: the store's compensators; None: settings use none.
        model: transformers' model with this program's attention and experts.
        runner: runs steps through it.
    """

    vram: PlaneTier
    dram: PlaneTier | None
    fetcher: Fetcher
    source: ExpertSource
    expert_places: HeldExperts
    compensators: AnyCompensators | None
    model: Any
    runner: ModelRunner


@dataclass(frozen=True)
class Wraps:
    """Wrappers that measure an engine's parts.

    Args:
        kernel: wraps the kernel.
        source: wraps the expert source.
    """

    kernel: Callable[[ExpertKernel], ExpertKernel] = lambda kernel: kernel
    source: Callable[[ExpertSource], ExpertSource] = lambda source: source


@contextmanager
def open_parts(
    skeleton: Any, store: StoreModel, plan: MemoryPlan, settings: RunSettings, wraps: Wraps
) -> Iterator[EngineParts]:
    """Opens the parts of an engine, and closes them at the block's end, in reverse order.

    Args:
        skeleton: the model without weights (layers.skeleton.skeleton).
        store: an opened store.
        plan: the division of the limit.
        settings: how to run the model.
        wraps: wrappers that measure the parts.

    Raises:
        DoesNotFit: a device has too little memory.
        DamagedData: the store is damaged.
        UserError: as load_model.
    """
    device, shape = store.device, store.shape
    form = form_of(store.form, settings)
    kernel = wraps.kernel(store.compute.kernel(store.manifest.geometry, store.compute.layout))
    with ExitStack() as opened:
        if device:
            device.cap(plan.vram_limit_bytes - plan.driver_bytes)
            opened.callback(device.cap, None)
        tiers = open_tiers(form, plan, settings, device)
        opened.callback(tiers.close)
        reader = RecordReader.open(store.directory, store.records)
        opened.callback(reader.close)
        compensators = _compensators(store, plan, settings)
        if compensators:
            opened.callback(compensators.close)  # after the reads of the source have ended
        fetcher = Fetcher(
            tiers.vram,
            tiers.dram,
            form,
            reader,
            path=tiers.path,
            workers=settings.readers,
            scan_workers=0 if device else workers.SCAN_WORKERS,
        )
        source = wraps.source(fetcher)
        opened.callback(source.close)
        source.configure(settings.speculate)
        source.use_compensators(compensators.where if compensators else None)
        runtime = ExpertRuntime(source, kernel, shape.experts_per_layer, device)
        model, runner = load_model(skeleton, store, plan, runtime)
        held = HeldExperts(fetcher, max(store.records.layers) + 1, shape.experts_per_layer)
        yield EngineParts(tiers.vram, tiers.dram, fetcher, source, held, compensators, model, runner)


def _compensators(store: StoreModel, plan: MemoryPlan, settings: RunSettings) -> AnyCompensators | None:
    """Opens the store's compensators, as far as the plan has bytes for them; None where settings use none."""
    if settings.compensation is None:
        return None
    return open_compensators(
        store.directory,
        store.manifest,
        store.device,
        budget=plan.compensators_resident_bytes,
        policy=settings.eviction,
        least=plan.minimum_vram_bytes,
    )
