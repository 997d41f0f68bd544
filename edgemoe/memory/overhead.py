"""Memory that a model takes next to its tensors and experts: allocators, the interpreter, buffers between tiers."""

from __future__ import annotations

from edgemoe.memory.model_shape import PlannedModel
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.transitions import IN_FLIGHT

ROUNDING_BYTES = 1 << 26
"""Most bytes that a device's allocator loses to rounding and fragmentation."""

CAPTURE_BYTES = 1 << 26
"""Most bytes of a token's activations in captured launches, and of cuBLAS for one more stream: 32 MiB; an estimate."""

EXPERT_BYTES = 2048
"""Most bytes that the interpreter takes for an expert that is in memory or was: its key, version, blocks, scores and
table, 1,200 by tracemalloc; and what allocators round up. In RAM they count against the limit. A compensator takes at
most as many."""

PROCESS_BYTES = 500_000_000
"""Most bytes that the interpreter, torch and transformers take, outside every limit."""

_SPARE = 0.1
"""Fraction of free memory left out of suggested limits: other programs take memory before edgemoe starts."""


def suggested_limits(ram: int, vram: int | None) -> tuple[int, int | None]:
    """Suggests (--vram-limit, --dram-limit) in bytes; no DRAM tier without a GPU.

    Args:
        ram: bytes free.
        vram: bytes free on a GPU; None without one.
    """
    in_ram = max(int(ram * (1 - _SPARE)) - PROCESS_BYTES, 0)
    return (in_ram, None) if vram is None else (int(vram * (1 - _SPARE)), in_ram)


def overhead_bytes(model: PlannedModel) -> int:
    """Bytes within a limit that allocators and the interpreter take."""
    return ROUNDING_BYTES + captured_bytes(model) if model.device else EXPERT_BYTES * model.shape.experts


def captured_bytes(model: PlannedModel) -> int:
    """Bytes in a device's memory of launches that are captured of transformers' modules for one token.

    Families with kernels of their own take less, which a plan does not tell apart.
    """
    linear = model.shape.kv.linear
    return CAPTURE_BYTES + (linear.bytes if linear else 0)


def staging_buffers(settings: RunSettings) -> int:
    """Pinned buffers of one expert each: every reader fills one while another is copied to the device.

    Threads that read experts in the background, for precision by hotness, have buffers in addition.
    """
    return 2 * (settings.readers + (IN_FLIGHT if settings.hotness else 0))
