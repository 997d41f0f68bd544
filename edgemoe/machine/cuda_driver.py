"""CUDA's driver, called directly: copies and events in some microseconds each, of which torch's wrappers take twenty.

A new token under a limit makes hundreds of these calls. Streams and the memory are torch's; the context is the one that
torch uses. Every function may be called by any thread.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch

_NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""

_UNTIMED = 2
"""CU_EVENT_DISABLE_TIMING."""

_BLOCKING = 1 | _UNTIMED
"""CU_EVENT_BLOCKING_SYNC and CU_EVENT_DISABLE_TIMING: a thread that waits for an event sleeps."""

_HOST_ADDRESSES = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""

_P = ctypes.c_void_p

_SIGNATURES: dict[str, list[Any]] = {
    "cuCtxSetCurrent": [_P],
    "cuDeviceGetAttribute": [ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_P), ctypes.c_int],
    "cuEventCreate": [ctypes.POINTER(_P), ctypes.c_uint],
    "cuEventDestroy_v2": [_P],
    "cuEventQuery": [_P],
    "cuEventRecord": [_P, _P],
    "cuEventSynchronize": [_P],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuMemcpyHtoDAsync_v2": [ctypes.c_uint64, _P, ctypes.c_size_t, _P],
    "cuStreamSynchronize": [_P],
    "cuStreamWaitEvent": [_P, _P, ctypes.c_uint],
}


@cache
def _library() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    return library


class CudaDriver:
    """The calls for one GPU. Streams and events are their handles.

    Args:
        index: torch's number of the GPU.

    Raises:
        RuntimeError: naming the call that failed and the driver's error, as every method.
    """

    def __init__(self, index: int) -> None:
        self._index, self._cuda, self._threads = index, _library(), threading.local()
        context = _P()
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
        self._context = context

    def reads_host_memory(self) -> bool:
        """Whether kernels read registered host memory at the address that the host has for it."""
        found = ctypes.c_int()
        self._check("cuDeviceGetAttribute", ctypes.byref(found), _HOST_ADDRESSES, self._index)
        return bool(found.value)

    def compute_stream(self) -> int:
        """The calling thread's current stream of torch."""
        stream: int = torch._C._cuda_getCurrentRawStream(self._index)
        return stream

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Enqueues a copy from host memory, page-locked or not, into the GPU's: addresses, and bytes."""
        self._call("cuMemcpyHtoDAsync_v2", target, source, size, stream)

    def record(self, stream: int, *, awake: bool = False) -> int:
        """Makes an event after the work of a stream so far; the caller destroys it.

        Args:
            stream: the stream.
            awake: whether a thread that waits for the event uses its processor meanwhile.
        """
        event = _P()
        self._call("cuEventCreate", ctypes.byref(event), _UNTIMED if awake else _BLOCKING)
        assert event.value
        self._call("cuEventRecord", event, stream)
        return event.value

    def destroy(self, event: int) -> None:
        """Frees an event; work that waits for it goes on waiting."""
        self._call("cuEventDestroy_v2", event)

    def done(self, event: int) -> bool:
        """Whether all work before an event has ended."""
        self._enter()
        result = self._cuda.cuEventQuery(event)
        if result not in (0, _NOT_READY):
            raise self._failure("cuEventQuery", result)
        return bool(result == 0)

    def wait(self, event: int) -> None:
        """Blocks the calling thread, asleep unless the event is for one awake, until all work before it has ended."""
        self._call("cuEventSynchronize", event)

    def await_event(self, stream: int, event: int) -> None:
        """Makes the later work of a stream wait for an event."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def drain(self, stream: int) -> None:
        """Blocks the calling thread, awake, until all work of a stream has ended."""
        self._call("cuStreamSynchronize", stream)

    def _call(self, name: str, *arguments: Any) -> None:
        self._enter()
        self._check(name, *arguments)

    def _enter(self) -> None:
        """Makes torch's context the calling thread's, which a thread without any call of torch's does not have."""
        if not hasattr(self._threads, "entered"):
            self._check("cuCtxSetCurrent", self._context)
            self._threads.entered = True

    def _check(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result:
            raise self._failure(name, result)

    def _failure(self, name: str, result: int) -> RuntimeError:
        error = ctypes.c_char_p()
        self._cuda.cuGetErrorName(result, ctypes.byref(error))
        return RuntimeError(f"CUDA's driver refused {name}: {(error.value or b'').decode()} ({result})")
