"""Routers of a few rows: the product, and the choice of the top k by scores. Two launches that a graph can hold.

kernels.native.router.RouterForm describes the choice and the gate weights. Values are rounded where transformers'
routers round them. Experts come in the order of their choice, of equal ones the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from edgemoe.kernels.native.router import RouterForm
from edgemoe.kernels.triton.products import OPTIONS

_ROWS, _COLS = 2, 1024
"""Rows of the weight per program of the product, and columns that it loads at a time."""

_LEAST_SUM = 1e-20
"""Added to the sum that gate weights are divided by."""


@dataclass(frozen=True)
class ChoiceForm:
    """The compile-time constants of a choice, named as in RouterForm.

    Args:
        experts: experts of a layer; `padded` to a power of two.
        k: experts of a token; `slots` is k, padded to a power of two.
    """

    experts: int
    padded: int
    k: int
    slots: int
    normalise: bool
    rounded: bool
    sigmoid: bool
    rounded_scores: bool
    raw_choice: bool
    groups: int
    best_groups: int
    group_best: int
    scale: float
    least: float


class TritonRouter:
    """Chooses the experts of a few rows.

    Args:
        weight: bf16 or float32 [E, H], contiguous, on the device.
        top_k: experts of a token.
        form: how they are chosen; one that `fits`, on the device.
    """

    def __init__(self, weight: torch.Tensor, top_k: int, form: RouterForm) -> None:
        self._weight, self._form = weight, form
        count = len(weight)
        self._constants = ChoiceForm(
            *(count, triton.next_power_of_2(count), top_k, triton.next_power_of_2(top_k)),
            *(form.normalise, form.rounded, form.sigmoid, form.rounded_scores, form.raw_choice),
            *(form.groups, form.best_groups, form.group_best, float(form.scale)),
            _LEAST_SUM if form.normalise else 0.0,
        )

    @staticmethod
    def fits(experts: int, form: RouterForm) -> bool:
        """Whether the kernel computes a form: not a mixture of two, and groups only of powers of two."""
        whole = experts == triton.next_power_of_2(experts) and form.groups == triton.next_power_of_2(
            form.groups
        )
        return bool(form.precise and not form.mixing and (whole or form.groups == 1))

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Chooses the experts of each row of x, bf16 [R, H], contiguous, R at least 1.

        Returns:
            logits, float32 [R, E]; gate weights, float32 [R, k], or bf16 where they are rounded; experts, int64 [R, k].
        """
        form, constants = self._form, self._constants
        rows, cols = x.shape
        logits = x.new_empty(rows, constants.experts, dtype=torch.float32)
        norm = form.norm
        score[(triton.cdiv(constants.experts, _ROWS), rows)](
            *(x, self._weight, form.product_bias, norm and norm.scale, logits),
            *(constants.experts, cols, norm.epsilon if norm else 0.0, norm.factor if norm else 1.0),
            *(form.rounded_product, _ROWS, _COLS),
            **OPTIONS,
        )
        dtype = torch.bfloat16 if form.rounded else torch.float32
        gates = x.new_empty(rows, constants.k, dtype=dtype)
        experts = x.new_empty(rows, constants.k, dtype=torch.int64)
        arguments = logits, form.bias, form.expert_scale, gates, experts, constants
        choose_scored[(rows,)](*arguments, num_warps=1, **OPTIONS)
        return logits, gates, experts


