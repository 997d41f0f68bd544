"""Tensors of a GGUF file: dequantized by the gguf package, or as the codes that records keep (ggml_codes)."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch

from edgemoe.errors import ModelRefused
from edgemoe.storage.base import ByteRange
from edgemoe.storage.files.tensors import read_bytes
from edgemoe.storage.formats.base import Weight
from edgemoe.storage.formats.ggml_codes import CODES
from edgemoe.storage.formats.gguf_header import GgufEntry
from edgemoe.storage.formats.source_codes import SourceCodes

_ROWS = 1 << 22
"""Weights dequantized at a time, which bounds the size of float32 copies."""

Kind = gguf.GGMLQuantizationType
READABLE = (
    *(Kind.F32, Kind.F16, Kind.BF16),
    *(Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    *(Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S),
    *(Kind.TQ1_0, Kind.TQ2_0, Kind.NVFP4),
)
"""Supported types of tensors: all of weights that the gguf package decodes."""


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
        self.type = entry.type.name
        if entry.type in CODES and len(self.shape) == 2:
            self.group, self.bits = 32, CODES[entry.type].bits

    def read(self) -> torch.Tensor:
        """Reads the tensor in its shape as float32."""
        rows = self._raw()
        out = torch.empty(rows.shape[0], self.shape[-1])
        step = max(_ROWS // self.shape[-1], 1)
        for start in range(0, rows.shape[0], step):
            part = gguf.quants.dequantize(rows[start : start + step].numpy(), self._entry.type)
            out[start : start + step] = torch.from_numpy(part)
        return out.view(self.shape)

    def read_slice(self, index: int) -> torch.Tensor:
        """Reads tensor[index] alone."""
        if len(self.shape) < 3:
            return self.read()[index]
        entry = GgufEntry(self._entry.type, self.shape, ByteRange(self._offset, self.nbytes))
        return GgmlWeight(self._path, self.parts[0], entry, index).read()

    def codes(self) -> SourceCodes:
        """Reads the matrix's codes."""
        blocks = self._raw().view(-1, gguf.GGML_QUANT_SIZES[self._entry.type][1])
        found, rows = CODES[self._entry.type], self.shape[0]
        codes, scale, centre = found.unpack(blocks)
        return SourceCodes(
            codes.view(self.shape), scale.view(rows, -1), centre.view(rows, -1), 32, found.bits
        )

    def _raw(self) -> torch.Tensor:
        """Reads the stored bytes, uint8 [rows, bytes of a row]."""
        return read_bytes(self._path, self._offset, self.nbytes).view(-1, self._entry.row_bytes)
