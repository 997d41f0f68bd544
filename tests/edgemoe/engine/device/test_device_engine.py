"""An engine on a device that works late and out of order gives the bits of RAM, under equal limits."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from counted_engine import CountedEngine
from device_double import DRIVER_BYTES, DoubleDevice
from engine_rig import DECODED, PROMPT, engines_on, in_planes, limited, logits

from edgemoe.engine.engine import Engine
from edgemoe.errors import DoesNotFit, NotFinite
from edgemoe.experts import layer
from edgemoe.kv import blocks
from edgemoe.kv.formats import KVFormat
from edgemoe.kv.step import Segment, Step
from edgemoe.layers import attention
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.machine import process
from edgemoe.memory import workspace
from edgemoe.memory.describe import plan_lines
from edgemoe.memory.overhead import CAPTURE_BYTES, EXPERT_BYTES, PROCESS_BYTES, ROUNDING_BYTES
from edgemoe.models.plans.division import Division, plan_levels, within_memory
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.fetcher import Fetcher
from edgemoe.storage.sizes import format_size


@pytest.fixture
def open_on(tiny_store, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """Opens engines on a double (engine_rig.engines_on)."""
    yield from engines_on(tiny_store, monkeypatch)


@pytest.mark.e2e
@pytest.mark.parametrize("level", [8, 4, 2])
def test_a_device_does_not_change_a_bit(open_on, level):
    """Logits are as with all experts in RAM, for any limits, readers, look-ahead and order of copies."""
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


@pytest.mark.e2e
@pytest.mark.parametrize(
    "kinds", [("q8_0", "q8_0"), pytest.param(("q4_0", "q4_0"), marks=pytest.mark.folders), ("bf16", "q4_0")]
)
def test_a_device_stores_codes_of_keys_and_values(open_on, monkeypatch, kinds):
    """Logits are as in RAM; by torch's operators, as on a GPU, they differ by rounding."""
    kv = KVFormat(*kinds)
    want = logits(open_on(None, kv=kv))
    assert torch.equal(logits(open_on(DoubleDevice(1), 7, 16, kv=kv)), want)
    monkeypatch.setattr(GroupedQueryAttention, "try_from", lambda *args: None)
    monkeypatch.setattr(attention, "_by_kernel", lambda query: False)
    got = logits(open_on(DoubleDevice(2), 7, 16, kv=kv))
    assert not torch.equal(got, want)
    assert (got - want).norm() < 0.02 * want.norm()


def unwaited_arrivals(device: DoubleDevice, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device, "await_copies", lambda events: None)


def unwaited_kernels(device: DoubleDevice, patch: pytest.MonkeyPatch) -> None:
    copy = device.copy
    patch.setattr(device, "copy", lambda pairs, after: copy(pairs, None))


@pytest.mark.e2e
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
    pytest.fail("the mistake was not noticed")


@pytest.mark.e2e
def test_scheduled_levels_on_a_device(open_on):
    """Levels by the gate and by attention are chosen from what the device computed, as they are in RAM."""
    for importance in ("gate", "heavy-hitters"):
        how = {"levels": (4, 2), "importance": importance}
        want = logits(open_on(None, **how))
        assert torch.equal(logits(open_on(DoubleDevice(1), 5, 4, **how)), want)


def test_device_allocations_stay_within_the_plan(open_on):
    """Dense weights and experts, each one allocation, stay within the limit, which is the allocator's cap."""
    device = DoubleDevice()
    engine = open_on(device, 5)
    plan = engine.plan
    planes = sum(kind.size * plan.vram_blocks[kind.name] for kind in engine.vram._form.kinds)
    assert device.allocated - planes in range(plan.dense_bytes, plan.dense_bytes + ROUNDING_BYTES)
    assert device.capped == plan.vram_limit_bytes - DRIVER_BYTES
    assert plan.driver_bytes == DRIVER_BYTES
    assert engine.peak.bytes == device.allocated + DRIVER_BYTES < plan.vram_limit_bytes
    assert plan.staging_bytes == sum(device.pinned.values()) > 0
    text = "\n".join(plan_lines(plan, engine.settings))
    assert re.search("GPU driver +1 KB\n +dense", text)
    assert "of RAM, through which experts go to the GPU" in text


