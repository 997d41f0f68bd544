"""Kernels between a router of torch's operators and a token's experts: the report of a choice, and the sum of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.products import OPTIONS

BLOCK = 1024
"""Numbers of a row that a program of weighted_rows sums."""


def report_choice(
    choice: torch.Tensor, gates: torch.Tensor, predicted: torch.Tensor, report: torch.Tensor
) -> None:
    """Launches the report of a router's choice for one token: the experts in the order of their gate weights.

    Equal gate weights keep the router's order.

    Args:
        choice: int64 [k], the experts, contiguous.
        gates: bf16 or float32 [k], their gate weights, contiguous.
        predicted: int64 [k], the experts predicted for the next layer, the likeliest first, contiguous.
        report: int32 [3 k], as router.choose_experts writes it.
    """
    slots = len(choice)
    report_rows[(1,)](
        *(choice, gates, predicted, report, slots, triton.next_power_of_2(slots)), num_warps=1, **OPTIONS
    )


def weighted_rows(rows: torch.Tensor, gates: torch.Tensor, out: torch.Tensor) -> None:
    """Launches out = the sum of gates[i] rows[i] in float32, in the order of i, rounded once.

    Args:
        rows: bf16 [k, H], contiguous.
        gates: float32 [k]; a row whose gate weight is 0 is not read.
        out: bf16 [H].
    """
    slots, size = rows.shape
    sum_rows[(triton.cdiv(size, BLOCK),)](rows, gates, out, size, slots, BLOCK, **OPTIONS)


@triton.jit
def report_rows(choice, gates, predicted, report, K: tl.constexpr, K_PADDED: tl.constexpr):
    """One program: see report_choice."""
    slot = tl.arange(0, K_PADDED)
    inside = slot < K
    expert = tl.load(choice + slot, mask=inside, other=0).to(tl.int32)
    gate = tl.load(gates + slot, mask=inside, other=0).to(tl.float32)
    place = tl.zeros((K_PADDED,), tl.int32)
    for other in tl.static_range(K):
        weight = tl.load(gates + other).to(tl.float32)
        place += tl.where(weight > gate, 1, tl.where(weight == gate, tl.where(slot > other, 1, 0), 0))
    # With a NaN two slots could get one place and leave another one empty: the router's order has none of that.
    finite = tl.sum(tl.where(inside, tl.where(gate == gate, 0, 1), 0), 0) == 0
    place = tl.where(finite, place, slot)
    tl.store(report + place, expert, mask=inside)
    tl.store(report + K + slot, tl.load(predicted + slot, mask=inside, other=0).to(tl.int32), mask=inside)
    tl.store(report + 2 * K + place, gate.to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def sum_rows(rows, gates, out, size, K: tl.constexpr, BLOCK: tl.constexpr):
    """A program sums BLOCK numbers of every row: see weighted_rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        gate = tl.load(gates + slot)
        row = tl.load(rows + slot * size + at, mask=tl.where(gate != 0, inside, False), other=0)
        total += gate * row.to(tl.float32)
    tl.store(out + at, total.to(tl.bfloat16), mask=inside)
