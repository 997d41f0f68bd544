"""Matrices of integers with a scale and a zero point per group of inputs: w = scale * (code - zero)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from edgemoe.errors import DamagedData
from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.files.untrusted import DOWNLOAD_AGAIN
from edgemoe.storage.formats.base import Weight, record_group
from edgemoe.storage.formats.source_codes import SourceCodes, regroup

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""An unpacked matrix: codes uint8 [N, K], scales and zeros float32 [N, G]."""


@dataclass(frozen=True)
class Packing:
    """The packing of a checkpoint's matrices.

    Args:
        bits: the number of bits of a code: 2, 4 or 8.
        group: consecutive inputs that share a scale; None: all inputs.
        act_order: whether the inputs of a group may lie anywhere.
        zero_offset: offset to add to a stored zero point.
        symmetric: whether zero points are left out, and are the middle of the codes.
    """

    bits: int
    group: int | None
    act_order: bool = False
    zero_offset: int = 0
    symmetric: bool = False


class GroupedWeight(Weight):
    """A matrix [N, K]; subclasses unpack it.

    Args:
        tensors: the tensors of the checkpoint.
        stem: name of the stored parts up to the last dot.
        shape: (N, K).
        packing: how the config says that the matrix is packed.
        index: name of the stored tensor, int32 [K], with every input's group; None: the group is k / group.
    """

    def __init__(
        self,
        tensors: StoredTensors,
        stem: str,
        shape: tuple[int, int],
        packing: Packing,
        index: str | None = None,
    ) -> None:
        self._tensors, self._stem, self._index = tensors, stem, index
        self.shape, self._packing = shape, packing
        self._group = min(packing.group or shape[1], shape[1])
        self._groups = -(-shape[1] // self._group)
        self.bits, self.type = packing.bits, f"int{packing.bits}"
        if not packing.act_order:
            self.group = record_group(self._group, shape[1])

    @property
    def form(self) -> tuple[int, ...]:
        """Bits of a code, and the group."""
        return self._packing.bits, self._group

    def _made_of(self, parts: Iterable[str]) -> None:
        """Sets `parts` and `nbytes` from the parts that exist."""
        self.parts = tuple(part for part in parts if part in self._tensors)
        self.nbytes = sum(self._tensors[part].range.length for part in self.parts)

    @abstractmethod
    def _unpack(self) -> Parts:
        """Reads and unpacks the matrix."""

    def read(self) -> torch.Tensor:
        """Reads the matrix as float32 [N, K].

        Raises:
            DamagedData: the index names a group outside of 0 .. G - 1.
            TruncatedFile: a file has become shorter since it was opened.
        """
        codes, scales, zeros = self._unpack()
        group_of = self._group_of()
        return (codes.float() - zeros[:, group_of]) * scales[:, group_of]

    def codes(self) -> SourceCodes:
        """Reads the matrix's codes.

        Raises:
            DamagedData: the inputs of a group are scattered, against the config.
        """
        assert self.group is not None
        codes, scales, zeros = self._unpack()
        columns = self.shape[1]
        if not torch.equal(self._group_of(), self._in_order()):
            raise DamagedData(
                f"inputs in order in {self._index} of {self._tensors.directory}",
                "inputs out of order, where quantization_config names no act-order",
                "set act-order in config.json if the checkpoint was made with it (GPTQ: desc_act true)",
            )
        scale, centre = (
            regroup(values, self._group, self.group, columns)
            for values in (scales, ((1 << (self.bits - 1)) - zeros) * scales)
        )
        return SourceCodes(codes, scale, centre, self.group, self.bits)

    def _in_order(self) -> torch.Tensor:
        return torch.arange(self.shape[1]) // self._group

    def _group_of(self) -> torch.Tensor:
        """Returns every input's group, int64 [K]."""
        if self._index is None:
            return self._in_order()
        index = self._tensors.read(self._index).long()
        if int(index.min()) < 0 or int(index.max()) >= self._groups:
            raise DamagedData(
                f"groups from 0 to {self._groups - 1} in {self._index} of {self._tensors.directory}",
                f"groups from {int(index.min())} to {int(index.max())}",
                DOWNLOAD_AGAIN,
            )
        return index
