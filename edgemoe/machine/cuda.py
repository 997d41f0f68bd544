"""The device that is an NVIDIA GPU: torch's allocator, CUDA's streams, events and page-locked memory."""

from __future__ import annotations

import ctypes
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch

from edgemoe.machine.cuda_driver import CudaDriver
from edgemoe.machine.device import Device, Event
from edgemoe.machine.nvml import process_bytes
from edgemoe.machine.packages import install_line

_CODE_BYTES = 256 << 20
"""Bytes reserved for the code of CUDA's and edgemoe's kernels, which is loaded on first use; an estimate."""

_MAX_CONTEXT = 1 << 30
"""Bytes: upper bound of a context, where the driver does not report the memory of this process alone."""

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context of the process."""

_log = logging.getLogger("edgemoe")


class _CudaEvent(Event):
    """An event recorded after the work of a stream so far; its handle goes with it."""

    def __init__(self, driver: CudaDriver, stream: int, *, awake: bool = False) -> None:
        self._driver, self.handle, self._done = driver, driver.record(stream, awake=awake), False

    def done(self) -> bool:
        """Queries the CUDA event without waiting."""
        self._done = self._done or self._driver.done(self.handle)
        return self._done

    def wait(self) -> None:
        """Blocks the calling thread until the CUDA event is done."""
        self._driver.wait(self.handle)

    def __del__(self) -> None:
        with suppress(Exception):  # half made, or at the program's end
            self._driver.destroy(self.handle)


class CudaDevice(Device):
    """An NVIDIA GPU. Copies run on a stream of their own, compute on the calling thread's current stream.

    Args:
        index: torch's number of the GPU.
    """

    def __init__(self, index: int = 0) -> None:
        self.place = torch.device("cuda", index)
        self._stream, self._captures = torch.cuda.Stream(self.place), torch.cuda.Stream(self.place)
        self._pools = WeakKeyDictionary[object, Any]()
        self._copies, self._calls = self._stream.cuda_stream, CudaDriver(index)
        self.reads_host_memory = self._calls.reads_host_memory()
        # cuDNN makes a new plan for every length of keys: a millisecond or more for each new token.
        torch.backends.cuda.enable_cudnn_sdp(False)
        own = self._own()
        self.counts_own = own is not None
        # Read once, before kernels are loaded, so that every plan of a process uses the same figure.
        self._driver = self._context(own) + _CODE_BYTES

    def allocate(self, size: int) -> torch.Tensor:
        """Allocates uint8 [size] with torch's caching allocator."""
        return torch.empty(size, dtype=torch.uint8, device=self.place)

    def pin(self, memory: memoryview) -> bool:
        """Page-locks memory where it lies: torch's pinned allocator would round its size up to a power of two."""
        cudart = torch.cuda.cudart()
        refused = int(cudart.cudaHostRegister(_address(memory), len(memory), _PORTABLE))
        if refused:
            # Clears the thread's last CUDA error, which torch would otherwise raise after its next launch.
            with suppress(RuntimeError):
                torch.zeros(1, device=self.place)
        return not refused

    def unpin(self, memory: memoryview) -> None:
        """Undoes one cudaHostRegister."""
        torch.cuda.cudart().cudaHostUnregister(_address(memory))

    def copy(self, pairs: Sequence[tuple[memoryview, torch.Tensor]], after: Event | None) -> Event:
        """Enqueues a batch on the one stream of copies, so that all copies run in the order of the calls."""
        calls, stream = self._calls, self._copies
        try:
            if after is not None:
                calls.await_event(stream, _of_cuda(after).handle)
            for source, target in pairs:
                if len(source) != target.nbytes:
                    raise RuntimeError(f"expected {target.nbytes} bytes to copy, got {len(source)}")
                calls.copy(target.data_ptr(), _address(source), len(source), stream)
            return _CudaEvent(calls, stream)
        except BaseException:
            calls.drain(stream)
            raise

    def await_copies(self, events: Iterable[Event]) -> None:
        """Makes the current stream wait for the events."""
        for event in events:
            self._calls.await_event(self._calls.compute_stream(), _of_cuda(event).handle)

    def computed(self) -> Event:
        """Records an event on the current stream."""
        return _CudaEvent(self._calls, self._calls.compute_stream())

    def await_computed(self) -> None:
        """Waits for the current stream without giving up the processor: a new token waits once a layer."""
        self._calls.drain(self._calls.compute_stream())

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocates page-locked memory with torch."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def capture_pieces(
        self, launch: Callable[[Callable[[], None]], None], pool: object | None = None
    ) -> list[Callable[[], None]]:
        """Captures a CUDA graph per piece; other threads may use the device meanwhile."""
        graphs, before = [torch.cuda.CUDAGraph()], torch.cuda.current_stream(self.place)
        of_pool: dict[str, Any] = {}
        if pool is not None:
            of_pool["pool"] = self._pools.setdefault(pool, torch.cuda.graph_pool_handle())

        def cut() -> None:
            graphs[-1].capture_end()
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(capture_error_mode="thread_local", **of_pool)

        launch(lambda: None)
        self._captures.wait_stream(before)
        with torch.cuda.stream(self._captures):
            graphs[0].capture_begin(capture_error_mode="thread_local", **of_pool)
            try:
                launch(cut)
            except BaseException:
                with suppress(RuntimeError):  # the first error says why
                    graphs[-1].capture_end()
                raise
            graphs[-1].capture_end()
        before.wait_stream(self._captures)
        return [graph.replay for graph in graphs]

    @contextmanager
    def without_waits(self) -> Iterator[None]:
        """Makes torch refuse operations that wait. Other threads that use torch are refused them as well."""
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch does not notice every wait, and says so
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies into torch's pinned memory, whose allocator caches such small blocks, and waits once."""
        there = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for target, tensor in zip(there, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)
        self.await_computed()
        return there

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Copies into torch's pinned memory, whose blocks are not used again before the copy has ended."""
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        there.copy_(tensor, non_blocking=True)
        return there, _CudaEvent(self._calls, self._calls.compute_stream(), awake=True)

    def free_unused(self) -> None:
        """Empties the cache of torch's allocator."""
        torch.cuda.empty_cache()

    def cap(self, size: int | None) -> None:
        """Caps torch's allocator, which refuses allocations past the limit."""
        self.free_unused()
        torch.cuda.reset_peak_memory_stats(self.place)
        total = torch.cuda.mem_get_info(self.place)[1]
        fraction = 1.0 if size is None else min(size / total, 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, self.place)

    def driver_bytes(self) -> int:
        """Bytes of the context and of the code that is loaded on first use."""
        return self._driver

    def available_bytes(self) -> int:
        """Free bytes plus this process's own; only its allocations where the driver does not report its own."""
        own = self._own()
        free = int(torch.cuda.mem_get_info(self.place)[0])
        return free + (torch.cuda.memory_reserved(self.place) if own is None else own)

    def peak(self) -> int:
        """The allocator's peak plus the driver's present count of all other memory, which never shrinks."""
        own = self._own()
        others = self._driver if own is None else own - torch.cuda.memory_reserved(self.place)
        return others + torch.cuda.max_memory_reserved(self.place)

    def _context(self, own: int | None) -> int:
        """Bytes of the device that the process occupies now besides its allocator's.

        Where the driver does not report them, this is the memory of all processes, up to _MAX_CONTEXT.
        """
        reserved = torch.cuda.memory_reserved(self.place)
        if own is not None:
            return own - reserved
        _log.warning(
            "the driver does not say how much of %s this process has (%s installs what reads it): its own part "
            "of the limit, and every peak, are upper estimates",
            self.place,
            install_line("nvidia-ml-py"),
        )
        free, total = torch.cuda.mem_get_info(self.place)
        return min(int(total - free) - reserved, _MAX_CONTEXT)

    def _own(self) -> int | None:
        return process_bytes(torch.cuda.get_device_properties(self.place).uuid)


def _of_cuda(event: Event) -> _CudaEvent:
    assert isinstance(event, _CudaEvent)
    return event


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
