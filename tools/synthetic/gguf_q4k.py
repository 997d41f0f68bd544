"""Encodes llama.cpp's Q4_K: 256 weights in 144 bytes, with eight scales and minima of 6 bits and 4-bit codes.

The package gguf reads this type but does not write it. Rounding is to the nearest, without llama.cpp's search for
better scales, which does not change the speed that the synthetic weights are for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgemoe.errors import UserError

WEIGHTS = 256
"""Weights of a block."""

BYTES = 144
"""Bytes of a block: scale and minimum in fp16, 12 bytes of 6-bit factors, 128 of codes."""

_SUBS = 8


def blocks_in(shape: tuple[int, ...]) -> int:
    """The number of blocks of a row of a tensor.

    Raises:
        UserError: the rows do not divide into blocks.
    """
    if shape[-1] % WEIGHTS:
        found = f"a matrix of {' x '.join(map(str, shape))}"
        raise UserError(f"rows in multiples of {WEIGHTS} weights for Q4_K", found, "choose another shape")
    return shape[-1] // WEIGHTS


def quantize(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encodes weights float32 [..., 256 n] as blocks uint8 [..., 144 n].

    A weight is d * s * q - m * t with d and m of its block and s and t of its group of 32: the group's range, extended
    to contain 0, in 16 steps.

    Raises:
        UserError: the rows do not divide into blocks.
    """
    shape = (*weights.shape[:-1], blocks_in(weights.shape) * BYTES)
    subs = weights.reshape(-1, _SUBS, WEIGHTS // _SUBS)
    low = np.minimum(subs.min(2), 0)
    step, drop = (subs.max(2).clip(0) - low) / 15, -low
    scale, minimum = (_half(each.max(1, keepdims=True) / 63) for each in (step, drop))
    steps = np.rint(step / np.maximum(scale, np.float32(1e-30))).clip(0, 63)
    drops = np.rint(drop / np.maximum(minimum, np.float32(1e-30))).clip(0, 63)
    width = np.maximum(scale * steps, np.float32(1e-30))[..., None]
    codes = np.rint((subs + (minimum * drops)[..., None]) / width).clip(0, 15).astype(np.uint8)
    out = np.empty((len(subs), BYTES), np.uint8)
    out[:, 0:2] = scale.astype(np.float16).view(np.uint8)
    out[:, 2:4] = minimum.astype(np.float16).view(np.uint8)
    out[:, 4:16] = _packed(steps.astype(np.uint8), drops.astype(np.uint8))
    pairs = codes.reshape(-1, _SUBS // 2, 2, WEIGHTS // _SUBS)
    out[:, 16:] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(subs), -1)
    return out.reshape(shape)


def _half(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounds to fp16, so that codes are computed with the scales that a reader sees."""
    return values.astype(np.float16).astype(np.float32)


def _packed(steps: NDArray[np.uint8], drops: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Packs eight pairs of 6-bit numbers, uint8 [blocks, 8] each, into 12 bytes in llama.cpp's layout."""
    half = _SUBS // 2
    first = steps[:, :half] | (steps[:, half:] >> 4) << 6
    second = drops[:, :half] | (drops[:, half:] >> 4) << 6
    third = (steps[:, half:] & 15) | (drops[:, half:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)
