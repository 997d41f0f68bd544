"""Layouts: the order in which a kernel reads an expert's nibbles, by name.

torch's 4-bit CPU kernel orders nibbles by the vector width that it dispatches to, and its packing operator is private.
So every order is written out here, and `detect` packs a known matrix with the kernel to find the order in use. A store
records its layout and the hash of the known matrix in it (the probe).

    cpu-avx512       blocks of 64 rows; per column 32 bytes: rows d and d+32 share byte d
    cpu-avx2         blocks of 32 rows; per column 16 bytes: rows d and d+16 share byte d
    cpu-generic      blocks of 32 rows; per column 16 bytes: rows 2d and 2d+1 share byte d
    cpu-avx2-paired  cpu-avx2 in two halves, for edgemoe's own kernel: see below
    cuda             slabs of 64 columns (32 where 64 does not divide), in each one row after another: see below

A last, incomplete block of rows pairs neighbouring rows, as cpu-generic does, in every CPU layout.
The lower-numbered row is the low nibble.

`planes.split` pairs each byte in the first half of an expert's nibbles with one in the second half: a byte of base or
d4 has two bits of each. Where matrices follow one another, a kernel that reads planes loads every byte twice, far apart
in time. In cpu-avx2-paired a block's columns 4k and 4k+1 lie in the first half, and columns 4k+2 and 4k+3 at the same
place of the second half: 32 bytes of base and of d4 are 4 columns of 32 rows.

In cuda a slab of a row is four runs of consecutive columns, 0 to 3, each a quarter of the slab. For column j of every
run, byte j of one array holds the nibbles of runs 0 (low) and 2, and byte j of a second array of equal length the
nibbles of runs 1 (low) and 3. The first arrays of all matrices lie in the first half of an expert's nibbles, the second
arrays in the second half. So byte j of a two-bit plane is column j of the runs 0 to 3, from its lowest bits up. The
bytes of a row and slab are contiguous, neighbouring rows are neighbours in memory, as their group parameters are, and
one load of 16 bytes gives a thread 64 codes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import xxhash

from edgemoe.errors import UserError
from edgemoe.storage.record.probes import PROBES

_PIECE = 1 << 19
"""Nibbles unpacked at a time, so that their copies stay in a CPU's cache."""