def test_a_prompt_takes_its_experts_once(open_on, monkeypatch):
    """A prompt of more rows than a block is one step: its other parts go block by block, with the same logits.

    The kernel computes the rows of several experts in a call, at most as many as the plan has memory for.
    """
    want = logits(open_on(DoubleDevice()))
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 8)
    monkeypatch.setattr(layer, "DEVICE_BATCH_ROWS", 16)
    engine, rows = open_on(DoubleDevice()), []
    kernel = engine.runner._runtime.kernel
    forward = kernel.forward
    monkeypatch.setattr(
        kernel,
        "forward",
        lambda x, parts, *rest: (rows.append([p.rows for p in parts]), forward(x, parts, *rest)),
    )
    with engine.recorded() as records:
        got = logits(engine)
    assert len(records) == 1 + len(DECODED)
    assert (got - want).norm() < 0.01 * want.norm()
    assert max(map(sum, rows)) <= 16 < sum(map(sum, rows))


def test_a_device_has_memory_for_a_long_prompt(tiny_store, monkeypatch):
    """Rows beyond a block where they take a fraction of the experts' bytes, reserved for good; others on request."""
    store, settings = in_planes(tiny_store, DoubleDevice()), RunSettings.uniform(4)
    sizes = {"vram_limit": None, "settings": settings, "context": 8192}
    monkeypatch.setattr(workspace, "DEVICE_FRACTION", 0)
    short, given = (store.plan(**sizes, prefill_rows=rows) for rows in (None, 1024))
    monkeypatch.setattr(workspace, "DEVICE_FRACTION", 1000)
    long = store.plan(**sizes)
    assert [plan.prefill_rows for plan in (short, given, long)] == [512, 1024, workspace.DEVICE_ROWS]
    for plan in (given, long):
        more, shape = plan.workspace_bytes - short.workspace_bytes, store.shape
        # Of each row: the results of its experts and what sums them, and the states of a layer.
        least = (plan.prefill_rows - 512) * shape.hidden * (2 * shape.top_k + 10 + 12)
        assert least < more < 2 * least
        assert plan.long_step_bytes == 0
        assert plan.vram_blocks == plan.first_blocks


def test_a_closed_engine_ends_its_cap(open_on):
    """A closed engine's limit does not hold for what the process allocates after it."""
    device = DoubleDevice()
    engine = open_on(device, 5)
    engine.close()
    assert device.capped is None


def test_a_look_ahead_that_begins_within_a_layer(open_on, monkeypatch):
    """Where the source begins to look ahead after the router's report, that layer predicts nothing."""
    want, turns = logits(open_on(None)), cycle([False, True])
    monkeypatch.setattr(Fetcher, "looks_ahead", property(lambda source: next(turns)))
    assert torch.equal(logits(open_on(DoubleDevice(2), 5, 4, speculate="full")), want)


def test_a_limit_below_the_drivers_bytes_is_refused(tiny_store):
    """The smallest limit that works includes the driver, and the refusal names the driver's bytes."""
    store, settings = in_planes(tiny_store, DoubleDevice()), RunSettings.uniform(4)
    least = store.plan(vram_limit=None, settings=settings, context=64).minimum_vram_bytes
    in_ram = in_planes(tiny_store, None).plan(vram_limit=None, settings=settings, context=64)
    own = DRIVER_BYTES + ROUNDING_BYTES + CAPTURE_BYTES - EXPERT_BYTES * store.shape.experts
    assert least == in_ram.minimum_vram_bytes + own
    with pytest.raises(DoesNotFit, match=f"driver {format_size(DRIVER_BYTES)}") as refused:
        store.plan(vram_limit=least - 1, settings=settings, context=64)
    assert refused.value.minimum == least


def test_out_of_memory_once_is_no_error(open_on):
    """Unused memory is freed, and the step runs again, with equal logits."""
    want = logits(open_on(None))
    device = DoubleDevice(3)
    engine = open_on(device, 4)
    engine.runner._runtime.kernel.refusals = 1
    assert torch.equal(logits(engine), want)
    assert device.emptied == 1


def test_out_of_memory_twice_fails_that_step_alone(open_on):
    """The error has the device's message; the sequence goes on as if the step had never run."""
    want = logits(open_on(None))
    engine = open_on(DoubleDevice(4), 4, 3)
    sequence = engine.sequences.new()
    rows = [engine.prefill(sequence, PROMPT)]
    engine.runner._runtime.kernel.refusals = 2
    with pytest.raises(DoesNotFit, match=r"Tried to allocate 2\.00 GiB") as error:
        engine.step(Step((Segment(sequence, (DECODED[0],)),)))
    assert error.value.exit_code == 3
    assert sequence.length == len(PROMPT)
    rows += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in DECODED]
    assert torch.equal(torch.stack(rows), want)


