"""What storage.cuda asks of torch.cuda, in which order, and what it makes of the driver's numbers; without a GPU."""

from __future__ import annotations

import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from storage import cuda
from storage.cuda import CudaDevice

GB = 10**9


class FakeCuda:
    """Notes what is enqueued on which stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        self.pinnable, self.own = True, 3 * GB
        outer = self

        class Stream:
            def __init__(self, place: object = None) -> None:
                self.name = "copies"

            def wait_event(self, event: object) -> None:
                outer.calls.append((self.name, "wait"))

            def synchronize(self) -> None:
                outer.calls.append((self.name, "drain"))

        class Event:
            def __init__(self, blocking: bool) -> None:
                assert blocking

            def record(self, stream: Stream) -> None:
                outer.calls.append((stream.name, "record"))

        compute = Stream()
        compute.name = "compute"
        cudart = SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: 0 if outer.pinnable else 712,
            cudaHostUnregister=lambda address: outer.calls.append(("host", "unpin")),
        )
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": lambda stream: nullcontext(),
            "current_stream": lambda place: compute,
            "cudart": lambda: cudart,
            "get_device_properties": lambda place: SimpleNamespace(uuid="1234"),
            "mem_get_info": lambda place: (8 * GB, 24 * GB),
            "memory_reserved": lambda place: GB,
            "max_memory_reserved": lambda place: 2 * GB,
            "empty_cache": lambda: outer.calls.append(("host", "empty")),
            "reset_peak_memory_stats": lambda place: outer.calls.append(("host", "reset")),
            "set_per_process_memory_fraction": lambda share, place: outer.calls.append(("cap", f"{share}")),
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
    """On the stream of copies alone; kernels then wait for that event on theirs, and nobody for a stream."""
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


def test_a_refused_batch_leaves_nothing_under_way(fake):
    """The copies before the one that failed are waited for before the error goes on."""
    (source, target), (short, _) = a_pair(), a_pair(8192)
    with pytest.raises(RuntimeError):
        CudaDevice().copy([(source, target), (short, target)], None)
    assert fake.calls[-1] == ("copies", "drain")


def test_a_refused_pin_takes_its_error_with_it(fake, monkeypatch):
    """CUDA remembers a refusal until the next launch, which is made at once and whose error nobody sees."""
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


def test_the_drivers_numbers(fake):
    """Of 24 GB 8 are free; 3 are ours, 1 of them the allocator's, which has had 2: so the most was 4."""
    device = CudaDevice()
    assert device.driver_bytes() == 2 * GB + cuda._CODE_BYTES
    assert device.room() == 11 * GB
    assert device.peak() == 4 * GB
    device.cap(6 * GB)
    assert fake.calls == [("host", "empty"), ("host", "reset"), ("cap", "0.25")]


def test_a_driver_that_does_not_tell(fake):
    """Without the process's own number all that is used counts as its, and only what is free as its room."""
    fake.own = None
    device = CudaDevice()
    assert device.peak() == 17 * GB
    assert device.room() == 9 * GB
