"""Features of this machine's CPU."""

from __future__ import annotations

import torch


def fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware; elsewhere float32 is several times faster."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