@pytest.mark.parametrize(("limits", "what"), [(0, "experts"), (1, "dense weights")])
def test_the_allocation_that_a_device_refuses_is_named(open_on, monkeypatch, limits, what):
    """A refused allocation is an error with the device's message, not a traceback, and leaves no thread."""
    device, threads = DoubleDevice(), threading.active_count()
    allocate, left = device.allocate, [None] * limits

    def refuse(size: int) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        left.pop()
        return allocate(size)

    monkeypatch.setattr(device, "allocate", refuse)
    with pytest.raises(DoesNotFit, match=f"{what}.* CUDA out of memory"):
        open_on(device, 4)
    assert threading.active_count() == threads


def test_limits_above_free_memory_are_shrunk(tiny_store, monkeypatch, caplog):
    """The limits of device memory and of RAM shrink separately, and the plan uses the rest."""
    device = DoubleDevice()
    store, settings = in_planes(tiny_store, device), RunSettings.uniform(4)
    plan = limited(store, settings, 6, 12)
    assert within_memory(store, plan, settings) is plan
    each = store.form.bytes_at(4)
    monkeypatch.setattr(device, "available_bytes", lambda: plan.vram_limit_bytes - 2 * each)
    monkeypatch.setattr(process, "available_memory", lambda: PROCESS_BYTES + plan.staging_bytes + 5 * each)
    monkeypatch.setattr(process, "resident_bytes", lambda: 0)
    smaller = within_memory(store, plan, settings)
    assert (smaller.vram_experts, smaller.dram_experts) == (4, 5)
    for option, message in zip(("--vram-limit", "--dram-limit"), caplog.messages, strict=True):
        assert message.startswith(f"{option} ")
        assert f"give {option} " in message


def test_a_plan_for_a_larger_device_gives_a_warning(tiny_store, monkeypatch, caplog):
    """Where limits do not shrink, a limit above the device's free memory gives a warning with one that fits."""
    device = DoubleDevice()
    store, choose = in_planes(tiny_store, device), lambda level, **_: RunSettings.uniform(level)
    monkeypatch.setattr(device, "available_bytes", lambda: 200_000_000)
    plan_levels(store, choose, Division(200_000_000, context=64))
    assert not caplog.messages
    assert plan_levels(store, choose, Division(400_000_000, context=64))[0].vram_limit_bytes == 400_000_000
    (message,) = caplog.messages
    assert message.startswith("--vram-limit 400 MB is more than the 200 MB of GPU memory that are free")
    assert message.endswith("give --vram-limit 180MB")


def test_a_closed_engine_frees_its_memory(tiny_store, monkeypatch):
    """No memory stays registered, mapped or allocated for experts, though the engine itself is still there."""
    device, allocated = DoubleDevice(), []

    def noted(size: int) -> torch.Tensor:
        memory = np.zeros(size, np.uint8)
        allocated.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    monkeypatch.setattr(device, "allocate", noted)
    store, settings = in_planes(tiny_store, device), RunSettings.uniform(4)
    with CountedEngine(store, limited(store, settings, 3, 4), settings) as engine:
        engine.prefill(engine.sequences.new(), PROMPT)
        assert device.pinned
        mapping = engine.dram.blocks.arenas["base"]._memory
    device.end()  # drops the double's own references to memory
    gc.collect()
    assert (device.pinned, allocated[0](), mapping.closed) == ({}, None, True)
    engine.close()


@pytest.mark.parametrize("fails", ["parts.RecordReader.open", "parts.Fetcher", "load_model.build_model"])
def test_a_failed_engine_frees_everything(tiny_store, monkeypatch, fails):
    """An error while opening leaves no thread, no open file and no registered memory."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("not today")

    def threads_and_files() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    device = DoubleDevice()
    store, settings = in_planes(tiny_store, device), RunSettings.uniform(4)
    plan = limited(store, settings, 3, 4)
    monkeypatch.setattr(f"edgemoe.engine.{fails}", fail)
    before = threads_and_files()
    with pytest.raises(RuntimeError, match="not today") as caught:
        CountedEngine(store, plan, settings)
    assert threads_and_files() == before
    assert device.pinned == {}
    assert caught.value.__context__ is None
