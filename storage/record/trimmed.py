"""The bits of d8 where codes have 4, 5 or 6 bits: sliced from the nibbles of p0 for the disk, and put back in memory.

A code of b bits is the top of an 8-bit code, whose other bits are constant: the middle of what they could be. So a
matrix's nibbles in p0 have b - 4 bits that differ, and d8 has these alone:

    8 bits   the nibbles
    6 bits   byte i has the two top bits of byte i in both halves of the matrix's nibbles
    5 bits   byte i has the top bit of byte i in all four quarters
    4 bits   nothing
"""

from __future__ import annotations

import numpy as np
import torch

from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.record.planes import REST, Bytes

_BOTH = 0x11
"""A nibble times this is in both halves of a byte."""


def trim(p0: Bytes, geometry: RecordGeometry, layout: Layout, out: Bytes) -> None:
    """Slices a layer's d8 out of its nibbles.

    Args:
        p0: uint8 [geometry.low_bytes].
        geometry: the geometry of the layer.
        layout: the layout of the nibbles.
        out: uint8, the length of d8; overwritten.
    """
    start = 0
    for index, bits, at, size in geometry.low_places():
        pieces = layout.cut(torch.from_numpy(p0), at, geometry.matrices[index].nibble_bytes)
        part = out[start : start + size]
        flat = pieces.reshape(-1).numpy()
        if bits == 8:
            part[:] = flat
        elif bits == 6:
            first, second = np.split(flat, 2)
            part[:] = (first >> 2 & 0x33) | (second & 0xCC)
        elif bits == 5:
            part[:] = sum((quarter & 0x88) >> (3 - i) for i, quarter in enumerate(np.split(flat, 4)))
        start += size
    out[start:] = 0


def expand(d8: Bytes, geometry: RecordGeometry, layout: Layout, p0: Bytes) -> None:
    """Writes the nibbles of a layer from its d8.

    Args:
        d8: uint8, the length of the layer's d8.
        geometry: the geometry of the layer.
        layout: the layout of the nibbles.
        p0: uint8 [geometry.low_bytes]; overwritten.
    """
    start = 0
    for index, bits, at, size in geometry.low_places():
        pieces = layout.cut(torch.from_numpy(p0), at, geometry.matrices[index].nibble_bytes)
        part, rest = d8[start : start + size], np.uint8(REST[bits] * _BOTH)
        flat = np.empty(pieces.numel(), np.uint8)
        if bits == 8:
            flat = part
        elif bits == 6:
            first, second = np.split(flat, 2)
            np.bitwise_or((part & 0x33) << 2, rest, out=first)
            np.bitwise_or(part & 0xCC, rest, out=second)
        elif bits == 5:
            for i, quarter in enumerate(np.split(flat, 4)):
                np.bitwise_or((part >> i & _BOTH) << 3, rest, out=quarter)
        else:
            flat.fill(rest)
        pieces.copy_(torch.from_numpy(flat).view(pieces.shape))
        start += size
