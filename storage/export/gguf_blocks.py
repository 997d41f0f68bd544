"""GGUF's blocks of quantized numbers, as exports write them.

    Q4_1  d f16 | m f16 | 16 bytes          w = d * n + m     input i of 32: low half of byte i, 16 + i: high half
    Q5_1  d f16 | m f16 | u32 | 16 bytes    w = d * n + m     the same of the lower four bits; bit i of u32: its fifth
    Q8_0  d f16 | int8 [32]                 w = d * n

Q4_1 and Q5_1 hold the store's own codes: step and offset of each group become float16.
"""

from __future__ import annotations

from math import prod

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from edgemoe.storage.export.matrices import Affine
from edgemoe.storage.export.symmetric import int8

BLOCK = 32
"""Inputs of a block."""


def blocks_bytes(kind: Kind, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor's blocks."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    return prod(shape) // int(weights) * int(size)


def encode(kind: Kind, own: Affine, out: torch.Tensor) -> Affine:
    """Writes the blocks of a matrix's rows to `out`, uint8 [N, bytes of a row]. Returns what they hold."""
    if kind in (Kind.Q4_1, Kind.Q5_1):
        own = own.regrouped(BLOCK)
        step, offset = own.step.half(), own.offset.half()
        blocks = out.view(-1, blocks_bytes(kind, (BLOCK,)))
        blocks[:, :4] = torch.stack((step, offset), -1).view(torch.uint8).view(-1, 4)
        if kind is Kind.Q5_1:
            fifth = np.packbits((own.codes >> 4).numpy().reshape(-1, BLOCK), axis=1, bitorder="little")
            blocks[:, 4:8] = torch.from_numpy(fifth)
        _nibbles(own.codes & 15, blocks[:, -16:])
        return Affine(own.codes, step.float(), offset.float(), 0.0, BLOCK)
    made = int8(own, BLOCK, torch.float16, lowest=-127)
    q8_0(made.codes ^ 128, made.scale, out)
    return made.affine()


def q8_0(codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the Q8_0 blocks of the bytes of int8 codes [N, K] and f16 scales [N, K / 32]."""
    blocks = out.view(-1, 34)
    blocks[:, :2] = scale.contiguous().view(torch.uint8).view(-1, 2)
    blocks[:, 2:] = codes.reshape(-1, BLOCK)


def _nibbles(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Writes codes 0..15 [N, K] as the last 16 bytes of their blocks, uint8 [N K / 32, 16]."""
    words = np.empty((len(out), 4), np.int32)
    # Four codes of each half at a time: no code reaches the next byte.
    low = codes.contiguous().view(torch.int32).view(-1, 8).numpy()
    high = low << 4
    for word in range(4):
        np.bitwise_or(low[:, word], high[:, 4 + word], out=words[:, word])
    out[:] = torch.from_numpy(words.view(np.uint8))
