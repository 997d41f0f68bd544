"""One new token of a gated short convolution between its projection and the product after it, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.convolution import convolve
from edgemoe.kernels.triton.products import OPTIONS

_CHANNELS = 128
"""Channels per program."""


def launch_short_conv(
    projected: torch.Tensor,
    conv: torch.Tensor,
    bias: torch.Tensor | None,
    before: torch.Tensor | None,
    after: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Launches out = c convolution(b x), with b x rounded to bf16, and the convolution's result.

    Args:
        projected: bf16 [3 * channels]: b, c and x.
        conv: bf16 [channels, taps], contiguous, the oldest input's first.
        bias: bf16 [channels], or None.
        before: bf16 [channels, taps], the last inputs before the token; None: the sequence has no token.
        after: bf16 [channels, taps], where the last inputs after it are written, another place than `before`.
        out: bf16 [channels].
    """
    channels, taps = conv.shape
    short_conv[(triton.cdiv(channels, _CHANNELS),)](
        projected, conv, bias, before, after, out, channels, taps, _CHANNELS, num_warps=4, **OPTIONS
    )


@triton.jit
def short_conv(
    projected, conv, bias, before, after, out, channels, TAPS: tl.constexpr, CHANNELS: tl.constexpr
):
    """A program computes some channels: see launch_short_conv."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    x = tl.load(projected + channel, mask=inside, other=0).to(tl.float32)
    x *= tl.load(projected + 2 * channels + channel, mask=inside, other=0).to(tl.float32)
    new = x.to(tl.bfloat16)
    total = convolve(new, conv, bias, before, after, channel, inside, channels > 0, TAPS)
    gate = tl.load(projected + channels + channel, mask=inside, other=0).to(tl.float32)
    result = gate * total.to(tl.bfloat16).to(tl.float32)
    tl.store(out + channel, result.to(tl.bfloat16), mask=inside)
