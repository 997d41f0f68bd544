"""What storage.cuda asks of torch.cuda, in which order, and what it makes of the driver's numbers; without a GPU."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
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
        self.free = 8 * GB
        outer = self

        class Stream:
            def __init__(self, place: object = None) -> None:
                self.name = "copies"

            def wait_event(self, event: object) -> None:
                outer.calls.append((self.name, "wait"))

            def wait_stream(self, other: Stream) -> None:
                outer.calls.append((self.name, f"wait for {other.name}"))

            def synchronize(self) -> None:
                outer.calls.append((self.name, "drain"))

        class Event:
            def __init__(self, blocking: bool) -> None:
                assert blocking

            def record(self, stream: Stream) -> None:
                outer.calls.append((stream.name, "record"))

        class Graph:
            def capture_begin(self, pool: str, capture_error_mode: str) -> None:
                outer.calls.append((pool, f"begin {capture_error_mode}"))
                self.stream = outer.on

            def capture_end(self) -> None:
                assert self.stream == outer.on
                outer.calls.append(("pool", "end"))
                if outer.failing:
                    raise RuntimeError("the capture has failed")

            def replay(self) -> None:
                outer.calls.append(("pool", "launch"))

        self.graph, self.failing = Graph(), False
        compute = Stream()
        compute.name = "compute"
        self.on = "compute"

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            before, self.on = self.on, stream.name
            try:
                yield
            finally:
                self.on = before

        cudart = SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: 0 if outer.pinnable else 712,
            cudaHostUnregister=lambda address: outer.calls.append(("host", "unpin")),
        )
        for name, value in {
            "Stream": Stream,
            "CUDAGraph": lambda: outer.graph,
            "graph_pool_handle": lambda: "pool",
            "Event": Event,
            "stream": on,
            "current_stream": lambda place: compute,
            "cudart": lambda: cudart,
            "get_device_properties": lambda place: SimpleNamespace(uuid="1234"),
            "mem_get_info": lambda place: (self.free, 24 * GB),
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


@pytest.mark.parametrize(("free", "context"), [(22.5, 0.5 * GB), (8, 1 << 30)])
def test_a_driver_that_does_not_tell(fake, caplog, free, context):
    """What all processes have at the start counts as this one's context, as far as it can be one; a warning says so.

    Of 24 GB 1.5 or 16 are in use, and 1 of them is the allocator's, which has had 2. What others take later is
    nothing of ours, and only what is free is room.
    """
    fake.own, fake.free = None, free * GB
    device = CudaDevice()
    assert not device.counts_own
    assert device.driver_bytes() == context + cuda._CODE_BYTES
    fake.free = 3 * GB
    assert device.peak() == device.driver_bytes() + 2 * GB
    assert device.room() == 4 * GB
    assert ["estimates" in message for message in caplog.messages] == [True]


def test_what_the_host_has_to_know_comes_with_one_wait(fake, monkeypatch):
    """Each tensor into pinned memory of its own, and then one wait for the stream that computes."""
    device, empty, pinned = CudaDevice(), torch.empty, []

    def noted(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", noted)
    tensors = [torch.arange(6).view(2, 3), torch.ones(4, dtype=torch.bfloat16)]
    found = device.to_host(tensors)
    assert all(torch.equal(there, here) for there, here in zip(found, tensors, strict=True))
    assert all(there.data_ptr() != here.data_ptr() for there, here in zip(found, tensors, strict=True))
    assert (pinned, fake.calls) == ([True, True], [("compute", "drain")])


def test_pieces_are_captured_on_a_stream_of_their_own(fake):
    """In one pool, each launched once it has ended; both streams wait for each other; other threads are left alone."""
    recorder = CudaDevice().recorder()
    with recorder.noting():
        recorder.begin()
        recorder.end()()
    assert fake.calls == [
        ("copies", "wait for compute"),
        ("pool", "begin thread_local"),
        ("pool", "end"),
        ("pool", "launch"),
        ("compute", "wait for copies"),
    ]


def test_an_error_ends_a_capture(fake):
    """The open piece is ended, whatever that says of it, and the error goes on."""
    recorder, fake.failing = CudaDevice().recorder(), True

    def fail() -> None:
        with recorder.noting():
            recorder.begin()
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert fake.calls[-2:] == [("pool", "end"), ("compute", "wait for copies")]
    fake.failing = False
    with recorder.noting():
        recorder.begin()
        recorder.end()
