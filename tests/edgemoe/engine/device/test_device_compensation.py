"""Compensated experts (--compensate) on a device that works late and out of order."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from compensated_steps import RANKS, alone, together
from compensator_bytes import add_random
from device_double import DRIVER_BYTES, DoubleDevice
from engine_rig import engines_on, in_planes

from edgemoe.engine.engine import Engine
from edgemoe.errors import DoesNotFit, StoreBusy, UserError
from edgemoe.kernels.device_compensators import DeviceCompensators
from edgemoe.memory.describe import plan_lines
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.compensators.low_rank import corrections
from edgemoe.storage.compensators.reader import CompensatorReader

TWO = {"compensation": Compensation(2)}
ROUNDING = 0.03
"""Largest relative difference of logits that the order of bf16 roundings makes."""


@pytest.fixture(scope="module")
def compensated(tiny_store, tmp_path_factory) -> Path:
    """The tiny store with compensators of random codes, of level 2."""
    store = Path(shutil.copytree(tiny_store, tmp_path_factory.mktemp("compensated") / "store"))
    add_random(store, lambda layer, expert: RANKS[expert % 3])
    return store


@pytest.fixture
def open_on(compensated, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """Opens engines on a double (engine_rig.engines_on)."""
    for open_one in engines_on(compensated, monkeypatch):
        yield partial(open_one, parallel=4)


@pytest.mark.e2e
@pytest.mark.parametrize("levels", [{"levels": (2,)}, {"levels": (4, 2), "retention": 0.5}])
def test_a_device_compensates_as_a_cpu_does(open_on, open_engine, compensated, levels):
    """Prompts, single tokens and steps of several have a CPU's logits but for rounding, and its counts."""
    how = {**levels, **TWO}
    cpu, device = (
        open_engine(compensated, parallel=4, exact=True, **how),
        open_on(DoubleDevice(1), None, **how),
    )
    off = open_on(DoubleDevice(2), None, **levels)
    for run in (alone, together):
        want, got, without = run(cpu), run(device), run(off)
        assert (got - want).norm() < ROUNDING * want.norm() < (without - want).norm()
        use, theirs = device.take_use(), cpu.take_use()
        assert use.compensation == theirs.compensation
        assert use.compensated > 0
        assert use.bits_computed == pytest.approx(theirs.bits_computed, rel=0.01)


@pytest.mark.e2e
def test_limits_change_no_bit(open_on):
    """Whatever is resident, and in whatever order copies are made, logits are equal; no compensator is requested."""
    want = alone(open_on(DoubleDevice(0), None, levels=(2,), **TWO))
    for seed, (experts, dram) in enumerate([(3, 0), (5, 4)], 3):
        engine = open_on(DoubleDevice(seed, haste=0.2), experts, dram, levels=(2,), **TWO)
        assert torch.equal(alone(engine), want)
        assert engine.take_counts().compensator_bytes == 0


def test_factors_on_a_device_are_the_ones_of_the_file(compensated):
    """Decoded on the device they are the numbers of storage.compensators, bit for bit; none where ranks are 0."""
    device = DoubleDevice()
    store = in_planes(compensated, device)
    made, index = (
        DeviceCompensators.of_store(compensated, store.manifest, device),
        store.manifest.compensators,
    )
    assert made.level == index.base_level == 2
    reader = CompensatorReader(compensated, index)
    for layer, expert in ((0, 0), (2, 2), (2, 6)):
        key = ExpertKey(layer, expert)
        own = made.of(key)
        want = corrections(reader.load(key), own.geometry)
        for matrix, found in own.corrections().items():
            assert torch.equal(found.u, want[matrix].u)
            assert torch.equal(found.v, want[matrix].v)
            assert found.ranks == want[matrix].ranks
        assert made.bits_of(layer, expert) == own.bits > 0
    assert made.of(ExpertKey(0, 1)) is None
    assert made.bits_of(0, 1) == 0
    reader.close()
    made.close()
    assert made.of(ExpertKey(0, 0)) is None


def test_compensators_are_a_part_of_the_limit(compensated):
    """The smallest limit holds all of them, and the device allocates the bytes of the plan."""
    device = DoubleDevice()
    store = in_planes(compensated, device)
    sizes = {"context": 64, "settings": RunSettings.uniform(2, **TWO)}
    plan = store.plan(vram_limit=None, **sizes)
    least = store.plan(vram_limit=plan.minimum_vram_bytes, **sizes)
    DeviceCompensators.of_store(compensated, store.manifest, device)
    assert (
        device.peak() - DRIVER_BYTES
        == least.compensators_resident_bytes
        == least.compensators_total_bytes
        > 0
    )
    assert "compensators" in "\n".join(plan_lines(least, sizes["settings"]))
    with pytest.raises(DoesNotFit, match="compensators") as refused:
        store.plan(vram_limit=plan.minimum_vram_bytes - 1, **sizes)
    assert refused.value.minimum == plan.minimum_vram_bytes


def test_a_part_of_them_is_refused(compensated):
    """A device reads no compensator while it runs: a limit of their own is refused before anything is loaded."""
    settings = RunSettings.uniform(2, compensators_limit=1 << 20, **TWO)
    with pytest.raises(UserError, match="all compensators in the GPU's memory, got --compensators-limit"):
        in_planes(compensated, DoubleDevice()).plan(vram_limit=None, settings=settings, context=64)


def test_a_device_without_memory_for_them_says_so(open_on, monkeypatch):
    """The refused allocation is named, and no memory stays pinned."""
    device = DoubleDevice()
    allocate, left = device.allocate, [None]

    def refuse(size: int) -> torch.Tensor:
        if not left:
            raise torch.OutOfMemoryError("CUDA out of memory")
        left.pop()
        return allocate(size)

    monkeypatch.setattr(device, "allocate", refuse)
    with pytest.raises(DoesNotFit, match=r"compensators.* CUDA out of memory"):
        open_on(device, 4, levels=(2,), **TWO)
    assert device.pinned == {}


def test_others_in_their_place_are_noticed(compensated, tmp_path):
    """Files that another run has replaced since the manifest was read are an error with what to do."""
    copied = Path(shutil.copytree(compensated, tmp_path / "store"))
    device = DoubleDevice()
    store = in_planes(copied, device)
    add_random(copied, lambda layer, expert: (4, 4, 4))
    for path in (copied / "compensators").iterdir():
        if path.name in {layer.file for layer in store.manifest.compensators.layers.values()}:
            path.unlink()
    with pytest.raises(StoreBusy, match="run the command again"):
        DeviceCompensators.of_store(copied, replace(store.manifest), device)
