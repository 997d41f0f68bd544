"""What NVIDIA's driver says of this process, through NVML: what nvidia-smi shows."""

from __future__ import annotations

import os
from functools import cache
from typing import Any


@cache
def _nvml() -> Any | None:
    """The library, started; None where it, or its Python package, is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # a package or a driver that is not there, or not to be spoken to
        return None
    return pynvml


def process_bytes(uuid: object) -> int | None:
    """Bytes of a GPU's memory that this process has, its context included.

    Args:
        uuid: of the GPU, as torch names it.

    Returns:
        None where the driver does not say: without the package nvidia-ml-py, on Windows, in some containers.
    """
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    own = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    return sum(own) if own and None not in own else None
