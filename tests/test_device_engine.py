"""An engine on a device that works late and out of order: the same bits as in RAM, under the same limits."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_double import DRIVER_BYTES, DoubleDevice, Poisoned

from edgemoe import process, tiers
from edgemoe.engine import Engine, StoreModel
from edgemoe.kernels.base import ExpertKernel, Part
from edgemoe.kernels.choice import Compute
from edgemoe.kernels.planes import PlaneExpertKernel
from edgemoe.options import within_memory
from edgemoe.plan import MINIMUM_EXPERTS, PROCESS_BYTES, ROUNDING_BYTES
from edgemoe.settings import RunSettings
from edgemoe.step import Segment, Step
from storage.errors import DoesNotFit, NotFinite
from storage.forms import PlaneForm
from storage.layout import LAYOUTS

PROMPT = torch.randint(3, 300, (21,), generator=torch.Generator().manual_seed(2)).tolist()
DECODED = [11, 250, 11, 42, 99, 7, 180, 64]


class Launched:
    """A kernel whose blocks have to stay as they are until the double says that it has ended."""

    def __init__(self, kernel: ExpertKernel, device: DoubleDevice) -> None:
        self._kernel, self._device = kernel, device
        self.refusals = 0

    def forward(self, x: torch.Tensor, parts: Sequence[Part], gate) -> torch.Tensor:
        if self.refusals:
            self.refusals -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")
        for part in parts:
            self._device.launch(part.blocks)
        return self._kernel.forward(x, parts, gate)


def in_planes(directory: Path, device: DoubleDevice | None) -> StoreModel:
    """A store as it is computed on a device, by torch's operators on planes."""
    store = StoreModel.open(directory)
    layout = LAYOUTS[store.manifest.layout]
    way = Compute("planes", layout, PlaneForm, PlaneExpertKernel)
    form = PlaneForm(store.manifest.geometry, layout, layout)
    return replace(store, form=form, compute=way, device=device)


def limited(store: StoreModel, settings: RunSettings, experts: int | None, dram_experts: int):
    """A plan with room for so many experts in each tier; None: all."""
    each, limit = store.form.bytes_at(settings.levels[0]), None
    if experts is not None:
        least = store.plan(vram_limit=None, settings=settings, context=64).minimum_vram_bytes
        limit = least + (experts - MINIMUM_EXPERTS) * each
    return store.plan(vram_limit=limit, dram_limit=dram_experts * each, settings=settings, context=64)


@pytest.fixture
def open_on(tiny_store, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """Opens engines on a double, or in RAM (None); ends them after the test, and the doubles with them."""
    monkeypatch.setattr(tiers, "OnDevice", Poisoned)
    doubles = []
    with ExitStack() as stack:

        def open_one(
            device: DoubleDevice | None,
            experts: int | None = None,
            dram_experts: int = 0,
            *,
            ends: bool = True,
            **settings,
        ) -> Engine:
            chosen = RunSettings(**{"levels": (8,), "exact": True} | settings)
            store = in_planes(tiny_store, device)
            plan = limited(store, chosen, experts, dram_experts)
            if device and ends:
                doubles.append(device)
            wrap = (lambda kernel: Launched(kernel, device)) if device else (lambda kernel: kernel)
            return stack.enter_context(Engine(store, plan, chosen, wrap_kernel=wrap))

        yield open_one
    for device in doubles:
        device.end()


def logits(engine: Engine) -> torch.Tensor:
    """The prompt's last logits and those of the decoded tokens, [9, vocab]."""
    sequence = engine.new_sequence()
    rows = [engine.prefill(sequence, PROMPT)]
    rows += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in DECODED]
    for tier in (engine.vram, engine.dram):
        if tier is not None:
            tier.check_integrity()
    return torch.stack(rows)


@pytest.mark.parametrize("level", [8, 4, 2])
def test_a_device_does_not_change_a_bit(open_on, level):
    """Whatever the limits, the readers, the look-ahead and the order of copies: the logits of all resident in RAM."""
    want = logits(open_on(None, levels=(level,)))
    for seed, (experts, dram, readers, speculate, threaded) in enumerate(
        [(2, 0, 1, "off", True), (2, 3, 4, "full", False), (7, 0, 4, "full", True), (7, 16, 1, "off", False)]
    ):
        device = DoubleDevice(seed, haste=0.2, threaded=threaded)
        engine = open_on(device, experts, dram, levels=(level,), readers=readers, speculate=speculate)
        assert torch.equal(logits(engine), want), (experts, dram)
        counts = engine.take_counts()
        assert counts.ssd_bytes > 0
        assert bool(counts.dram_bytes) >= (dram == 16)
        assert counts.spilled_bytes == 0


def unwaited_arrivals(device: DoubleDevice, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device, "await_copies", lambda events: None)


def unwaited_kernels(device: DoubleDevice, patch: pytest.MonkeyPatch) -> None:
    copy = device.copy
    patch.setattr(device, "copy", lambda pairs, after: copy(pairs, None))


@pytest.mark.parametrize("mistake", [unwaited_arrivals, unwaited_kernels])
def test_the_device_notices_an_engine_that_does_not_wait(open_on, monkeypatch, mistake):
    """Without either wait the logits differ, or a block changes under a kernel."""
    want = logits(open_on(None))
    for seed in range(4):
        device = DoubleDevice(seed, haste=0.1)
        mistake(device, monkeypatch)
        try:
            assert torch.equal(logits(open_on(device, 3, ends=False)), want)
            device.end()
        except (AssertionError, NotFinite):
            return
    pytest.fail("nobody noticed")