@triton.jit
def score(
    x,
    weight,
    bias,
    scale,
    logits,
    count,
    cols,
    epsilon,
    factor,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Some logits of one row; with a `scale` the row is normalised first (kernels.native.router.OwnNorm)."""
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = number < count
    x += tl.program_id(1).to(tl.int64) * cols
    by = 1.0
    if scale is not None:
        by = _norm_factor(x, cols, epsilon, COLS)
    first = weight + number.to(tl.int64)[:, None] * cols
    sums = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, cols, COLS):
        column = start + tl.arange(0, COLS)
        valid = column < cols
        weights = tl.load(first + column[None, :], mask=inside[:, None] & valid[None, :], other=0).to(
            tl.float32
        )
        numbers = tl.load(x + column, mask=valid, other=0).to(tl.float32)
        if scale is not None:
            numbers = _scaled(numbers * by, tl.load(scale + column, mask=valid, other=0), factor)
        sums += weights * numbers[None, :]
    total = tl.sum(sums, 1)
    if bias is not None:
        total += tl.load(bias + number, mask=inside, other=0).to(tl.float32)
    if ROUNDED:
        total = total.to(tl.bfloat16).to(tl.float32)
    tl.store(logits + tl.program_id(1).to(tl.int64) * count + number, total, mask=inside)


@triton.jit
def _scaled(numbers, scale, factor):
    """Normalised numbers times scale and factor; each product is rounded to bf16."""
    numbers = numbers.to(tl.bfloat16).to(tl.float32) * scale.to(tl.float32)
    return (numbers.to(tl.bfloat16).to(tl.float32) * factor).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _norm_factor(x, cols, epsilon, COLS: tl.constexpr):
    """1 / sqrt(mean(x^2) + epsilon) of a row."""
    squares = tl.zeros((COLS,), tl.float32)
    for start in range(0, cols, COLS):
        column = start + tl.arange(0, COLS)
        numbers = tl.load(x + column, mask=column < cols, other=0).to(tl.float32)
        squares += numbers * numbers
    return tl.rsqrt(tl.sum(squares, 0) / cols + epsilon)


@triton.jit
def choose_scored(logits, bias, expert_scale, gates, experts, F: tl.constexpr):
    """A program chooses the experts of one row: see TritonRouter."""
    K: tl.constexpr = F.k
    SLOTS: tl.constexpr = F.slots  # before Triton 3.8 a shape takes no fields of F
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, F.padded), tl.arange(0, F.slots)
    inside = expert < F.experts
    own = tl.load(logits + row * F.experts + expert, mask=inside, other=float("-inf"))
    scores = _scores(own, inside, F)
    left = scores
    if F.raw_choice:
        left = own
    if bias is not None:
        left += tl.load(bias + expert, mask=inside, other=0)
    # NaN counts as the least number, and experts beyond the last one are below it.
    left = tl.where(inside & (left == left), tl.maximum(left, -3e38), tl.where(inside, -3e38, float("-inf")))
    if F.groups > 1:
        left = _in_best_groups(left, F)
    number, weight = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.float32)
    for place in tl.static_range(K):
        best = tl.max(left, 0)
        index = tl.minimum(tl.min(tl.where(left == best, expert, F.padded), 0), F.experts - 1)
        number = tl.where(slot == place, index, number)
        weight = tl.where(slot == place, tl.sum(tl.where(expert == index, scores, 0.0), 0), weight)
        left = tl.where(expert == index, float("-inf"), left)
    weight = _weights(weight, F)
    if expert_scale is not None:
        weight *= tl.load(expert_scale + number)
    at = row * F.k + slot
    tl.store(experts + at, number.to(tl.int64), mask=slot < F.k)
    tl.store(gates + at, weight.to(gates.dtype.element_ty), mask=slot < F.k)


@triton.jit
def _scores(own, inside, F: tl.constexpr):
    """Sigmoids of logits, or parts of their softmax."""
    if F.sigmoid:
        scores = tl.sigmoid(own)
    else:
        parts = tl.where(inside, tl.exp(own - tl.max(own, 0)), 0.0)
        scores = parts / tl.sum(parts, 0)
    if F.rounded_scores:
        scores = scores.to(tl.bfloat16).to(tl.float32)
    return scores


@triton.jit
def _in_best_groups(choice, F: tl.constexpr):
    """Makes the numbers of experts outside the best groups so small that they come last."""
    PADDED: tl.constexpr = F.padded
    GROUPS: tl.constexpr = F.groups
    SIZE: tl.constexpr = F.padded // F.groups
    table = tl.reshape(choice, (GROUPS, SIZE))
    column = tl.arange(0, SIZE)[None, :]
    ranks = tl.max(table, 1)
    if F.group_best == 2:
        first = tl.min(tl.where(table == ranks[:, None], column, SIZE), 1)
        ranks += tl.max(tl.where(column == first[:, None], float("-inf"), table), 1)
    group = tl.arange(0, F.groups)
    position = tl.arange(0, F.groups)
    others = tl.sum(tl.where(group[:, None] == position[None, :], ranks[:, None], 0.0), 0)
    before = (others[None, :] == ranks[:, None]) & (position[None, :] < group[:, None])
    better = tl.sum(((others[None, :] > ranks[:, None]) | before).to(tl.int32), 1)
    return tl.reshape(tl.where(better[:, None] < F.best_groups, table, float("-inf")), (PADDED,))


@triton.jit
def _weights(weight, F: tl.constexpr):
    """Gate weights of the scores of a row's experts, 0 beyond the last one."""
    if F.normalise:
        total = tl.sum(weight, 0)
        if F.rounded_scores:
            total = total.to(tl.bfloat16).to(tl.float32)
        total += F.least
        if F.rounded_scores:
            total = total.to(tl.bfloat16).to(tl.float32)
        weight = weight / total
    if F.rounded:
        weight = weight.to(tl.bfloat16).to(tl.float32)
    weight *= F.scale
    if F.rounded_scores:
        weight = weight.to(tl.bfloat16).to(tl.float32)
    return weight
