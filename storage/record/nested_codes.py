"""Codes chosen with error feedback, so that their prefixes of 2, 4 and 8 bits all give good products.

Rounding to nearest makes each weight's error as small as possible. What counts is the error of a matrix's products with
the inputs that it meets. GPTQ (Frantar et al., 2210.17323, section 3) therefore codes the columns of a matrix one after
another, and takes each column's error back in the columns to come, by the inverse of the inputs' Hessian. Here one code
serves three levels, so there is one feedback per level: each level has a copy of the weights that it still has to
reproduce, and a column's top four bits have the least weighted sum of the three levels' squared distances.
The lower four bits then round what level 8 has left.

The group parameters, and so the record's format, are as in rounding to nearest (`planes.quantize`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from edgemoe.storage.record.encode import Quantized
from edgemoe.storage.record.offsets import MatrixSpec
from edgemoe.storage.record.planes import REST, quantize

DAMPING = 0.05
"""Part of the Hessian's mean diagonal that is added to its diagonal."""

_BLOCK = 64
"""Columns whose errors reach the later columns in one product (GPTQ's lazy batches)."""

_NIBBLES = torch.arange(16.0).unsqueeze(1)
_MIDDLE = {4: 16 * _NIBBLES + 7.5, 2: 64 * (_NIBBLES // 4) + 31.5}
"""Level -> value of each of the 16 upper halves of a code at that level, in steps, [16, 1]."""

_PLACES = torch.arange(16, dtype=torch.int32).unsqueeze(1)

Importance = Mapping[int, float]
"""Level -> weight of its squared distances: 2 and 4, and 8 where the record has it; or one level alone, 4, 5 or 6."""


class ColumnOrder:
    """The order in which the columns of a matrix are coded, and how far each one's error reaches into the later ones.

    Matrices with the same inputs share it.

    Args:
        hessian: float32 [K, K], sums of products of the inputs; symmetric.
        padded: number of columns with padding, whose inputs are 0; at least K.

    Attributes:
        columns: int64 [padded], by falling diagonal of the Hessian.
        upper: float32 [padded, padded], the upper Cholesky factor of the damped Hessian's inverse, in that order.
    """

    def __init__(self, hessian: torch.Tensor, padded: int) -> None:
        added = padded - len(hessian)
        hessian = F.pad(hessian, (0, added, 0, added))
        diagonal = hessian.diagonal()
        self.columns = torch.argsort(diagonal, descending=True, stable=True)
        damped = hessian[self.columns][:, self.columns]
        # A Hessian of no tokens becomes the identity: rounding to nearest for each level.
        mean = diagonal.mean()
        damped.diagonal().add_(DAMPING * mean if mean > 0 else 1.0)
        # With J the reversal of an order and J H J = L L': H^-1 = U' U for U = J L^-1 J, half the work of inverting H.
        lower = torch.linalg.cholesky(damped.flip(0, 1))
        inverse = torch.linalg.solve_triangular(lower, torch.eye(padded), upper=False)
        self.upper: torch.Tensor = inverse.flip(0, 1).contiguous()


@dataclass(frozen=True)
class Block:
    """A matrix while its columns are coded, each a row [rows] of its tensors.

    Args:
        remainder: float32 [levels, K, rows], the part of the weights that each level still has to reproduce.
        upper: float32 [K, K], reach of the errors.
        steps, centres: float32 [K, rows], values of each column's group.
        levels: ascending.
        importance: weights of the levels.
        bits: the number of bits of a code at a level above 4.
    """

    remainder: torch.Tensor
    upper: torch.Tensor
    steps: torch.Tensor
    centres: torch.Tensor
    levels: list[int]
    importance: Importance
    bits: int

    @property
    def unit(self) -> int:
        """Steps from a code to the next at a level above 4."""
        return 1 << (8 - self.bits)

    @property
    def rest(self) -> float:
        """The value of a code's lower 8 - bits bits at a level above 4, in steps."""
        return float(REST[self.bits]) if self.levels[-1] == 8 else (self.unit - 1) / 2


Columns = Callable[[Block, int, int, torch.Tensor], torch.Tensor]
"""Codes the columns [start, end) of a block, as `plain_columns` does, and with its bits."""


def plain_columns(block: Block, start: int, end: int, codes: torch.Tensor) -> torch.Tensor:
    """Codes some columns; their part of block.remainder is overwritten.

    Args:
        block: the matrix.
        start, end: columns [start, end).
        codes: uint8 [K, rows], whose rows [start, end) are written.

    Returns:
        errors, float32 [levels, end - start, rows].
    """
    left, upper = block.remainder, block.upper
    errors = torch.empty(len(left), end - start, left.shape[2])
    for j in range(start, end):
        column, values = _code(block, left[:, j], block.steps[j], block.centres[j])
        codes[j] = column
        error = torch.sub(left[:, j], values, out=errors[:, j - start]).div_(upper[j, j])
        reach = upper[j, j + 1 : end].view(1, -1, 1)
        left[:, j + 1 : end].addcmul_(reach, error.unsqueeze(1), value=-1)
    return errors


def nested_codes(
    weight: torch.Tensor,
    order: ColumnOrder,
    spec: MatrixSpec,
    importance: Importance,
    bits: int = 8,
    columns: Columns = plain_columns,
) -> Quantized:
    """Quantizes a matrix with error feedback.

    Args:
        weight: floating point [rows, cols] of the spec; finite.
        order: made from the Hessian of its inputs.
        spec: padded shape and groups.
        importance: weights of the levels.
        bits: the number of bits of a code where `importance` has a level above 4, one of offsets.BITS.
        columns: codes columns.

    Returns:
        codes and parameters, as `encode.quantize_matrix`. Without a level above 4 the lower four bits of the codes are
        0, and at level 5 or 6 the lower 8 - bits bits do not count.
    """
    padding = (0, spec.padded_cols - spec.cols, 0, spec.padded_rows - spec.rows)
    padded = F.pad(weight.float(), padding)
    codes, parameters = quantize(padded, spec.group)
    scale, centre = parameters.float().unbind(-1)  # [groups, rows]
    steps = (scale / 16).clamp_min(torch.finfo(torch.float32).tiny)
    levels, group = sorted(importance), order.columns // spec.group
    left = padded[:, order.columns].t().expand(len(levels), -1, -1).contiguous()
    block = Block(left, order.upper, steps[group], centre[group], levels, importance, bits)
    codes[:, order.columns] = _coded(block, columns).t()
    return codes, parameters


def row_codes(
    weight: torch.Tensor, scales: torch.Tensor, order: ColumnOrder, columns: Columns = plain_columns
) -> torch.Tensor:
    """Codes of 8 bits with error feedback, for a matrix with one scale per row and none per group.

    Args:
        weight: floating point [N, K]; finite.
        scales: bf16 [N], at least the row's largest weight / 127.
        order: made from the Hessian of its inputs, without padding.
        columns: codes columns.

    Returns:
        int8 [N, K], -127 .. 127: a weight is a code times the row's scale.
    """
    padded = F.pad(weight.float(), (0, 0, 0, -len(weight) % 8))
    step = F.pad(scales.float(), (0, -len(weight) % 8)).clamp_min(torch.finfo(torch.float32).tiny)
    steps = step.expand(weight.shape[1], -1).contiguous()
    left = padded[:, order.columns].t().contiguous().unsqueeze(0)
    # The middle of a group's codes is 135.5, and of a row's 128.
    block = Block(left, order.upper, steps, 7.5 * steps, [8], {8: 1.0}, 8)
    made = _coded(block, columns).t()[: len(weight)].int().sub_(128).clamp_(min=-127)
    codes = torch.empty(weight.shape, dtype=torch.int8)
    codes[:, order.columns] = made.to(torch.int8)
    return codes


def _coded(block: Block, columns: Columns) -> torch.Tensor:
    """Codes every column: uint8 [K, rows]."""
    left, upper = block.remainder, block.upper
    count, width, rows = left.shape
    made = torch.empty(width, rows, dtype=torch.uint8)
    for start in range(0, width, _BLOCK):
        end = min(start + _BLOCK, width)
        errors = columns(block, start, end, made)
        later = upper[start:end, end:].t().expand(count, -1, -1)
        left[:, end:].baddbmm_(later, errors, alpha=-1)
    return made


def _least(cost: torch.Tensor) -> torch.Tensor:
    """The place of the least of 16 costs, int32 [rows], of float32 [16, rows] without a negative one, overwritten.

    The place takes the last four bits of a cost, whose order as an integer is the number's: a minimum over
    integers takes a tenth of the time of torch's argmin.
    """
    return cost.view(torch.int32).bitwise_and_(-16).bitwise_or_(_PLACES).amin(0).bitwise_and_(15)


def _code(
    block: Block, targets: torch.Tensor, step: torch.Tensor, centre: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes one column.

    Args:
        block: the matrix.
        targets: float32 [levels, rows].
        step, centre: float32 [rows].

    Returns:
        uint8 [rows], and the value of each level, float32 [levels, rows].
    """
    wanted = (targets - centre) / step + 135.5
    cost: torch.Tensor | None = None
    for level, target in zip(block.levels, wanted, strict=True):
        off = target - _MIDDLE[min(level, 4)]
        if level > 4:  # it reaches every value of the sixteen that share the upper bits
            off.abs_().sub_(7.5).clamp_min_(0)
        part = off.square_().mul_(block.importance[level])
        cost = part if cost is None else cost.add_(part)
    assert cost is not None
    top = _least(cost).float()
    low = torch.zeros_like(top)
    values = []
    for level, target in zip(block.levels, wanted, strict=True):
        if level > 4:
            low = (target - 16 * top - block.rest).div_(block.unit).round_()
            low = low.clamp_(0, 16 // block.unit - 1).mul_(block.unit).add_(block.rest)
            values.append(16 * top + low)
        else:
            values.append(16 * top + 7.5 if level == 4 else 64 * (top // 4) + 31.5)
    code = (16 * top + low).to(torch.uint8)
    return code, (torch.stack(values) - 135.5) * step + centre
