"""Features of this machine's CPU."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch


def fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware; elsewhere float32 is several times faster."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@cache
def identity() -> dict[str, str]:
    """The processor's name, and its features in one string; both empty where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    values = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))
    }
    name = values.get("model name") or platform.processor()
    return {"cpu": name, "features": values.get("flags") or values.get("Features") or ""}
