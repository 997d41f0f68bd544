"""Choosing a device, its driver's counters, and its measurement; with a GPU or without."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device_double import DoubleDevice

from edgemoe.commands import doctor
from edgemoe.errors import UserError
from edgemoe.machine import devices, nvml
from edgemoe.machine.devices import device_name, open_device
from edgemoe.speed.device import PIECE, measure_device


@pytest.mark.parametrize(
    ("gpu", "triton", "name"), [(True, True, "cuda"), (True, False, "cpu"), (False, True, "cpu")]
)
def test_auto_is_cuda_with_both_gpu_and_triton(monkeypatch, gpu, triton, name):
    """`auto` is cuda where torch finds a GPU and Triton is installed; otherwise cpu."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(devices, "find_spec", lambda module: object() if triton else None)
    assert device_name("auto") == name
    assert device_name("cpu") == "cpu"


def test_a_missing_device_is_refused(monkeypatch, run, tmp_path):
    """`--device cuda` without a GPU is an error with exit code 2 before anything is read or converted."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="finds no GPU"):
        device_name("cuda")
    with pytest.raises(UserError, match="auto, cpu, cuda"):
        open_device("tpu")
    code, _, err = run("plan", "--model", tmp_path, "--device", "cuda")
    assert (code, "finds no GPU" in err) == (2, True)


def test_a_gpu_without_bf16_is_refused(monkeypatch):
    """A GPU of capability 7.5 is refused by name; `auto` takes the CPU there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA T4")
    monkeypatch.setattr(devices, "find_spec", lambda module: object())
    with pytest.raises(UserError, match=r"8\.0 or later.*NVIDIA T4, of capability 7\.5.*--device cpu"):
        device_name("cuda")
    assert device_name("auto") == "cpu"


class _NVMLError(Exception):
    pass


def library(processes: list[tuple[int, int | None]] | None) -> SimpleNamespace:
    """A driver's library that lists (process, bytes); None: it raises."""

    def running(handle: str) -> list[SimpleNamespace]:
        assert handle == "handle of GPU-1234"
        if processes is None:
            raise _NVMLError
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes]

    return SimpleNamespace(
        NVMLError=_NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetComputeRunningProcesses=running,
    )


@pytest.mark.parametrize(
    ("processes", "result"),
    [
        ([(1, 500), (77, 1000), (77, 24)], 1024),
        ([(1, 500)], None),
        ([(77, None)], None),
        ([], None),
        (None, None),
    ],
)
def test_the_driver_counts_this_process(monkeypatch, processes, result):
    """Only the driver's counters of this process count; without one the result is None."""
    monkeypatch.setattr(nvml.os, "getpid", lambda: 77)
    monkeypatch.setitem(sys.modules, "pynvml", library(processes))
    nvml._nvml.cache_clear()
    try:
        assert nvml.process_bytes("1234") == result
    finally:
        nvml._nvml.cache_clear()


def test_without_the_package_nothing_is_counted(monkeypatch):
    """nvidia-ml-py is optional: without it the result is None."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml._nvml.cache_clear()
    try:
        assert nvml.process_bytes("1234") is None
    finally:
        nvml._nvml.cache_clear()


@pytest.mark.e2e
@pytest.mark.parametrize(("allowed", "pinned"), [(3 * PIECE, 3), (5 * PIECE // 2, 2), (0, 0)])
def test_pinned_memory_and_copies_are_measured(allowed, pinned):
    """Pins what the system allows in whole pieces, times the copies by the clock, and unpins everything."""
    device = DoubleDevice(pinnable=allowed)
    ticks = count(10.0, 2.0)
    found = measure_device(device, 3 * PIECE + 5, clock=lambda: next(ticks))
    assert (found.tried, found.pinned) == (3 * PIECE, pinned * PIECE)
    assert found.copied == (16 * PIECE / 2.0 if pinned else None)
    assert device.pinned == {}
    device.end()


@pytest.mark.e2e
@pytest.mark.usefixtures("one_short_name")
def test_doctor_reports_the_gpu(monkeypatch, tmp_path: Path):
    """Name, free memory, pinnable memory, speed of copies, and both limits."""
    monkeypatch.setattr("edgemoe.kernels.native.library.available", lambda: False)
    monkeypatch.setattr(doctor, "PIN_MOST", 2 * PIECE)
    device = DoubleDevice(pinnable=PIECE)
    monkeypatch.setattr(device, "available_bytes", lambda: 12_000_000_000)
    monkeypatch.setattr(devices, "open_device", lambda name: device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "RTX Test")
    found = doctor.examine(tmp_path)
    text = "\n".join(found.lines(None))
    assert "RTX Test, 12 GB free" in text
    assert "RAM locked    67.1 MB of 134 MB tried" in text
    assert found.vram_limit == 10_800_000_000
    assert found.dram_limit is not None
    assert f"--dram-limit {found.dram_limit // 10**6}MB" in text
    assert found.gpu_link.pinned == PIECE
    assert "counted       by the driver" in text
    device.counts_own = False
    assert any("upper estimate" in line for line in doctor.examine(tmp_path).lines(None))
