"""Low-rank approximation of quantization errors: ranks from a budget, factors, and their 3-bit codes.

Router-guided low-rank compensation (kurtosis_ranks is its rule); error_ranks and the exact decomposition are ours.
Pure functions: their results depend on their arguments alone, so bytes do not depend on threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from storage.base import ByteRange
from storage.compensator_index import GROUP, FactorArray
from storage.planes import Bytes

BUCKET = (0, 16, 32, 128, 256, 512, 1024)
"""Ranks that kurtosis_ranks chooses from."""

RANK_STEP = 8
"""error_ranks assigns multiples of this."""

_SHIFTS = np.arange(0, 24, 3, dtype="<u4").reshape(1, 8, 1)
"""Place in its lane of each eighth of a group's codes, bits."""

_DIVISORS = (3.6, 4.0, 4.4, 4.8)
"""Candidates for a group's scale: its number of largest magnitude over each; the one with the least error is kept."""


def kurtosis(weight: torch.Tensor) -> float:
    """The kurtosis of all numbers of a matrix, 3 for a normal distribution; 0 for a constant matrix."""
    centred = weight.double() - weight.double().mean()
    variance = centred.square().mean()
    return float(centred.pow(4).mean() / variance.square()) if variance > 0 else 0.0


def kurtosis_ranks(
    kurtoses: Sequence[float], mean: int, most: int, bucket: Sequence[int] = BUCKET
) -> list[int]:
    """Assigns ranks greedily, by falling kurtosis: each projection takes the largest rank of the bucket that is left.

    Args:
        kurtoses: of the projections that share a budget; the first of equal ones goes first.
        mean: budget of a projection: the ranks add up to at most mean * projections.
        most: largest rank that a projection can have; larger ones of the bucket count as this.
        bucket: ranks to choose from, with 0.

    >>> kurtosis_ranks([3.0, 9.0, 4.0, 5.0], mean=16, most=32)
    [0, 32, 0, 32]
    """
    ranks, left = [0] * len(kurtoses), mean * len(kurtoses)
    choices = sorted({min(rank, most) for rank in bucket}, reverse=True)
    for index in sorted(range(len(kurtoses)), key=lambda i: -kurtoses[i]):
        ranks[index] = next(rank for rank in choices if rank <= left)
        left -= ranks[index]
    return ranks