@dataclass(frozen=True)
class Layout:
    """An order of nibbles.

    Args:
        name: the name in store.json.
        block: rows packed together, 0 for slabs of columns.
        paired: distance of the two rows that share a byte.
        pieces: 1 if a matrix's bytes are contiguous, 2 if they lie in both halves of an expert's nibbles.
    """

    name: str
    block: int
    paired: int
    pieces: int

    def pack(self, nibbles: torch.Tensor) -> torch.Tensor:
        """Packs uint8 [N, K], values 0..15, into uint8 [N * K / 2] in kernel order, one piece after another.

        N is a multiple of 16, K of 32.
        """
        low, high = self.pairs(nibbles)
        return low | (high << 4)

    def pairs(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits uint8 [N, K] into the values of low and of high nibbles, [N * K / 2] each, in kernel order."""
        rows, cols = values.shape
        if not self.block:
            runs = values.view(rows, -1, 4, slab_columns(cols) // 4).permute(2, 1, 0, 3)
            return runs[:2].reshape(-1), runs[2:].reshape(-1)
        whole = rows // self.block * self.block
        pairs = self._pair_blocks(values[:whole].view(-1, self.block, cols), self.paired)
        if whole < rows:
            rest = self._pair_blocks(values[whole:].view(1, -1, cols), 1)
            pairs = torch.cat((pairs, rest), 2)
        low, high = pairs.flatten(1)
        return low, high

    def unpack(
        self, pieces: torch.Tensor, rows: int, cols: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Unpacks nibbles.

        Args:
            pieces: uint8 [pieces, rows * cols / 2 / pieces]: what `cut` returns, or the result of `pack` as such rows.
            rows, cols: sizes of the matrix.
            out: uint8 [rows, cols], contiguous, to be filled; by default a new tensor.

        Returns:
            `out`.
        """
        if out is None:
            out = pieces.new_empty(rows, cols)
        if not self.block:
            pairs = pieces.reshape(2, -1, rows, slab_columns(cols) // 4)
            out.copy_(torch.cat((pairs & 15, pairs >> 4)).permute(2, 1, 0, 3).reshape(rows, cols))
            return out
        whole = rows // self.block * self.block
        cut = whole * cols // 2 // self.pieces
        self._unpack_blocks(pieces[:, :cut], out[:whole].view(-1, self.block, cols), self.paired)
        if whole < rows:
            self._unpack_blocks(pieces[:, cut:], out[whole:].unsqueeze(0), 1)
        return out

    def cut(self, nibbles: torch.Tensor, at: int, length: int) -> torch.Tensor:
        """A view of a matrix's packed bytes in an expert's nibbles, uint8 [pieces, length / pieces].

        Args:
            nibbles: an expert's nibbles, with padding, uint8 [codes_bytes].
            at: bytes of the matrices before this one.
            length: bytes of this matrix.
        """
        return nibbles.view(self.pieces, -1)[:, at // self.pieces : (at + length) // self.pieces]

    def add_to(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the nibbles to a transposed float matrix, the operand of a plain product. torch's layouts only.

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

    def _pair_blocks(self, blocks: torch.Tensor, paired: int) -> torch.Tensor:
        """Orders [B, R, K] as [2, pieces, B * K * R / 2 / pieces], by block, column and pair of rows r, r + paired."""
        count, rows, cols = blocks.shape
        columns = (cols // (2 * self.pieces), self.pieces, 2)
        pairs = blocks.reshape(count, rows // (2 * paired), 2, paired, *columns)
        return pairs.permute(2, 5, 0, 4, 6, 1, 3).reshape(2, self.pieces, -1)

    def _unpack_blocks(self, pieces: torch.Tensor, out: torch.Tensor, paired: int) -> None:
        """Unpacks [pieces, B * K * R / 2 / pieces] into [B, R, K], some blocks at a time; inverse of _pair_blocks."""
        count, rows, cols = out.shape
        step = max(_PIECE // (rows * cols), 1)
        packed = pieces.view(self.pieces, count, cols // self.pieces, rows // 2)
        for start in range(0, count, step):
            # First the bytes of a column become a row's, then the pieces' pairs of columns alternate.
            turned = packed[:, start : start + step].transpose(2, 3).contiguous()
            if self.pieces == 2:
                turned = torch.stack(turned.view(torch.int16).unbind(0), -1).view(torch.uint8)
            pairs = turned.view(-1, rows // (2 * paired), paired, cols)
            target = out[start : start + step].view(-1, rows // (2 * paired), 2, paired, cols)
            torch.bitwise_and(pairs, 15, out=target[:, :, 0])
            torch.bitwise_right_shift(pairs, 4, out=target[:, :, 1])


def slab_columns(cols: int) -> int:
    """Columns of one slab of the layout cuda, in a matrix of `cols` columns, a multiple of 32."""
    return 32 if cols % 64 else 64


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("cpu-avx512", block=64, paired=32, pieces=1),
        Layout("cpu-avx2", block=32, paired=16, pieces=1),
        Layout("cpu-generic", block=32, paired=1, pieces=1),
        Layout("cpu-avx2-paired", block=32, paired=16, pieces=2),
        Layout("cuda", block=0, paired=0, pieces=2),
    )
}


def _known_matrix() -> torch.Tensor:
    """Returns int32 [80, 64], values 0..15 without symmetry; 80 rows leave an incomplete block in every CPU layout."""
    index = torch.arange(80 * 64, dtype=torch.int64)
    return ((index * 2654435761 >> 13) % 16).to(torch.int32).view(80, 64)


@cache
def detect() -> Layout:
    """Finds the layout that torch's 4-bit CPU kernel uses in this process.

    Raises:
        UserError: the kernel is missing, or its order is unknown.
    """
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(_known_matrix(), 1)
    except (AttributeError, RuntimeError) as error:
        raise UserError(
            "torch's 4-bit CPU kernel",
            f"an error from torch {torch.__version__} ({error})",
            "install torch 2.8 or newer",
        ) from error
    found = xxhash.xxh3_64_hexdigest(packed.reshape(-1).numpy())
    for layout in LAYOUTS.values():
        if PROBES[layout.name] == found:
            return layout
    raise UserError(
        "a known layout of torch's 4-bit CPU kernel",
        f"the unknown probe {found} from torch {torch.__version__}",
        "install a torch version that edgemoe was tested with (2.13.0)",
    )
