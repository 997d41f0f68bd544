"""Dense matrices of 4 to 6 bits: groups of 64 inputs share a scale and a centre.

A matrix [N, K] is uint8 of `dense_shapes.stored_shape`, N a multiple of 32 and K of 64. Its bytes are as in an expert's
record at level 4 with this one matrix, as the compiled kernel reads them, and the bits after the fourth:

    group parameters, bf16 [K / 64, N, 2] | the codes' top two bits | their next two bits | at 5 and 6 bits the rest

Codes and parameters are as from `planes.quantize`, and a code counts as the middle of all codes with its upper bits.
The order of codes is cpu-avx2-paired, whatever layout the experts of the store have. The last plane is in the order
in which the kernel unpacks nibbles (`next_bits` in csrc/experts/planes.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.planes import Bytes, dequantize, quantize, split
from edgemoe.storage.store.dense_shapes import DTYPE, GROUP, ROWS, bits_of, matrix_shape, stored_shape

_LAYOUT = LAYOUTS["cpu-avx2-paired"]

_SLICE = 1 << 22
"""Weights converted to float32 at a time."""


def columns_of(weight: torch.Tensor) -> int:
    """K of a weight [N, K] in bf16 or int8, or of the bytes of a matrix."""
    grouped = weight.dtype == torch.uint8
    return matrix_shape((DTYPE, tuple(weight.shape)))[1] if grouped else weight.shape[1]


def quantize_groups(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantizes a matrix to 4, 5 or 6 bits.

    Args:
        weight: floating point [N, K] that `fits`; finite. Not changed.
        bits: one of dense_shapes.BITS.

    Returns:
        uint8 of `dense_shapes.stored_shape`.
    """
    rows, cols = weight.shape
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    parameters = torch.empty(cols // GROUP, rows, 2, dtype=torch.bfloat16)
    step = max(_SLICE // cols, 1)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        codes[part], parameters[:, part] = quantize(weight[part].float(), GROUP)
    return packed(codes, parameters, bits)


def packed(codes: torch.Tensor, parameters: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes of a matrix.

    Args:
        codes: uint8 [N, K], of which the upper `bits` bits count.
        parameters: bf16 [K / 64, N, 2], as `planes.quantize` returns them.
        bits: one of dense_shapes.BITS.

    Returns:
        uint8 of `dense_shapes.stored_shape`.
    """
    planes = list(split(_LAYOUT.pack(codes >> 4).numpy()))
    if bits > 4:
        rest = (codes >> (8 - bits)) & ((1 << (bits - 4)) - 1)
        planes.append(_next_plane(_LAYOUT.pack(rest).numpy(), bits - 4))
    parts = parameters.contiguous().view(torch.uint8).flatten(), *map(torch.from_numpy, planes)
    return torch.cat(parts).view(stored_shape(tuple(codes.shape), bits))


def unpacked(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K], whose lower 8 - bits bits are 0, and parameters, as `packed` takes them; on any device."""
    rows, cols, bits = len(matrix), columns_of(matrix), bits_of(tuple(matrix.shape))
    parameters, base, d4, *later = _parts(matrix)
    # [blocks, 4 columns, columns of a pair, rows], and of each byte [halves of rows, pairs].
    shape = rows // ROWS, cols // 4, 2, 16
    upper = (_fields(base, 2).view(*shape, 2, 2) << 2) | _fields(d4, 2).view(*shape, 2, 2)
    codes = upper.permute(0, 4, 3, 1, 5, 2).reshape(rows, cols)
    for plane in later:
        codes = (codes << (bits - 4)) | _next_codes(plane, rows, cols, bits - 4)
    return codes << (8 - bits), parameters


def _next_codes(plane: torch.Tensor, rows: int, cols: int, width: int) -> torch.Tensor:
    """The bits after the fourth, uint8 [N, K]: the reverse of `_next_plane`."""
    # [blocks, 4 or 8 columns, columns of a pair, rows, pairs], and of each byte [4 columns, halves of rows, eights].
    fours = 2 // width
    fields = _fields(plane, width).view(rows // ROWS, cols // 4 // fours, 2, 8, 2, fours, 2, 2)
    return fields.permute(0, 6, 7, 3, 1, 5, 4, 2).reshape(rows, cols)


def _fields(plane: torch.Tensor, width: int) -> torch.Tensor:
    """uint8 [..., 8 / width]: the fields of `width` bits of each byte, from the lowest."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=plane.device)
    return (plane.unsqueeze(-1) >> shifts) & ((1 << width) - 1)


def decoded(matrix: torch.Tensor) -> torch.Tensor:
    """The weights of a matrix, float32 [N, K]."""
    return dequantize(*unpacked(matrix), bits_of(tuple(matrix.shape)))


def looked_up(matrix: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Decodes single rows: float32 [n, K] for int64 [n] of their numbers, on the matrix's device."""
    cols, bits = columns_of(matrix), bits_of(tuple(matrix.shape))
    block, row = ids // ROWS, ids % ROWS
    half, eight = (row // 16 * 4).to(torch.uint8), (row // 8 * (bits - 4)).to(torch.uint8)
    parameters, base, d4, *later = _parts(matrix)

    def upper(plane: torch.Tensor) -> torch.Tensor:
        # [n, 4 columns, columns of a pair, pairs]: the places of `unpacked`.
        places = plane.view(len(plane), cols // 4, 2, 16)[block, :, :, row % 16] >> half[:, None, None]
        return _fields(places, 2)[..., :2].transpose(2, 3).reshape(-1, cols)

    codes = (upper(base) << 2) | upper(d4)
    for plane in later:
        # [n, 4 or 8 columns, columns of a pair, pairs, fours]: the places of `_next_codes`.
        width, eights = bits - 4, plane.view(len(plane), -1, 2, 8, 2)
        places = eights[block, :, :, row % 8] >> eight[:, None, None, None]
        rest = _fields(places, width)[..., ::4].permute(0, 1, 4, 3, 2).reshape(-1, cols)
        codes = (codes << width) | rest
    return dequantize(codes << (8 - bits), parameters[:, ids], bits)


def joined(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix of the rows of several of the same bits, one after another."""
    parameters, *planes = zip(*map(_parts, matrices), strict=True)
    whole = torch.cat(parameters, 1).view(torch.uint8).flatten(), *map(torch.cat, planes)
    shape = sum(map(len, matrices)), *matrices[0].shape[1:]
    return torch.cat([part.flatten() for part in whole]).view(shape)


def rows_of(matrix: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A matrix of some of the rows in another order, int64 [n], n a multiple of 32."""
    codes, parameters = unpacked(matrix)
    return packed(codes[order], parameters[:, order], bits_of(tuple(matrix.shape)))


def slice_of(matrix: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The weights of rows [start, end), multiples of 32, in float32."""
    parameters, *planes = _parts(matrix)
    raw = parameters[:, start:end].contiguous().view(torch.uint8)
    pieces = raw, *(plane[start // ROWS : end // ROWS] for plane in planes)
    return decoded(torch.cat([each.flatten() for each in pieces]).view(end - start, *matrix.shape[1:]))


def _parts(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parameters bf16 [K / 64, N, 2], and the planes, uint8 [N / 32, ...], which share the matrix's memory."""
    rows, cols, bits = len(matrix), columns_of(matrix), bits_of(tuple(matrix.shape))
    sizes = [rows * cols // GROUP * 4, *(rows * cols // 8 * width for width in (2, 2, bits - 4) if width)]
    flat = matrix.reshape(-1)
    raw, *planes = (flat[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True))
    parameters = raw.view(torch.bfloat16).view(cols // GROUP, rows, 2)
    return parameters, *(plane.view(rows // ROWS, -1) for plane in planes)


def _next_plane(nibbles: Bytes, width: int) -> Bytes:
    """The plane of the bits after the fourth, from codes of `width` bits in the places of a layout's nibbles."""
    pairs = np.stack(np.split(nibbles, 2), -1).reshape(-1, 2, 2, 16)  # [4 columns, lane, half of it, byte]
    first, last = pairs[:, :, 0], pairs[:, :, 1]
    step = (first & 15) | (last & 15) << width | (first >> 4) << 2 * width | (last >> 4) << 3 * width
    if width == 1:
        step = step[::2] | step[1::2] << 4
    return step.reshape(-1).astype(np.uint8)
