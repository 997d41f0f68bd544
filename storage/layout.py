"""Layouts: the order in which a kernel wants an expert's nibbles, by name.

torch's CPU kernel for 4-bit weights orders them by the vector width it was dispatched to, and the operator
is private, so nothing is assumed: each order is written out here, and `detect` asks the kernel itself which
one it uses now. A store records its layout and the hash of a known matrix in it (the probe).

    cpu-avx512   blocks of 64 rows; per column 32 bytes: rows d and d+32 share byte d
    cpu-avx2     blocks of 32 rows; per column 16 bytes: rows d and d+16 share byte d
    cpu-generic  blocks of 32 rows; per column 16 bytes: rows 2d and 2d+1 share byte d
    cuda         row-major; columns 2k and 2k+1 share a byte

A last, incomplete block of rows pairs neighbouring rows, as cpu-generic does, in every CPU layout.
The lower-numbered row (or column) is the low nibble.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import xxhash

from storage.errors import UserError


@dataclass(frozen=True)
class Layout:
    """An order of nibbles.

    Args:
        name: as in store.json.
        block: rows packed together, 0 for row-major.
        paired: rows r and r + paired share a byte.
    """

    name: str
    block: int
    paired: int

    def pack(self, nibbles: torch.Tensor) -> torch.Tensor:
        """uint8 [N, K] with values 0..15 -> uint8 [N * K / 2], in kernel order. N % 16 == 0, K even."""
        if not self.block:
            return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).reshape(-1)
        rows, cols = nibbles.shape
        whole = rows // self.block * self.block
        return torch.cat(
            [
                self._pack_blocks(nibbles[:whole].view(-1, self.block, cols), self.paired),
                self._pack_blocks(nibbles[whole:].view(-1, max(rows - whole, 1), cols), 1),
            ]
        )

    def unpack(self, packed: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        """The inverse of pack: uint8 [rows, cols]."""
        if not self.block:
            pairs = packed.view(rows, cols // 2)
            return torch.stack((pairs & 15, pairs >> 4), -1).view(rows, cols)
        whole = rows // self.block * self.block
        cut = whole * cols // 2
        return torch.cat(
            [
                self._unpack_blocks(packed[:cut], self.block, cols, self.paired),
                self._unpack_blocks(packed[cut:], max(rows - whole, 1), cols, 1),
            ]
        )

    def add_to(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the nibbles to float `out` [K, N], transposed: what a plain product wants. Blocked layouts only.

        Args:
            packed: uint8 [N * K / 2].
            out: floating point [K, N], contiguous.
        """
        cols, rows = out.shape
        whole = rows // self.block * self.block
        cut = whole * cols // 2
        self._add_blocks(packed[:cut], out[:, :whole], self.block, self.paired)
        self._add_blocks(packed[cut:], out[:, whole:], rows - whole, 1)

    @staticmethod
    def _add_blocks(packed: torch.Tensor, out: torch.Tensor, rows: int, paired: int) -> None:
        if not packed.numel():
            return
        cols = out.shape[0]
        bytes_ = packed.view(-1, cols, rows // (2 * paired), paired).transpose(0, 1)
        target = out.unflatten(1, (-1, rows // (2 * paired), 2, paired))
        target[:, :, :, 0].add_(bytes_ & 15)
        target[:, :, :, 1].add_(bytes_ >> 4)

    @staticmethod
    def _pack_blocks(blocks: torch.Tensor, paired: int) -> torch.Tensor:
        """[B, R, K] -> bytes ordered (block, column, pair of rows); rows r and r + paired share a byte."""
        count, rows, cols = blocks.shape
        if not count:
            return blocks.new_empty(0)
        pairs = blocks.reshape(count, rows // (2 * paired), 2, paired, cols)
        return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).permute(0, 3, 1, 2).reshape(-1)

    @staticmethod
    def _unpack_blocks(packed: torch.Tensor, rows: int, cols: int, paired: int) -> torch.Tensor:
        if not packed.numel():
            return packed.new_empty(0, cols)
        pairs = packed.view(-1, cols, rows // (2 * paired), paired).permute(0, 2, 3, 1)
        return torch.stack((pairs & 15, pairs >> 4), 2).reshape(-1, cols)


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("cpu-avx512", block=64, paired=32),
        Layout("cpu-avx2", block=32, paired=16),
        Layout("cpu-generic", block=32, paired=1),
        Layout("cuda", block=0, paired=0),
    )
}


def _known_matrix() -> torch.Tensor:
    """int32 [80, 64], values 0..15 without symmetry; 80 rows leave an incomplete block in every CPU layout."""
    index = torch.arange(80 * 64, dtype=torch.int64)
    return ((index * 2654435761 >> 13) % 16).to(torch.int32).view(80, 64)


@cache
def probe(name: str) -> str:
    """Hash of the known matrix packed in a layout: what a store carries, and a reader compares."""
    packed = LAYOUTS[name].pack(_known_matrix().to(torch.uint8))
    return xxhash.xxh3_64_hexdigest(packed.numpy().data)


@cache
def detect() -> Layout:
    """The layout that torch's 4-bit CPU kernel uses in this process.

    Raises:
        UserError: the kernel is missing, or its order is none that edgemoe knows.
    """
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(_known_matrix(), 1)
    except (AttributeError, RuntimeError) as error:
        raise UserError(
            "torch's 4-bit CPU kernel was wanted",
            f"torch {torch.__version__} answers: {error}",
            "Install torch 2.8 or newer",
        ) from error
    found = xxhash.xxh3_64_hexdigest(packed.reshape(-1).numpy())
    for layout in LAYOUTS.values():
        if probe(layout.name) == found:
            return layout
    raise UserError(
        "a known layout of torch's 4-bit CPU kernel was wanted",
        f"torch {torch.__version__} packs the known matrix to {found}, which no layout here gives",
        "Install a torch version that edgemoe was tested with (2.13.0)",
    )
