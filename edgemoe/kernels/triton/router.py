"""A softmax router's choice for one new token, by a kernel that a graph can hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.products import OPTIONS


def choose_experts(
    logits: torch.Tensor, report: torch.Tensor, top_k: int, *, normalise: bool, rounded: bool
) -> None:
    """Launches the choice of a softmax router, and the prediction of the next layer's choice.

    Args:
        logits: bf16 [2 E]: of this layer's router, then of the next one's.
        report: int32 [3 k]: the experts chosen, the experts predicted, and the bits of the chosen ones' gate weights,
            float32.
        top_k: experts chosen.
        normalise, rounded: see families.base.Gate.
    """
    experts = len(logits) // 2
    sizes = experts, triton.next_power_of_2(experts), top_k, triton.next_power_of_2(top_k)
    choose[(2,)](logits, report, *sizes, normalise, rounded, num_warps=1, **OPTIONS)


@triton.jit
def choose(
    logits,
    report,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Program 0 chooses, program 1 predicts: see choose_experts. Of equal experts the first is taken."""
    which = tl.program_id(0)
    expert, slot = tl.arange(0, EXPERTS_PADDED), tl.arange(0, K_PADDED)
    inside = expert < EXPERTS
    own = tl.load(logits + which * EXPERTS + expert, mask=inside, other=float("-inf")).to(tl.float32)
    parts = tl.exp(own - tl.max(own, 0))
    left = tl.where(inside, parts / tl.sum(parts, 0), -1.0)
    chosen, gates = tl.zeros((K_PADDED,), tl.int32), tl.zeros((K_PADDED,), tl.float32)
    for place in tl.static_range(K):
        best = tl.max(left, 0)
        # With a NaN no expert is the best: the last one keeps the choice inside the layer.
        index = tl.minimum(tl.min(tl.where(left == best, expert, EXPERTS_PADDED), 0), EXPERTS - 1)
        chosen = tl.where(slot == place, index, chosen)
        gates = tl.where(slot == place, best, gates)
        left = tl.where(expert == index, -1.0, left)
    tl.store(report + which * K + slot, chosen, mask=slot < K)
    if which == 0:
        if NORMALISE:
            gates = gates / tl.sum(gates, 0)
        if ROUNDED:
            gates = gates.to(tl.bfloat16).to(tl.float32)
        tl.store(report + 2 * K + slot, gates.to(tl.int32, bitcast=True), mask=slot < K)
