"""MXFP4 (gpt-oss): 32 inputs share a power of two, and every weight is one of 16 values.

    X_blocks  U8 [E, N, K / 32, 16]        input 2i in the low half of byte i
    X_scales  U8 [E, N, K / 32]            exponent + 127

    X[e, k, n] = VALUES[code] * 2^(scale - 127)

The values are not evenly spaced, so a record's 4-bit codes cannot represent them: they are stored at level 8.
"""

from __future__ import annotations

import torch

from edgemoe.errors import MissingTensor
from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.files.untrusted import DOWNLOAD_AGAIN
from edgemoe.storage.formats.base import Settings, Weight, expect, fields, require_known
from edgemoe.storage.formats.plain import with_rest

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1: sign, two bits of exponent, one of mantissa."""

_GROUP = 32


class Mxfp4Weight(Weight):
    """The matrices of a layer's experts, [E, K, N], inputs before outputs as in transformers.

    Raises:
        MissingTensor: blocks or scales are missing, or their shapes contradict each other.
    """

    def __init__(self, tensors: StoredTensors, stem: str) -> None:
        self._tensors, self._blocks, self._scales = tensors, f"{stem}_blocks", f"{stem}_scales"
        shape = tensors[self._blocks].shape
        if len(shape) != 4 or 0 in shape:
            raise MissingTensor(
                f"{self._blocks} of four dimensions in {tensors.directory}",
                f"shape {list(shape)}",
                DOWNLOAD_AGAIN,
            )
        experts, rows, groups, _ = shape
        expect(tensors, self._blocks, (experts, rows, groups, _GROUP // 2), ("U8",))
        expect(tensors, self._scales, (experts, rows, groups), ("U8", "F8_E8M0"))
        self.shape = (experts, groups * _GROUP, rows)
        self.parts = (self._blocks, self._scales)
        self.nbytes = tensors[self._blocks].range.length + tensors[self._scales].range.length
        self.type = "MXFP4"

    def read(self) -> torch.Tensor:
        """Reads all experts as float32 [E, K, N]."""
        return torch.stack([self.read_slice(expert) for expert in range(self.shape[0])])

    def read_slice(self, index: int) -> torch.Tensor:
        """Reads one expert as float32 [K, N]."""
        blocks = self._tensors.read_slice(self._blocks, index)
        exponents = self._tensors.read_slice(self._scales, index).view(torch.uint8).to(torch.int32) - 127
        # In float32: 2^-127 is not a normal number of bf16 or float8.
        values = torch.tensor(VALUES)[fields(blocks, 4).long()]
        return torch.ldexp(values, exponents.unsqueeze(-1)).flatten(-2).t()


def open_mxfp4(settings: Settings, tensors: StoredTensors) -> dict[str, Weight]:
    """Opens a checkpoint with quant_method mxfp4.

    Raises:
        ModelRefused: a setting that is not known.
        MissingTensor: blocks or scales are missing, or their shapes contradict each other.
    """
    require_known(settings, ())
    stems = {name.removesuffix("_blocks") for name in tensors.names() if name.endswith("_blocks")}
    made = {stem: Mxfp4Weight(tensors, stem) for stem in stems}
    return with_rest(made, tensors, tensors.names())
