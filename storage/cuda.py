"""The device that is an NVIDIA GPU: torch's allocator, CUDA's streams, events and page-locked memory."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from storage.device import Device, Event, Recorder
from storage.driver import process_bytes

_CODE_BYTES = 256 << 20
"""What kernels of CUDA's libraries and of ours may take once they are loaded; not measured yet."""

_CONTEXT_MOST = 1 << 30
"""What a context is taken for at most, where the driver does not tell it from what other processes have."""

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""

_log = logging.getLogger("edgemoe")


class _CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a thread that waits for a copy sleeps instead of taking a core.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def done(self) -> bool:
        """See Event."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See Event."""
        self.event.synchronize()


class _CudaRecorder(Recorder):
    """CUDA graphs, all in one pool of memory. Has not run on a GPU yet."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        # The default stream cannot be captured.
        self._stream, self._pool = torch.cuda.Stream(place), torch.cuda.graph_pool_handle()
        self._open: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """See Recorder."""
        before = torch.cuda.current_stream(self._place)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                try:
                    yield
                finally:
                    if self._open is not None:
                        with suppress(RuntimeError):  # of an error within it a capture tells once more
                            self.end()
        finally:
            before.wait_stream(self._stream)

    def begin(self) -> None:
        """See Recorder. Threads that read and copy meanwhile are no part of it."""
        self._open = torch.cuda.CUDAGraph()
        self._open.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        """See Recorder."""
        graph, self._open = self._open, None
        assert graph
        graph.capture_end()
        return graph.replay


class CudaDevice(Device):
    """See Device. Copies have a stream of their own; compute is the calling thread's current stream.

    Args:
        index: of the GPU, as torch counts.
    """

    def __init__(self, index: int = 0) -> None:
        self.place = torch.device("cuda", index)
        self._copies = torch.cuda.Stream(self.place)
        own = self._own()
        self.counts_own = own is not None
        # Asked once, before kernels are loaded, so that every plan of a process says the same.
        self._driver = self._context(own) + _CODE_BYTES

    def allocate(self, size: int) -> torch.Tensor:
        """See Device."""
        return torch.empty(size, dtype=torch.uint8, device=self.place)

    def pin(self, memory: memoryview) -> bool:
        """See Device. In place: torch's own pinned memory would be rounded up to a power of two."""
        cudart = torch.cuda.cudart()
        refused = int(cudart.cudaHostRegister(_address(memory), len(memory), _PORTABLE))
        if refused:
            _forget_error(self.place)
        return not refused

    def unpin(self, memory: memoryview) -> None:
        """See Device."""
        torch.cuda.cudart().cudaHostUnregister(_address(memory))

    def copy(self, pairs: Sequence[tuple[memoryview, torch.Tensor]], after: Event | None) -> Event:
        """See Device. In one stream, so that even all copies are in the order of the calls."""
        try:
            with torch.cuda.stream(self._copies):
                if after is not None:
                    self._copies.wait_event(_of_cuda(after))
                for source, target in pairs:
                    target.copy_(torch.frombuffer(source, dtype=torch.uint8), non_blocking=True)
                return _CudaEvent(self._copies)
        except BaseException:
            self._copies.synchronize()
            raise

    def await_copies(self, events: Iterable[Event]) -> None:
        """See Device."""
        stream = torch.cuda.current_stream(self.place)
        for event in events:
            stream.wait_event(_of_cuda(event))

    def computed(self) -> Event:
        """See Device."""
        return _CudaEvent(torch.cuda.current_stream(self.place))

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See Device. Into pinned memory of torch's allocator, which keeps such small pieces for the next time."""
        there = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for target, tensor in zip(there, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.place).synchronize()
        return there

    def recorder(self) -> Recorder:
        """See Device."""
        return _CudaRecorder(self.place)

    def free_unused(self) -> None:
        """See Device."""
        torch.cuda.empty_cache()

    def cap(self, size: int) -> None:
        """See Device. torch's allocator refuses what would exceed it."""
        self.free_unused()
        torch.cuda.reset_peak_memory_stats(self.place)
        total = torch.cuda.mem_get_info(self.place)[1]
        torch.cuda.set_per_process_memory_fraction(min(size / total, 1.0), self.place)

    def driver_bytes(self) -> int:
        """See Device: the context, and room for code that is loaded when it is first needed."""
        return self._driver

    def room(self) -> int:
        """See Device. Where the driver does not tell what is the process's own, only what it allocated counts."""
        own = self._own()
        free = int(torch.cuda.mem_get_info(self.place)[0])
        return free + (torch.cuda.memory_reserved(self.place) if own is None else own)

    def peak(self) -> int:
        """See Device. The driver tells what is now; the allocator knows its own most, and the rest never shrinks."""
        own = self._own()
        beside = self._driver if own is None else own - torch.cuda.memory_reserved(self.place)
        return beside + torch.cuda.max_memory_reserved(self.place)

    def _context(self, own: int | None) -> int:
        """Bytes of the device that the process has now beside its allocator's.

        Where the driver does not tell, that is what all processes have, as far as it can be a context.
        """
        reserved = torch.cuda.memory_reserved(self.place)
        if own is not None:
            return own - reserved
        _log.warning(
            "the driver does not say how much of %s this process has (pip install nvidia-ml-py): its own part of the "
            "limit, and every peak, are upper estimates",
            self.place,
        )
        free, total = torch.cuda.mem_get_info(self.place)
        return min(int(total - free) - reserved, _CONTEXT_MOST)

    def _own(self) -> int | None:
        return process_bytes(torch.cuda.get_device_properties(self.place).uuid)


def _of_cuda(event: Event) -> torch.cuda.Event:
    assert isinstance(event, _CudaEvent)
    return event.event


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _forget_error(place: torch.device) -> None:
    """Clears the calling thread's last CUDA error: torch looks at it after every launch, whosever it is."""
    with suppress(RuntimeError):
        torch.zeros(1, device=place)
