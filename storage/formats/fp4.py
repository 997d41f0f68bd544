"""FP4 of compressed-tensors: NVFP4 and MXFP4, two values of E2M1 a byte, input 2i in the low half of byte i.

    weight_packed        U8 [N, K / 2]
    weight_scale         NVFP4: F8_E4M3 [N, K / 16]    MXFP4: U8 [N, K / 32], exponent + 127
    weight_global_scale  F32 [1], NVFP4 alone

    NVFP4: w[n, k] = VALUES[code] * weight_scale / weight_global_scale
    MXFP4: w[n, k] = VALUES[code] * 2^(weight_scale - 127)

The values are not evenly spaced, so they are coded again.
"""

from __future__ import annotations

import torch

from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.formats.base import Weight, expect, fields, matrix_shape
from edgemoe.storage.formats.mxfp4 import VALUES
from edgemoe.storage.formats.plain import FLOATS

_PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")


class Fp4Weight(Weight):
    """A packed matrix.

    Args:
        tensors: the tensors of the checkpoint.
        stem: name of the stored parts up to the last dot.

    Raises:
        MissingTensor: a part is missing, or its shape or type contradicts the others.
    """

    def __init__(self, tensors: StoredTensors, stem: str) -> None:
        self._tensors, self._stem = tensors, stem
        rows, half = matrix_shape(tensors, f"{stem}.weight_packed")
        self.shape = rows, 2 * half
        scale, factor = f"{stem}.weight_scale", f"{stem}.weight_global_scale"
        self._nvidia = factor in tensors
        self._group = 16 if self._nvidia else 32
        types = ("F8_E4M3",) if self._nvidia else ("U8", "F8_E8M0")
        expect(tensors, f"{stem}.weight_packed", (rows, half), ("U8",))
        expect(tensors, scale, (rows, -(-self.shape[1] // self._group)), types)
        if self._nvidia:
            expect(tensors, factor, (1,), FLOATS)
        self.type = "NVFP4" if self._nvidia else "MXFP4"
        self.parts = tuple(f"{stem}.{part}" for part in _PARTS if f"{stem}.{part}" in tensors)
        self.nbytes = sum(tensors[part].range.length for part in self.parts)

    def read(self) -> torch.Tensor:
        """Reads the matrix as float32 [N, K]."""
        read, stem = self._tensors.read, self._stem
        values = torch.tensor(VALUES)[fields(read(f"{stem}.weight_packed"), 4).long()]
        scale = read(f"{stem}.weight_scale")
        if self._nvidia:
            scales = scale.float() / read(f"{stem}.weight_global_scale").float()
        else:
            scales = torch.ldexp(torch.ones(scale.shape), scale.view(torch.uint8).to(torch.int32) - 127)
        return values * scales.repeat_interleave(self._group, 1)[:, : self.shape[1]]
