"""Experts on a CPU by torch's operators, from the p4 and p0 blocks of storage.record.forms.MergedForm.

torch's 4-bit kernel multiplies few tokens with the resident nibbles. For many tokens it is faster to dequantize the
weights once into a scratch matrix and to multiply plain matrices. The number of tokens alone chooses between the two,
so an answer does not depend on memory limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import Part, Rows
from edgemoe.machine.cpu import fast_bf16
from edgemoe.storage.compensators.low_rank import corrections
from edgemoe.storage.record.forms import P0, P4
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import truncate_to_base

DEQUANTIZE_FROM = {8: 40, 4: 80, 2: 80}
"""level -> tokens at one expert from which dequantizing pays (docs/decisions/0003)."""

_PAD_TOKENS = 32
"""Tokens of a plain product are padded to a multiple of this: each other shape costs a compilation."""

_CENTRE_CODE = {8: 135.5 / 16, 4: 8.0, 2: 7.5}
"""level -> the code, in units of 16, of a group's centre (storage.record.planes)."""

_P0_OF_SCALE = torch.tensor([1 / 16, 1 / 32], dtype=torch.bfloat16)
"""Factors from 16 s to the parameters (s, s / 2) of p0."""


class CpuExpertKernel:
    """Implements ExpertKernel for merged nibbles. Not thread-safe: it has scratch memory of scratch_bytes.

    Args:
        geometry: the geometry of the store.
        layout: the layout of resident nibbles; torch's layout on this machine.
    """

    def __init__(self, geometry: RecordGeometry, layout: Layout) -> None:
        self._geometry, self._layout = geometry, layout
        self._product_dtype = torch.bfloat16 if fast_bf16() else torch.float32
        widest = max(spec.padded_rows * spec.padded_cols for spec in geometry.matrices)
        parameters = max(spec.parameter_bytes for spec in geometry.matrices)
        self._weights = torch.empty(widest)
        self._parameters = torch.empty(parameters // 2, dtype=torch.bfloat16)
        self._nibbles = np.empty(geometry.codes_bytes, np.uint8)

    @staticmethod
    def scratch_bytes(geometry: RecordGeometry) -> int:
        """Returns the bytes of scratch that one kernel has."""
        widest = max(spec.padded_rows * spec.padded_cols for spec in geometry.matrices)
        parameters = max(spec.parameter_bytes for spec in geometry.matrices)
        return widest * (6 if fast_bf16() else 4) + parameters + geometry.codes_bytes

    def forward(self, x: Rows, parts: Sequence[Part], activation: Activation, out: torch.Tensor) -> None:
        """Implements ExpertKernel.forward: each expert alone, the activation for all rows at once."""
        sizes = [part.rows for part in parts]
        own = x.gathered(len(out)).split(sizes)
        up = [self._part(rows, part, 0) for rows, part in zip(own, parts, strict=True)]
        inner = activation.apply(torch.cat(up))
        for rows, part, result in zip(inner.split(sizes), parts, out.split(sizes), strict=True):
            result.copy_(self._part(rows, part, 1))

    def _part(self, x: torch.Tensor, part: Part, matrix: int) -> torch.Tensor:
        """Multiplies an expert's rows with its gate_up (0) or down (1) matrix."""
        spec, parameters_at, codes_at = self._geometry.matrix_offsets()[matrix]
        level, p4 = min(part.level, spec.limit), part.blocks[P4]
        parameters, codes = p4[: self._geometry.parameter_bytes], p4[self._geometry.parameter_bytes :]
        if level == 2 and part.resident > 2:
            truncate_to_base(np.frombuffer(codes, np.uint8), self._nibbles)
            codes = self._nibbles.data

        def nibbles(block: memoryview, at: int) -> torch.Tensor:
            flat = torch.frombuffer(block, dtype=torch.uint8, count=spec.nibble_bytes, offset=at)
            return flat.view(spec.padded_rows, spec.padded_cols // 2)

        pair = torch.frombuffer(
            parameters, dtype=torch.bfloat16, count=spec.parameter_bytes // 2, offset=parameters_at
        ).view(-1, spec.padded_rows, 2)
        low = nibbles(part.blocks[P0], self._geometry.low_offsets()[matrix]) if level == 8 else None
        y = self._product(x, _Matrix(spec, level, pair, nibbles(codes, codes_at), low))
        if part.compensator:
            # Decoded in every call, which costs about what a call of one expert does.
            found = corrections(part.compensator.raw, part.compensator.geometry)[spec.name]
            first = slice(part.compensated)
            y[first] = (y[first].float() + found.apply(x[first].float())).to(torch.bfloat16)
        return y

    def _product(self, x: torch.Tensor, matrix: _Matrix) -> torch.Tensor:
        """Multiplies bf16 [T, K] with a quantized matrix to bf16 [T, N]."""
        spec = matrix.spec
        if spec.padded_cols != spec.cols:
            x = torch.nn.functional.pad(x, (0, spec.padded_cols - spec.cols))
        few = x.shape[0] < DEQUANTIZE_FROM[matrix.level]
        y = self._int4_product(x.contiguous(), matrix) if few else self._dequantized_product(x, matrix)
        return y if spec.padded_rows == spec.rows else y[:, : spec.rows]

    def _int4_product(self, x: torch.Tensor, matrix: _Matrix) -> torch.Tensor:
        int4mm: Callable[..., torch.Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu
        pair, group = matrix.pair, matrix.spec.group
        if matrix.level == 4:
            return int4mm(x, matrix.high, group, pair)
        other = self._parameters[: pair.numel()].view(pair.shape)
        if matrix.low is None:
            scale = pair[..., 0]
            other[..., 0] = scale
            torch.add(pair[..., 1], scale, alpha=0.5, out=other[..., 1])
            return int4mm(x, matrix.high, group, other)
        torch.mul(pair[..., :1], _P0_OF_SCALE, out=other)
        return int4mm(x, matrix.high, group, pair).add_(int4mm(x, matrix.low, group, other))

    def _dequantized_product(self, x: torch.Tensor, matrix: _Matrix) -> torch.Tensor:
        """Multiplies with the dequantized [K, N] matrix; products accumulate in float32."""
        transposed = self._dequantized(matrix)
        tokens = x.shape[0]
        x = torch.nn.functional.pad(x, (0, 0, 0, -tokens % _PAD_TOKENS)).to(self._product_dtype)
        return (x @ transposed)[:tokens].to(torch.bfloat16)

    def _dequantized(self, matrix: _Matrix) -> torch.Tensor:
        """Dequantizes a matrix to [padded_cols, padded_rows] in scratch memory, valid until the next call."""
        spec, pair = matrix.spec, matrix.pair
        rows, cols = spec.padded_rows, spec.padded_cols
        weights = self._weights[: rows * cols].view(cols, rows).zero_()
        if matrix.low is not None:
            self._layout.add_to(matrix.low.view(-1), weights)
            weights.mul_(1 / 16)
        self._layout.add_to(matrix.high.view(-1), weights)
        scale, centre = pair[..., 0].float(), pair[..., 1].float()
        centre.sub_(scale, alpha=_CENTRE_CODE[matrix.level])
        grouped = weights.view(cols // spec.group, spec.group, rows)
        torch.addcmul(centre.unsqueeze(1), grouped, scale.unsqueeze(1), out=grouped)
        return weights.to(self._product_dtype)


@dataclass(frozen=True)
class _Matrix:
    """Views of one quantized matrix in an expert's blocks.

    Args:
        spec: shape, padding and group.
        level: the level to compute at.
        pair: bf16 [groups, padded_rows, 2], 16 scale and centre.
        high: uint8 [padded_rows, padded_cols / 2], nibbles code >> 4 in kernel order.
        low: uint8 [padded_rows, padded_cols / 2], nibbles code & 15; None below level 8.
    """

    spec: MatrixSpec
    level: int
    pair: torch.Tensor
    high: torch.Tensor
    low: torch.Tensor | None
