"""Memory of this process by the count of NVIDIA's driver, through NVML, as nvidia-smi shows it."""

from __future__ import annotations

import os
from functools import cache
from typing import Any


@cache
def _nvml() -> Any | None:
    """The initialised library; None where it, or its Python package, is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # a missing package, or a missing or incompatible driver
        return None
    return pynvml


def process_bytes(uuid: object) -> int | None:
    """Bytes of a GPU's memory that this process occupies, with its context.

    Args:
        uuid: torch's UUID of the GPU.

    Returns:
        None where the driver does not report them: without the package nvidia-ml-py, on Windows, in some containers.
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
