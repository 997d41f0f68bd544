"""The dense weights of a store, by the names that checkpoints of the Hub have, each times a factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from edgemoe.storage.export.matrices import Affine
from edgemoe.storage.files.header import read_header
from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.store import dense_groups, dense_shapes
from edgemoe.storage.store.manifest import SCALE_SUFFIX

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Names in checkpoints of two tensors, which are one in a tied model."""


class DenseTensors:
    """The tensors of a store's dense weights. Thread-safe; keeps no file open.

    Args:
        dense: the store's file of dense weights.
        rename: name in the store -> name in a checkpoint.
        own_head: whether a tied model's head is a tensor of its own too.
        factors: name in a checkpoint -> factor of its weights, which `read` applies before it rounds; 1 for others.

    Attributes:
        names: the names of all tensors, as in a checkpoint; codes and their scales are one tensor.

    Raises:
        BadHeader, TruncatedFile: the header contradicts the file.
    """

    def __init__(
        self,
        dense: Path,
        rename: Callable[[str], str],
        *,
        own_head: bool,
        factors: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        entries = read_header(dense).tensors
        self._stored = StoredTensors(dense.parent, entries)
        scales = {name + SCALE_SUFFIX for name, entry in entries.items() if entry.dtype == "I8"}
        self._own = {rename(name): name for name in entries if name not in scales}
        if own_head:
            self._own.setdefault(HEAD, self._own[EMBEDDING])
        self._factors = factors
        self.names = list(self._own)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, in weights."""
        return dense_shapes.matrix_shape(self._stored[self._own[name]].spec)

    def is_coded(self, name: str) -> bool:
        """Whether the store has a tensor as 8-bit codes with one scale per row."""
        return self._stored[self._own[name]].dtype == "I8"

    def is_grouped(self, name: str) -> bool:
        """Whether the store has a tensor as codes in groups."""
        return self._stored[self._own[name]].dtype == dense_shapes.DTYPE

    def bits(self, name: str) -> int:
        """Bits of a tensor's codes; only where is_grouped."""
        return dense_shapes.bits_of(self._stored[self._own[name]].spec[1])

    def affine(self, name: str, order: Callable[[torch.Tensor], torch.Tensor]) -> Affine:
        """Reads the codes of a tensor without the factor, its rows in an order; only where is_grouped."""
        codes, parameters = dense_groups.unpacked(self._stored.read(self._own[name]))
        scale, centre = parameters.float().transpose(0, 1).unbind(-1)
        unit = 1 << (8 - self.bits(name))
        middle = (136 - unit / 2) / unit  # of planes.dequantize, in codes
        step = scale * (unit / 16)
        return Affine(order(codes // unit), order(step), order(centre), middle, dense_shapes.GROUP)

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in the store, without scales."""
        return self._stored[self._own[name]].range.length

    def dtype(self, name: str) -> torch.dtype:
        """Element type of the result of `read`: float32 or bf16."""
        return torch.float32 if self._stored[self._own[name]].dtype == "F32" else torch.bfloat16

    def codes(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads int8 codes [N, K] and bf16 scales [N] without the factor; only where is_coded."""
        own = self._own[name]
        return self._stored.read(own), self._stored.read(own + SCALE_SUFFIX)

    def read(self, name: str) -> torch.Tensor:
        """Reads a tensor in floating point; codes become bf16."""
        factor = self._factors.get(name, 1.0)
        if not self.is_coded(name):
            weight = self._stored.read(self._own[name])
            if self.is_grouped(name):
                return dense_groups.decoded(weight).mul_(factor).to(torch.bfloat16)
            return weight if factor == 1 else weight.mul_(factor)
        codes, scales = self.codes(name)
        out = torch.empty(codes.shape, dtype=torch.bfloat16)
        step = max((1 << 20) // max(codes.shape[1], 1), 1)
        for start in range(0, codes.shape[0], step):
            rows = slice(start, start + step)
            out[rows] = codes[rows].float() * (scales[rows].float() * factor).unsqueeze(1)
        return out