def error_ranks(spectra: torch.Tensor, mean: int, step: int = RANK_STEP) -> list[int]:
    """Assigns ranks so that the squared error that is left is least: greedily, `step` at a time.

    Every projection of an expert takes the same bytes a rank, so error per rank is error per byte.

    Args:
        spectra: [projections, R], squared singular values of each error, falling.
        mean: budget of a projection: the ranks add up to at most mean * projections.
        step: ranks are multiples of it, or R.

    >>> error_ranks(torch.tensor([[9.0, 4, 1, 0], [5, 1, 0, 0]]), mean=2, step=1)
    [3, 1]
    """
    count, most = spectra.shape
    padded = F.pad(spectra.double(), (0, -most % step))
    gains = padded.view(count, -1, step).sum(-1).reshape(-1)
    # Gains of a projection fall, so the largest gains of all are the first steps of each.
    order = torch.argsort(gains, descending=True, stable=True)
    steps = gains.numel() // count
    ranks, left = [0] * count, mean * count
    for index in (order // steps).tolist():
        size = min(step, most - ranks[index])
        if size <= left:
            ranks[index] += size
            left -= size
    return ranks


def spectrum(error: torch.Tensor) -> torch.Tensor:
    """The squared singular values of a float32 matrix, falling, [min(rows, columns)]."""
    values: torch.Tensor = torch.linalg.eigvalsh(_gram(error))
    return values.flip(0).clamp_min(0)


def factor(error: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best approximation of a matrix by a product of this rank, with the singular values split evenly.

    Exact, from the eigenvectors of the smaller Gram matrix: errors of quantization are nearly white, and a randomized
    decomposition misses a tenth of what a small rank can gain.

    Args:
        error: float32 [N, K].
        rank: at most min(N, K).

    Returns:
        u transposed [rank, N] and v [rank, K], float32, largest singular value first.
    """
    if error.shape[0] > error.shape[1]:
        v, u = factor(error.t(), rank)
        return u, v
    values, vectors = torch.linalg.eigh(_gram(error))
    u = vectors[:, values.shape[0] - rank :].flip(1).t().contiguous()
    # The sign of an eigenvector is arbitrary: its largest number is made positive.
    largest = u.gather(1, u.abs().argmax(1, keepdim=True)) if rank else u[:, :1]
    u = u * torch.where(largest < 0, -1.0, 1.0)
    v = u @ error
    root = v.norm(dim=1, keepdim=True).sqrt()
    return u * root, v / root.clamp_min(torch.finfo(torch.float32).tiny)


def _gram(error: torch.Tensor) -> torch.Tensor:
    return error @ error.t() if error.shape[0] <= error.shape[1] else error.t() @ error


def quantize3(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows to 3-bit codes in groups of 64: value ~ (code - 4) * scale.

    Args:
        values: float32 [rows, columns].

    Returns:
        codes uint8 [rows, groups, 64], 4 in the padding; scales bf16 [rows, groups], of either sign.
    """
    rows, columns = values.shape
    grouped = F.pad(values, (0, -columns % GROUP)).view(rows, -1, GROUP)
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    best = torch.full(largest.shape, torch.inf)
    codes, scales = (
        torch.full(grouped.shape, 4, dtype=torch.uint8),
        torch.zeros_like(largest, dtype=torch.bfloat16),
    )
    for divisor in _DIVISORS:
        scale = (largest / -divisor).bfloat16()
        steps = (grouped / scale.float().where(scale != 0, 1)).round().clamp(-4, 3)
        error = (steps * scale.float() - grouped).square().sum(2, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better, (steps + 4).to(torch.uint8), codes)
        scales = torch.where(better, scale, scales)
    return codes, scales.squeeze(2)


def pack(codes: torch.Tensor, scales: torch.Tensor, array: FactorArray, into: Bytes) -> None:
    """Writes an array of factors into a compensator's bytes.

    Args:
        codes: uint8 [rows, groups, 64], 0 to 7.
        scales: bf16 [rows, groups].
        array: its place.
        into: uint8 [bytes of the compensator].
    """
    lanes = codes.numpy().reshape(-1, 8, 8).astype("<u4") << _SHIFTS
    words = np.bitwise_or.reduce(lanes, axis=1)
    into[_slice(array.codes)] = words.view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1)
    into[_slice(array.scales)] = scales.view(torch.int16).numpy().reshape(-1).view(np.uint8)


def unpack(raw: Bytes, array: FactorArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads an array of factors from a compensator's bytes: the inverse of `pack`.

    Returns:
        signed codes int8 [rows, groups, 64], -4 to 3; scales bf16 [rows, groups].
    """
    lanes = np.zeros((array.rows * array.groups * 8, 4), np.uint8)
    lanes[:, :3] = raw[_slice(array.codes)].reshape(-1, 3)
    codes = (lanes.view("<u4").reshape(-1, 1, 8) >> _SHIFTS) & 7
    scales = torch.from_numpy(raw[_slice(array.scales)].view(np.int16).copy()).view(torch.bfloat16)
    signed = torch.from_numpy(codes.astype(np.int8) - np.int8(4))
    return signed.view(array.rows, array.groups, GROUP), scales.view(array.rows, array.groups)


def dequantize3(codes: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    """The float32 [rows, columns] numbers of signed codes int8 [rows, groups, 64] and their scales."""
    return (codes.float() * scales.float().unsqueeze(-1)).flatten(1)[:, :columns]


def _slice(span: ByteRange) -> slice:
    return slice(span.offset, span.end)
