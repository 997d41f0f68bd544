"""Computing an expert with torch's operators alone, from planes as they lie, on any device.

What runs on a GPU without Triton, and what Triton's kernels are tested against. Every expert's weights are
dequantized to float32 in each call: this is the plain way, not the fast one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgemoe.kernels import threads
from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import Part
from storage.base import PLANES_OF_LEVEL, Plane
from storage.layout import Layout
from storage.planes import dequantize
from storage.record import RecordGeometry


class PlaneExpertKernel:
    """Runs experts of one geometry, from the blocks of storage.forms.PlaneForm. Nothing is kept between calls.

    Blocks are uint8 tensors on x's device, or bytes in RAM where that is the CPU.

    Args:
        geometry: of the store.
        layout: that resident planes are in; any.
    """

    def __init__(self, geometry: RecordGeometry, layout: Layout) -> None:
        self._geometry, self._layout = geometry, layout

    @staticmethod
    def scratch_bytes(geometry: RecordGeometry) -> int:
        """Bytes a call needs at its peak: nibbles twice, and a matrix as codes and three times in float32."""
        widest = max(spec.padded_rows * spec.padded_cols for spec in geometry.matrices)
        return 2 * geometry.codes_bytes + 13 * widest

    def forward(
        self, x: torch.Tensor, parts: Sequence[Part], activation: Activation, out: torch.Tensor
    ) -> None:
        """See ExpertKernel."""
        with threads.for_product(len(parts) * self._geometry.weights):
            out.copy_(self._products(activation.apply(self._products(x, parts, 0)), parts, 1))

    def _products(self, x: torch.Tensor, parts: Sequence[Part], matrix: int) -> torch.Tensor:
        """bf16 [R, K] -> bf16 [R, N] through every part's gate_up (0) or down (1) matrix."""
        rows = x.split([part.rows for part in parts])
        products = [t.float() @ self._weights(part, matrix).T for t, part in zip(rows, parts, strict=True)]
        return torch.cat(products).to(torch.bfloat16)

    def _weights(self, part: Part, matrix: int) -> torch.Tensor:
        """float32 [rows, cols], what the part's level stands for."""
        spec, parameters_at, codes_at = self._geometry.matrix_offsets()[matrix]
        base, *more = (
            block_tensor(part.blocks[plane.label]) for plane in list(Plane)[: PLANES_OF_LEVEL[part.level]]
        )
        pair = base[parameters_at : parameters_at + spec.parameter_bytes].view(torch.bfloat16)
        spans = self._layout.spans(codes_at, spec.nibble_bytes, self._geometry.codes_bytes)

        def nibbles(array: torch.Tensor) -> torch.Tensor:
            packed = torch.cat([array[span] for span in spans])
            return self._layout.unpack(packed, spec.padded_rows, spec.padded_cols)

        codes = nibbles(_merged(base[self._geometry.parameter_bytes :], more[0] if more else None)) << 4
        if part.level == 8:
            codes |= nibbles(more[1])
        weights = dequantize(codes, pair.view(-1, spec.padded_rows, 2), part.level)
        return weights[: spec.rows, : spec.cols]


def block_tensor(block: memoryview | torch.Tensor) -> torch.Tensor:
    """A block's bytes as uint8 [size], shared with it."""
    return block if isinstance(block, torch.Tensor) else torch.frombuffer(block, dtype=torch.uint8)


def _merged(base: torch.Tensor, d4: torch.Tensor | None) -> torch.Tensor:
    """uint8 [codes_bytes]: the nibbles code >> 4 that planes.split sliced; without d4 their low bits are 0."""
    first, second = (base & 0x33) << 2, base & 0xCC
    if d4 is not None:
        first, second = first | (d4 & 0x33), second | ((d4 >> 2) & 0x33)
    return torch.cat((first, second))
