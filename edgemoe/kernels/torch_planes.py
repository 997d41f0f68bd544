"""Experts by torch's operators alone, from planes in any layout, on any device.

Slow: each call dequantizes each expert's weights to float32. It runs on a GPU without Triton, and it is the reference
that Triton's kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgemoe.kernels import torch_rules
from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import Part, Rows
from edgemoe.storage.base import PLANES_OF_LEVEL, Plane
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.record.planes import dequantize


class PlaneExpertKernel:
    """Implements ExpertKernel for the blocks of storage.record.forms.PlaneForm, without state between calls.

    Blocks are uint8 tensors on x's device; on the CPU they can be memoryviews too.

    Args:
        geometry: the geometry of the store.
        layout: the layout of resident planes; any.
    """

    def __init__(self, geometry: RecordGeometry, layout: Layout) -> None:
        self._geometry, self._layout = geometry, layout

    @staticmethod
    def scratch_bytes(geometry: RecordGeometry) -> int:
        """Returns a call's peak bytes: nibbles twice, and a matrix once as codes and three times in float32."""
        widest = max(spec.padded_rows * spec.padded_cols for spec in geometry.matrices)
        return 2 * geometry.codes_bytes + 13 * widest

    def forward(self, x: Rows, parts: Sequence[Part], activation: Activation, out: torch.Tensor) -> None:
        """Implements ExpertKernel.forward."""
        with torch_rules.threads_for(len(parts) * self._geometry.weights):
            inner = activation.apply(self._products(x.gathered(len(out)), parts, 0))
            out.copy_(self._products(inner, parts, 1))

    def _products(self, x: torch.Tensor, parts: Sequence[Part], matrix: int) -> torch.Tensor:
        """Multiplies bf16 [R, K] with each part's gate_up (0) or down (1) matrix to bf16 [R, N]."""
        rows = x.split([part.rows for part in parts])
        products = [t.float() @ self._weights(part, matrix).T for t, part in zip(rows, parts, strict=True)]
        return torch.cat(products).to(torch.bfloat16)

    def _weights(self, part: Part, matrix: int) -> torch.Tensor:
        """Dequantizes a part's matrix at the part's level, or at its limit, to float32 [rows, cols]."""
        spec, parameters_at, codes_at = self._geometry.matrix_offsets()[matrix]
        level = min(part.level, spec.limit)
        base, *more = (
            block_tensor(part.blocks[plane.label]) for plane in list(Plane)[: PLANES_OF_LEVEL[level]]
        )
        pair = base[parameters_at : parameters_at + spec.parameter_bytes].view(torch.bfloat16)

        def nibbles(array: torch.Tensor, at: int) -> torch.Tensor:
            pieces = self._layout.cut(array, at, spec.nibble_bytes)
            return self._layout.unpack(pieces, spec.padded_rows, spec.padded_cols)

        merged = _merged(base[self._geometry.parameter_bytes :], more[0] if more else None)
        codes = nibbles(merged, codes_at) << 4
        if level == 8:
            codes |= nibbles(more[1], self._geometry.low_offsets()[matrix])
        weights = dequantize(codes, pair.view(-1, spec.padded_rows, 2), level)
        return weights[: spec.rows, : spec.cols]


def block_tensor(block: memoryview | torch.Tensor) -> torch.Tensor:
    """Returns a block as uint8 [size] that shares its memory."""
    return block if isinstance(block, torch.Tensor) else torch.frombuffer(block, dtype=torch.uint8)


def _merged(base: torch.Tensor, d4: torch.Tensor | None) -> torch.Tensor:
    """Merges the planes of planes.split to nibbles code >> 4, uint8 [codes_bytes]; without d4 their low bits are 0."""
    first, second = (base & 0x33) << 2, base & 0xCC
    if d4 is not None:
        first, second = first | (d4 & 0x33), second | ((d4 >> 2) & 0x33)
    return torch.cat((first, second))
