"""Uniform codes n in blocks of 32 inputs of GGUF types, which records keep exactly.

Q4_0  d f16 | 16 bytes                    w = d * (n - 8)
Q4_1  d f16 | m f16 | 16 bytes            w = d * n + m
Q5_0  d f16 | high 4 bytes | 16 bytes     w = d * (n - 16)
Q5_1  d f16 | m f16 | high 4 bytes | 16 bytes       w = d * n + m
      input i of the block is the low half of byte i, input 16 + i its high half; bit i of `high` is the fifth bit
      of input i
Q8_0  d f16 | 32 bytes                    w = d * n, n from -128 to 127
Q4_K  d f16 | dmin f16 | 12 bytes | 128 bytes, for 8 blocks       w = d * sc * n - dmin * mn
Q5_K  d f16 | dmin f16 | 12 bytes | high 32 bytes | 128 bytes     w = d * sc * n - dmin * mn
      blocks 2j and 2j + 1 are the low and the high halves of bytes 32 j to 32 j + 31;
      bit b of byte i of `high` is the fifth bit of input i of block b;
      sc and mn have 6 bits: for blocks 0 to 3 the low bits of the first and second four of the 12 bytes, for
      blocks 4 to 7 the halves of the last four bytes and the top two bits of the first eight
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import gguf
import torch

Unpacked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes uint8 [n, weights], scale and centre float32 [n, weights / 32] of n blocks; as SourceCodes."""


class BlockCodes(NamedTuple):
    """The codes of a type: their bits, and a function that unpacks blocks, uint8 [n, bytes of a block]."""

    bits: int
    unpack: Callable[[torch.Tensor], Unpacked]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the float16 at byte `at` of every block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks uint8 [..., n] into [..., 2n]: the low halves of all bytes, then the high halves."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _q4_0(blocks: torch.Tensor) -> Unpacked:
    scale = _half(blocks, 0)
    return _halves(blocks[:, 2:]), scale, torch.zeros_like(scale)


def _q4_1(blocks: torch.Tensor) -> Unpacked:
    scale = _half(blocks, 0)
    return _halves(blocks[:, 4:]), scale, _half(blocks, 2) + 8 * scale


def _q5_0(blocks: torch.Tensor) -> Unpacked:
    scale = _half(blocks, 0)
    return _halves(blocks[:, 6:]) | _fifth(blocks[:, 2:6]), scale, torch.zeros_like(scale)


def _q5_1(blocks: torch.Tensor) -> Unpacked:
    scale = _half(blocks, 0)
    return _halves(blocks[:, 8:]) | _fifth(blocks[:, 4:8]), scale, _half(blocks, 2) + 16 * scale


def _fifth(high: torch.Tensor) -> torch.Tensor:
    """Unpacks the bits of uint8 [n, 4] into [n, 32], each as the value 16 or 0."""
    bits = high.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(1) << 4


def _q8_0(blocks: torch.Tensor) -> Unpacked:
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ 128, scale, torch.zeros_like(scale)


def _q4_k(blocks: torch.Tensor) -> Unpacked:
    scale, minimum = _scales(blocks)
    return _halves(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1), scale, 8 * scale - minimum


def _q5_k(blocks: torch.Tensor) -> Unpacked:
    scale, minimum = _scales(blocks)
    codes = _halves(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    fifth = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1) & 1
    return (codes | fifth << 4).flatten(1), scale, 16 * scale - minimum


def _scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima, float32 [n, 8] each, of Q4_K and Q5_K."""
    first, second, last = (blocks[:, at : at + 4] for at in (4, 8, 12))
    steps = torch.cat((first & 63, (last & 15) | (first >> 6 << 4)), 1).float()
    minima = torch.cat((second & 63, (last >> 4) | (second >> 6 << 4)), 1).float()
    return _half(blocks, 0) * steps, _half(blocks, 2) * minima


_Kind = gguf.GGMLQuantizationType

CODES: dict[gguf.GGMLQuantizationType, BlockCodes] = {
    _Kind.Q4_0: BlockCodes(4, _q4_0),
    _Kind.Q4_1: BlockCodes(4, _q4_1),
    _Kind.Q4_K: BlockCodes(4, _q4_k),
    _Kind.Q5_0: BlockCodes(5, _q5_0),
    _Kind.Q5_1: BlockCodes(5, _q5_1),
    _Kind.Q5_K: BlockCodes(5, _q5_k),
    _Kind.Q8_0: BlockCodes(8, _q8_0),
}
"""Type -> its codes."""
