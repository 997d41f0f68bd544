"""The convolution of one token's channels over their last inputs, inside of a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolve(new, weights, bias, before, after, channel, inside, stored, TAPS: tl.constexpr):
    """The sums of channels, float32, with the bias where there is one.

    Args:
        new: bf16, the new inputs of the channels.
        weights, before, after: [channels, TAPS], the oldest input's first; before may be None: no token came before.
        channel: numbers of the channels; `inside` says which exist.
        stored: whether this program writes the channels' inputs to `after`.
    """
    first = channel * TAPS
    written = tl.where(stored, inside, False)
    total = new.to(tl.float32) * tl.load(weights + first + TAPS - 1, mask=inside, other=0).to(tl.float32)
    for tap in tl.static_range(1, TAPS):
        earlier = tl.zeros_like(new)
        if before is not None:
            earlier = tl.load(before + first + tap, mask=inside, other=0)
        total += earlier.to(tl.float32) * tl.load(weights + first + tap - 1, mask=inside, other=0).to(
            tl.float32
        )
        tl.store(after + first + tap - 1, earlier, mask=written)
    tl.store(after + first + TAPS - 1, new, mask=written)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0).to(tl.float32)
    return total


@triton.jit
def rounded_silu(total):
    """silu of numbers rounded to bf16, rounded again; float32."""
    rounded = total.to(tl.bfloat16).to(tl.float32)
    return (rounded * tl.sigmoid(rounded)).to(tl.bfloat16).to(tl.float32)
