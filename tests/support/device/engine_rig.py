"""Engines on a device that works late and out of order, and their logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from counted_engine import CountedEngine
from device_double import DoubleDevice, poisoned
from integrity import check_integrity

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.parts import Wraps
from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import ExpertKernel, Part, Rows
from edgemoe.kernels.registry import Compute
from edgemoe.kernels.torch_planes import PlaneExpertKernel
from edgemoe.kv.formats import KVFormat
from edgemoe.kv.step import Segment, Step
from edgemoe.memory import tiers
from edgemoe.memory.split import MINIMUM_EXPERTS
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.record.forms import PlaneForm
from edgemoe.storage.record.layout import LAYOUTS

PROMPT = torch.randint(3, 300, (21,), generator=torch.Generator().manual_seed(2)).tolist()
DECODED = [11, 250, 11, 42, 99, 7, 180, 64]


class Launched:
    """Wraps a kernel whose blocks must keep their bytes until the double ends it."""

    def __init__(self, kernel: ExpertKernel, device: DoubleDevice) -> None:
        self._kernel, self._device = kernel, device
        self.refusals = 0

    def forward(self, x: Rows, parts: Sequence[Part], activation: Activation, out: torch.Tensor) -> None:
        if self.refusals:
            self.refusals -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")
        for part in parts:
            if isinstance(part.blocks["base"], torch.Tensor):  # blocks in RAM are computed from at once
                self._device.launch(part.blocks)
        self._kernel.forward(x, parts, activation, out)


def in_planes(directory: Path, device: DoubleDevice | None) -> StoreModel:
    """Opens a store to be computed by torch's operators on planes, as on a device."""
    store = StoreModel.open(directory)
    layout = LAYOUTS[store.manifest.layout]
    planes = Compute("planes", layout, PlaneForm, PlaneExpertKernel)
    form = PlaneForm(store.manifest.geometry, layout, layout)
    return on_device(replace(store, form=form, compute=planes), device)


def on_device(store: StoreModel, device: DoubleDevice | None) -> StoreModel:
    """A store on a double, whose KV is taken as a whole; None: in RAM."""
    if device is None:
        return store
    return replace(store, device=device, shape=replace(store.shape, kv=store.shape.kv.moving()))


def limited(
    store: StoreModel, settings: RunSettings, experts: int | None, dram_experts: int, parallel: int = 1
):
    """A plan with blocks for so many experts in each tier (None: all), and for so many sequences at once."""
    each, limit = store.form.bytes_at(settings.levels[0]), None
    sizes = {"settings": settings, "context": 64, "parallel": parallel}
    if experts is not None:
        least = store.plan(vram_limit=None, **sizes).minimum_vram_bytes
        limit = least + (experts - MINIMUM_EXPERTS) * each
    return store.plan(vram_limit=limit, dram_limit=dram_experts * each, **sizes)


def engines_on(directory: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Yields a function that opens engines on a double, or in RAM (None); ends engines and doubles after the test."""
    patch.setattr(tiers, "on_device", poisoned)
    doubles = []
    with ExitStack() as stack:

        def open_one(
            device: DoubleDevice | None,
            experts: int | None = None,
            dram_experts: int = 0,
            *,
            ends: bool = True,
            parallel: int = 1,
            kv: KVFormat | None = None,
            **settings,
        ) -> Engine:
            chosen = RunSettings(**{"levels": (8,), "exact": True} | settings)
            store = in_planes(directory, device).with_kv(kv or KVFormat())
            plan = limited(store, chosen, experts, dram_experts, parallel)
            if device and ends:
                doubles.append(device)
            wrap = (lambda kernel: Launched(kernel, device)) if device else (lambda kernel: kernel)
            return stack.enter_context(CountedEngine(store, plan, chosen, Wraps(kernel=wrap)))

        yield open_one
    for device in doubles:
        device.end()


def logits(engine: Engine) -> torch.Tensor:
    """Logits after the prompt and after each decoded token, [9, vocab]."""
    sequence = engine.sequences.new()
    rows = [engine.prefill(sequence, PROMPT)]
    rows += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in DECODED]
    for tier in (engine.vram, engine.dram):
        if tier is not None:
            check_integrity(tier)
    return torch.stack(rows)