def test_scheduled_levels_on_a_device(open_on):
    """Levels by the gate and by attention are chosen from what the device computed, as they are in RAM."""
    for importance in ("gate", "heavy-hitters"):
        how = {"levels": (4, 2), "importance": importance}
        want = logits(open_on(None, **how))
        assert torch.equal(logits(open_on(DoubleDevice(1), 5, 4, **how)), want)


def test_what_lies_on_the_device_is_counted(open_on):
    """Dense weights and experts, each one allocation, stay within the limit, which the allocator is told."""
    device = DoubleDevice()
    engine = open_on(device, 5)
    plan = engine.plan
    planes = sum(kind.size * plan.vram_blocks[kind.name] for kind in engine.vram._form.kinds)
    assert device.allocated - planes in range(plan.dense_bytes, plan.dense_bytes + ROUNDING_BYTES)
    assert device.capped == plan.vram_limit_bytes - DRIVER_BYTES
    assert plan.driver_bytes == DRIVER_BYTES
    assert engine.peak_bytes() == device.allocated + DRIVER_BYTES < plan.vram_limit_bytes
    assert engine.budget.free == plan.plane_bytes - planes + plan.kv_bytes
    assert plan.staging_bytes == sum(device.pinned.values()) > 0
    first, second = plan.lines()
    assert "driver 1 KB, dense" in first
    assert "of RAM for staging" in second


def test_a_limit_below_what_the_driver_takes_is_refused(tiny_store):
    """The smallest limit that works has room for the driver, and the refusal says how much that is."""
    store, settings = in_planes(tiny_store, DoubleDevice()), RunSettings.uniform(4)
    least = store.plan(vram_limit=None, settings=settings, context=64).minimum_vram_bytes
    in_ram = in_planes(tiny_store, None).plan(vram_limit=None, settings=settings, context=64)
    assert least == in_ram.minimum_vram_bytes + DRIVER_BYTES + ROUNDING_BYTES
    with pytest.raises(DoesNotFit, match=f"driver {DRIVER_BYTES}") as refused:
        store.plan(vram_limit=least - 1, settings=settings, context=64)
    assert refused.value.minimum == least


def test_out_of_memory_once_is_no_error(open_on):
    """What is not in use is given back, and the step is run again: the same logits."""
    want = logits(open_on(None))
    device = DoubleDevice(3)
    engine = open_on(device, 4)
    engine._runner.kernel.refusals = 1
    assert torch.equal(logits(engine), want)
    assert device.emptied == 1


def test_out_of_memory_twice_fails_that_step_alone(open_on):
    """The error says what the device said; the sequence goes on as if the step had never been asked for."""
    want = logits(open_on(None))
    engine = open_on(DoubleDevice(4), 4, 3)
    sequence = engine.new_sequence()
    rows = [engine.prefill(sequence, PROMPT)]
    engine._runner.kernel.refusals = 2
    with pytest.raises(DoesNotFit, match=r"Tried to allocate 2\.00 GiB") as error:
        engine.step(Step((Segment(sequence, (DECODED[0],)),)))
    assert error.value.exit_code == 3
    assert sequence.length == len(PROMPT)
    rows += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in DECODED]
    assert torch.equal(torch.stack(rows), want)


@pytest.mark.parametrize(("given", "what"), [(0, "experts"), (1, "dense weights")])
def test_what_a_device_has_no_room_for_is_named(open_on, monkeypatch, given, what):
    """Memory that the device does not give is an error with what it said, not a traceback, and leaves no thread."""
    device, threads = DoubleDevice(), threading.active_count()
    allocate, left = device.allocate, [None] * given

    def refuse(size: int) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        left.pop()
        return allocate(size)

    monkeypatch.setattr(device, "allocate", refuse)
    with pytest.raises(DoesNotFit, match=f"{what} was wanted: CUDA out of memory"):
        open_on(device, 4)
    assert threading.active_count() == threads


def test_limits_above_what_is_free_are_shrunk(tiny_store, monkeypatch, caplog):
    """Of the device's memory and of RAM: each limit is told apart, and what is left is planned with."""
    device = DoubleDevice()
    store, settings = in_planes(tiny_store, device), RunSettings.uniform(4)
    plan = limited(store, settings, 6, 12)
    assert within_memory(store, plan, settings) is plan
    each = store.form.bytes_at(4)
    monkeypatch.setattr(device, "room", lambda: plan.vram_limit_bytes - 2 * each)
    monkeypatch.setattr(process, "available_memory", lambda: PROCESS_BYTES + plan.staging_bytes + 5 * each)
    monkeypatch.setattr(process, "resident_bytes", lambda: 0)
    smaller = within_memory(store, plan, settings)
    assert (smaller.vram_experts, smaller.dram_experts) == (4, 5)
    assert [message.startswith("a limit of ") for message in caplog.messages] == [True, True]


def test_nothing_stays_pinned(tiny_store):
    """An engine that is closed and forgotten leaves no memory registered."""
    device = DoubleDevice()
    store, settings = in_planes(tiny_store, device), RunSettings.uniform(4)
    with Engine(store, limited(store, settings, 3, 4), settings) as engine:
        engine.prefill(engine.new_sequence(), PROMPT)
        assert device.pinned
    del engine
    gc.collect()
    assert device.pinned == {}
