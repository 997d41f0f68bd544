"""Calls of edgemoe.machine.cuda to torch.cuda and their order, and its use of the driver's figures; without a GPU."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace

import pytest
import torch

from edgemoe.machine import cuda
from edgemoe.machine.cuda import CudaDevice

GB = 10**9


class FakeCuda:
    """Records the calls on every stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        self.pinnable, self.own = True, 3 * GB
        self.free, self.destroyed = 8 * GB, 0
        outer = self

        class Stream:
            cuda_stream = "copies"

            def __init__(self, place: object = None) -> None:
                pass

        class Driver:
            """Copies at once; streams are their names."""

            def __init__(self, index: int) -> None:
                pass

            def reads_host_memory(self) -> bool:
                return True

            def compute_stream(self) -> str:
                return "compute"

            def copy(self, target: int, source: int, size: int, stream: str) -> None:
                ctypes.memmove(target, source, size)

            def record(self, stream: str, *, awake: bool = False) -> int:
                outer.calls.append((stream, "record awake" if awake else "record"))
                return len(outer.calls)

            def destroy(self, event: int) -> None:
                outer.destroyed += 1

            def await_event(self, stream: str, event: int) -> None:
                outer.calls.append((stream, "wait"))

            def drain(self, stream: str) -> None:
                outer.calls.append((stream, "drain"))

        patch.setattr(cuda, "CudaDriver", Driver)
        cudart = SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: 0 if outer.pinnable else 712,
            cudaHostUnregister=lambda address: outer.calls.append(("host", "unpin")),
        )
        for name, value in {
            "Stream": Stream,
            "cudart": lambda: cudart,
            "get_device_properties": lambda place: SimpleNamespace(uuid="1234"),
            "mem_get_info": lambda place: (self.free, 24 * GB),
            "memory_reserved": lambda place: GB,
            "max_memory_reserved": lambda place: 2 * GB,
            "empty_cache": lambda: outer.calls.append(("host", "empty")),
            "reset_peak_memory_stats": lambda place: outer.calls.append(("host", "reset")),
            "set_per_process_memory_fraction": lambda part, place: outer.calls.append(("cap", f"{part}")),
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(cuda, "process_bytes", lambda uuid: outer.own)


@pytest.fixture
def fake(monkeypatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def a_pair(size: int = 4096) -> tuple[memoryview, torch.Tensor]:
    source = memoryview(mmap.mmap(-1, size))
    source[:] = b"\x07" * size
    return source, torch.zeros(size, dtype=torch.uint8)


def test_a_batch_is_one_wait_the_copies_and_one_event(fake):
    """The batch runs on the stream of copies; the compute stream waits for its event, and the host for nothing."""
    device, pairs = CudaDevice(), [a_pair(), a_pair()]
    event = device.copy(pairs, device.computed())
    device.await_copies([event])
    assert all(target.eq(7).all() for _, target in pairs)
    assert fake.calls == [
        ("compute", "record"),
        ("copies", "wait"),
        ("copies", "record"),
        ("compute", "wait"),
    ]


def test_attention_makes_no_plan_for_every_length(fake, monkeypatch):
    """cuDNN's attention is off: it makes a plan for every number of keys, a millisecond or more for each new token."""
    used = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", used.append)
    CudaDevice()
    assert used == [False]


def test_an_event_frees_its_handle(fake):
    """Events come and go with every expert that is copied."""
    event = CudaDevice().computed()
    assert fake.destroyed == 0
    del event
    assert fake.destroyed == 1


def test_a_refused_batch_leaves_no_copy_running(fake):
    """The copies before the failed one end before the error is raised."""
    (source, target), (short, _) = a_pair(), a_pair(8192)
    with pytest.raises(RuntimeError):
        CudaDevice().copy([(source, target), (short, target)], None)
    assert fake.calls[-1] == ("copies", "drain")


def test_a_refused_pin_clears_its_error(fake, monkeypatch):
    """CUDA reports a refusal again at the next launch; one launch follows at once, and its error is dropped."""
    device, launches = CudaDevice(), []

    def launch(*size: int, device: torch.device) -> None:
        launches.append(device)
        raise RuntimeError("an error from before")

    monkeypatch.setattr(torch, "zeros", launch)
    memory = memoryview(mmap.mmap(-1, 4096))
    assert device.pin(memory)
    assert launches == []
    fake.pinnable = False
    assert not device.pin(memory)
    assert launches == [device.place]


def test_the_figures_of_the_driver(fake):
    """Of 24 GB 8 are free and 3 this process's, 1 of them the allocator's, whose peak was 2: the peak is 4."""
    device = CudaDevice()
    assert device.driver_bytes() == 2 * GB + cuda._CODE_BYTES
    assert device.available_bytes() == 11 * GB
    assert device.peak() == 4 * GB
    device.cap(6 * GB)
    assert fake.calls == [("host", "empty"), ("host", "reset"), ("cap", "0.25")]
    device.cap(None)
    assert fake.calls[-1] == ("cap", "1.0")


@pytest.mark.parametrize(("free", "context"), [(22.5, 0.5 * GB), (8, 1 << 30)])
def test_a_driver_without_figures_of_the_process(fake, caplog, free, context):
    """The memory of all processes at the start counts as this one's context, up to its maximum, with a warning.

    Of 24 GB 1.5 or 16 are in use, and 1 of them is the allocator's, whose peak was 2. Memory that other processes
    take later does not count, and only free memory and the allocator's are available.
    """
    fake.own, fake.free = None, free * GB
    device = CudaDevice()
    assert not device.counts_own
    assert device.driver_bytes() == context + cuda._CODE_BYTES
    fake.free = 3 * GB
    assert device.peak() == device.driver_bytes() + 2 * GB
    assert device.available_bytes() == 4 * GB
    assert ["estimates" in message for message in caplog.messages] == [True]


def test_results_reach_the_host_with_one_wait(fake, monkeypatch):
    """Every tensor is copied to pinned memory of its own, and the host waits once for the compute stream."""
    device, empty, pinned = CudaDevice(), torch.empty, []

    def recorded(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", recorded)
    tensors = [torch.arange(6).view(2, 3), torch.ones(4, dtype=torch.bfloat16)]
    found = device.to_host(tensors)
    assert all(torch.equal(there, here) for there, here in zip(found, tensors, strict=True))
    assert all(there.data_ptr() != here.data_ptr() for there, here in zip(found, tensors, strict=True))
    assert (pinned, fake.calls) == ([True, True], [("compute", "drain")])


def test_a_result_is_fetched_without_a_wait(fake, monkeypatch):
    """The tensor is copied to pinned memory, and the event after it is for a thread that stays awake."""
    device, empty, pinned = CudaDevice(), torch.empty, []

    def recorded(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", recorded)
    tensor = torch.arange(6).view(2, 3)
    there, _ = device.fetch(tensor)
    assert torch.equal(there, tensor)
    assert (pinned, fake.calls) == ([True], [("compute", "record awake")])
