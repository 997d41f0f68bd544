"""Tensors of a GGUF file: dequantized by the gguf package, or as their 4-bit codes.

Three types have blocks of 32 inputs with uniform 4-bit codes n, which records keep exactly:

    Q4_0  d f16 | 16 bytes                    w = d * (n - 8)
    Q4_1  d f16 | m f16 | 16 bytes            w = d * n + m
          input i of the block is the low half of byte i, input 16 + i its high half
    Q4_K  d f16 | dmin f16 | 12 bytes | 128 bytes, for 8 blocks       w = d * sc * n - dmin * mn
          blocks 2j and 2j + 1 are the low and the high halves of bytes 32 j to 32 j + 31;
          sc and mn have 6 bits: for blocks 0 to 3 the low bits of the first and second four of the 12 bytes, for
          blocks 4 to 7 the halves of the last four bytes and the top two bits of the first eight
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import torch

from edgemoe.errors import ModelRefused
from edgemoe.storage.files.tensors import read_bytes
from edgemoe.storage.formats.base import FourBit, Weight
from edgemoe.storage.formats.gguf_header import GgufEntry

_ROWS = 1 << 22
"""Weights dequantized at a time, which bounds the size of float32 copies."""

Kind = gguf.GGMLQuantizationType
READABLE = (
    *(Kind.F32, Kind.F16, Kind.BF16),
    *(Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
)
"""Supported types of tensors."""

Codes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes uint8 [n, weights], scale and centre float32 [n, weights / 32] of n blocks."""


class GgmlWeight(Weight):
    """A tensor of a GGUF file, or one slice of it.

    Args:
        path: the path of the file.
        name: the name of the tensor in the file.
        entry: the entry of the tensor in the header.
        index: slice of a tensor with three dimensions; None: the whole tensor.
        rows: rows of that slice; None: all.

    Raises:
        ModelRefused: its type is not in READABLE.
    """

    def __init__(
        self, path: Path, name: str, entry: GgufEntry, index: int | None = None, rows: range | None = None
    ) -> None:
        if entry.type not in READABLE:
            raise ModelRefused(
                f"{name} as {', '.join(kind.name for kind in READABLE)} in {path}",
                entry.type.name,
                "choose a file of another quantization",
            )
        self._path, self._entry = path, entry
        self.parts = (name,)
        slices = 1 if index is None else entry.shape[0]
        self.shape = entry.shape if index is None else entry.shape[1:]
        self.nbytes = entry.range.length // slices
        self._offset = entry.range.offset + (index or 0) * self.nbytes
        if rows is not None:
            self._offset += rows.start * entry.row_bytes
            self.shape = (len(rows), *self.shape[1:])
            self.nbytes = len(rows) * entry.row_bytes
        if entry.type in _FOUR_BIT and len(self.shape) == 2:
            self.group = 32

    def read(self) -> torch.Tensor:
        """Reads the tensor in its shape as float32."""
        rows = self._raw()
        out = torch.empty(rows.shape[0], self.shape[-1])
        step = max(_ROWS // self.shape[-1], 1)
        for start in range(0, rows.shape[0], step):
            part = gguf.quants.dequantize(rows[start : start + step].numpy(), self._entry.type)
            out[start : start + step] = torch.from_numpy(part)
        return out.view(self.shape)

    def codes(self) -> FourBit:
        """Reads the matrix's 4-bit codes."""
        blocks = self._raw().view(-1, gguf.GGML_QUANT_SIZES[self._entry.type][1])
        codes, scale, centre = _FOUR_BIT[self._entry.type](blocks)
        rows = self.shape[0]
        return FourBit(codes.view(self.shape), scale.view(rows, -1), centre.view(rows, -1), 32)

    def _raw(self) -> torch.Tensor:
        """Reads the stored bytes, uint8 [rows, bytes of a row]."""
        return read_bytes(self._path, self._offset, self.nbytes).view(-1, self._entry.row_bytes)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the float16 at byte `at` of every block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks uint8 [..., n] into [..., 2n]: the low halves of all bytes, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _q4_0(blocks: torch.Tensor) -> Codes:
    scale = _half(blocks, 0)
    return _halves(blocks[:, 2:]), scale, torch.zeros_like(scale)


def _q4_1(blocks: torch.Tensor) -> Codes:
    scale = _half(blocks, 0)
    return _halves(blocks[:, 4:]), scale, _half(blocks, 2) + 8 * scale


def _q4_k(blocks: torch.Tensor) -> Codes:
    first, second, last = (blocks[:, at : at + 4] for at in (4, 8, 12))
    steps = torch.cat((first & 63, (last & 15) | (first >> 6 << 4)), 1).float()
    minima = torch.cat((second & 63, (last >> 4) | (second >> 6 << 4)), 1).float()
    scale = _half(blocks, 0) * steps
    codes = _halves(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1)
    return codes, scale, 8 * scale - _half(blocks, 2) * minima


_FOUR_BIT: dict[gguf.GGMLQuantizationType, Callable[[torch.Tensor], Codes]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q4_K: _q4_k,
}
