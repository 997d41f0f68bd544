"""Dense matrices of 4 bits: groups of 64 inputs share a scale and a centre.

A matrix [N, K] is uint8 [N, 9 K / 16], N a multiple of 32 and K of 64. Its bytes are as in an expert's record at
level 4 with this one matrix, as the compiled kernel reads them:

    group parameters, bf16 [K / 64, N, 2] | the codes' top two bits | their next two bits

Codes and parameters are as from `planes.quantize`, and the order of codes is cpu-avx2-paired, whatever layout the
experts of the store have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.planes import dequantize, merge, quantize, split
from edgemoe.storage.store.dense_shapes import GROUP, ROWS

_LAYOUT = LAYOUTS["cpu-avx2-paired"]

_SLICE = 1 << 22
"""Weights converted to float32 at a time."""


def columns_of(weight: torch.Tensor) -> int:
    """K of a weight [N, K] in bf16 or int8, or of the bytes of a matrix of 4 bits."""
    cols = weight.shape[1]
    return cols * 16 // 9 if weight.dtype == torch.uint8 else cols


def quantize_groups(weight: torch.Tensor) -> torch.Tensor:
    """Quantizes a matrix to 4 bits.

    Args:
        weight: floating point [N, K] that `fits`; finite. Not changed.

    Returns:
        uint8 [N, 9 K / 16].
    """
    rows, cols = weight.shape
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    parameters = torch.empty(cols // GROUP, rows, 2, dtype=torch.bfloat16)
    step = max(_SLICE // cols, 1)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        codes[part], parameters[:, part] = quantize(weight[part].float(), GROUP)
    return packed(codes, parameters)


def packed(codes: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """The bytes of a matrix.

    Args:
        codes: uint8 [N, K], of which the upper four bits count.
        parameters: bf16 [K / 64, N, 2], as `planes.quantize` returns them.

    Returns:
        uint8 [N, 9 K / 16].
    """
    base, d4 = split(_LAYOUT.pack(codes >> 4).numpy())
    parts = parameters.contiguous().view(torch.uint8).flatten(), torch.from_numpy(base), torch.from_numpy(d4)
    return torch.cat(parts).view(len(codes), -1)


def unpacked(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [N, K], whose lower four bits are 0, and parameters, as `packed` takes them."""
    rows, cols = len(matrix), columns_of(matrix)
    parameters, base, d4 = _parts(matrix)
    nibbles = np.concatenate((d4.flatten().numpy(), base.flatten().numpy()))
    merge(nibbles)
    codes = _LAYOUT.unpack(torch.from_numpy(nibbles).view(2, -1), rows, cols)
    return codes.bitwise_left_shift_(4), parameters


def decoded(matrix: torch.Tensor) -> torch.Tensor:
    """The weights of a matrix, float32 [N, K]."""
    return dequantize(*unpacked(matrix), 4)


def joined(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix of the rows of several, one after another."""
    parameters, base, d4 = zip(*map(_parts, matrices), strict=True)
    whole = torch.cat(parameters, 1).view(torch.uint8).flatten(), *map(torch.cat, (base, d4))
    return torch.cat([part.flatten() for part in whole]).view(sum(map(len, matrices)), -1)


def rows_of(matrix: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """A matrix of some of the rows in another order, int64 [n], n a multiple of 32."""
    codes, parameters = unpacked(matrix)
    return packed(codes[order], parameters[:, order])


def slice_of(matrix: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """The weights of rows [start, end), multiples of 32, in float32."""
    parameters, base, d4 = _parts(matrix)
    blocks = slice(start // ROWS, end // ROWS)
    raw = parameters[:, start:end].contiguous().view(torch.uint8)
    return decoded(
        torch.cat([each.flatten() for each in (raw, base[blocks], d4[blocks])]).view(end - start, -1)
    )


def _parts(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parameters bf16 [K / 64, N, 2], and both planes, uint8 [N / 32, 8 K], which share the matrix's memory."""
    rows, cols = len(matrix), columns_of(matrix)
    sizes = rows * cols // 16, rows * cols // 4, rows * cols // 4
    raw, base, d4 = matrix.reshape(-1).split(sizes)
    parameters = raw.view(torch.bfloat16).view(cols // GROUP, rows, 2)
    return parameters, base.view(rows // ROWS, -1), d4.view(rows // ROWS, -1)
