"""Low-rank approximation of quantization errors: factors, and their 3-bit codes.

Pure functions: their results depend on their arguments alone, so bytes do not depend on threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from edgemoe.storage.base import ByteRange
from edgemoe.storage.compensators.geometry import GROUP, CompensatorGeometry, FactorArray
from edgemoe.storage.files.unbuffered import aligned
from edgemoe.storage.record.planes import Bytes

Quantized = tuple[torch.Tensor, torch.Tensor]
"""(codes int8 [rows, groups, 64] from -4 to 3, scales bf16 [rows, groups])."""

_SHIFTS = np.arange(0, 24, 3, dtype="<u4").reshape(1, 8, 1)
"""Place in its lane of each eighth of a group's codes, bits."""

_DIVISORS = (3.6, 4.0, 4.4, 4.8)
"""Candidates for a group's scale: its number of largest magnitude over each; the one with the least error is kept."""


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
        rank: number of columns of u, at most min(N, K).

    Returns:
        u transposed [rank, N] and v [rank, K], float32, largest singular value first.
    """
    if error.shape[0] > error.shape[1]:
        v, u = factor(error.t(), rank)
        return u, v
    if not rank:
        return torch.zeros(0, error.shape[0]), torch.zeros(0, error.shape[1])
    values, vectors = torch.linalg.eigh(_gram(error))
    u = vectors[:, values.shape[0] - rank :].flip(1).t().contiguous()
    # The sign of an eigenvector is arbitrary: its largest number is made positive.
    largest = u.gather(1, u.abs().argmax(1, keepdim=True))
    u = u * torch.where(largest < 0, -1.0, 1.0)
    v = u @ error
    root = v.norm(dim=1, keepdim=True).sqrt()
    return u * root, v / root.clamp_min(torch.finfo(torch.float32).tiny)


def refit(u: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """The v [rank, K] that leaves the least of an error [N, K], given u transposed [rank, N] as it was quantized.

    Takes back a fifth of what the quantization of u costs.
    """
    # By eigenvalues: rows of u are zero where the error has a smaller rank, and torch.linalg.lstsq gives other bits
    # in one call of a thousand.
    wide = u.double()
    values, vectors = torch.linalg.eigh(wide @ wide.t())
    zero = values <= values[-1:] * len(values) * torch.finfo(torch.float32).eps
    along = vectors.t() @ (u @ error).double() / values.masked_fill(zero, torch.inf).unsqueeze(1)
    found: torch.Tensor = (vectors @ along).float()
    return found


def _gram(error: torch.Tensor) -> torch.Tensor:
    return error @ error.t() if error.shape[0] <= error.shape[1] else error.t() @ error


def quantize3(values: torch.Tensor) -> Quantized:
    """Quantizes rows to 3-bit codes in groups of 64: value ~ (code - 4) * scale.

    Args:
        values: float32 [rows, columns].

    Returns:
        codes - 4, int8 [rows, groups, 64] from -4 to 3, 0 in the padding; scales bf16 [rows, groups], of either sign.
    """
    rows, columns = values.shape
    groups = -(-columns // GROUP)
    grouped = F.pad(values, (0, groups * GROUP - columns)).view(rows, groups, GROUP)
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    best = torch.full(largest.shape, torch.inf)
    steps, scales = torch.zeros_like(grouped), torch.zeros_like(largest, dtype=torch.bfloat16)
    for divisor in _DIVISORS:
        scale = (largest / -divisor).bfloat16()
        tried = (grouped / scale.float().where(scale != 0, 1)).round().clamp(-4, 3)
        error = (tried * scale.float() - grouped).square().sum(2, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        steps = torch.where(better, tried, steps)
        scales = torch.where(better, scale, scales)
    return steps.to(torch.int8), scales.squeeze(2)


def pack(codes: torch.Tensor, scales: torch.Tensor, array: FactorArray, into: Bytes) -> None:
    """Writes an array of factors into a compensator's bytes.

    Args:
        codes: int8 [rows, groups, 64], -4 to 3.
        scales: bf16 [rows, groups].
        array: its place.
        into: uint8 [bytes of the compensator].
    """
    lanes = (codes.numpy().reshape(-1, 8, 8) + np.int8(4)).astype("<u4") << _SHIFTS
    words = np.bitwise_or.reduce(lanes, axis=1)
    into[_slice(array.codes)] = words.view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1)
    into[_slice(array.scales)] = scales.view(torch.int16).numpy().reshape(-1).view(np.uint8)


def compensator(errors: Sequence[torch.Tensor], geometry: CompensatorGeometry) -> tuple[Bytes, float]:
    """Computes the bytes of an expert's compensator.

    Args:
        errors: the errors of gate [I, H], up [I, H] and down [H, I], float32.
        geometry: the compensator's sizes, with its ranks.

    Returns:
        uint8 [geometry.nbytes], BLOCK-aligned; the sum of the squares that it leaves of the errors.
    """
    factors: dict[tuple[str, str], list[Quantized]] = {name: [] for name in geometry.arrays}
    left = 0.0
    for matrix, error, rank in zip(("gate_up", "gate_up", "down"), errors, geometry.ranks, strict=True):
        u = quantize3(factor(error, rank)[0])
        u_read = dequantize3(*u, error.shape[0])
        v = quantize3(refit(u_read, error))
        left += float(
            (error - u_read.t() @ dequantize3(*v, error.shape[1])).square().sum(dtype=torch.float64)
        )
        factors[matrix, "u"].append(u)
        factors[matrix, "v"].append(v)
    raw = aligned(geometry.nbytes)
    raw.fill(0)
    for name, array in geometry.arrays.items():
        codes, scales = (torch.cat(parts) for parts in zip(*factors[name], strict=True))
        pack(codes, scales, array, raw)
    return raw, left


def unpack(raw: Bytes, array: FactorArray) -> Quantized:
    """Reads an array of factors from a compensator's bytes: the inverse of `pack`.

    Returns:
        codes int8 [rows, groups, 64], -4 to 3; scales bf16 [rows, groups].
    """
    lanes = np.zeros((array.rows * array.groups * 8, 4), np.uint8)
    lanes[:, :3] = raw[_slice(array.codes)].reshape(-1, 3)
    codes = (lanes.view("<u4").reshape(-1, 1, 8) >> _SHIFTS) & 7
    scales = torch.from_numpy(raw[_slice(array.scales)].view(np.int16).copy()).view(torch.bfloat16)
    signed = torch.from_numpy(codes.astype(np.int8) - np.int8(4))
    return signed.view(array.rows, array.groups, GROUP), scales.view(array.rows, array.groups)


def dequantize3(codes: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
    """The float32 [rows, columns] numbers of codes int8 [rows, groups, 64] and their scales."""
    return (codes.float() * scales.float().unsqueeze(-1)).flatten(1)[:, :columns]


@dataclass(frozen=True)
class Correction:
    """A low-rank part U V of one matrix [N, K], whose rows are blocks of equal size with a rank each.

    Args:
        v: float32 [rank, K], the rows of the first block first.
        u: float32 [rank, N / blocks], transposed.
        ranks: the ranks of the blocks: two for gate_up, gate first; one for down.
    """

    v: torch.Tensor
    u: torch.Tensor
    ranks: tuple[int, ...]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Computes x (U V)^T: float32 [T, N] for x float32 [T, K]."""
        sums = (x @ self.v.t()).split(self.ranks, 1)
        return torch.cat([t @ u for t, u in zip(sums, self.u.split(self.ranks), strict=True)], 1)

    def weights(self) -> torch.Tensor:
        """Computes U V, float32 [N, K]."""
        pairs = zip(self.u.split(self.ranks), self.v.split(self.ranks), strict=True)
        return torch.cat([u.t() @ v for u, v in pairs])


def corrections(raw: Bytes, geometry: CompensatorGeometry) -> dict[str, Correction]:
    """Decodes a compensator: the corrections of `gate_up` and `down`.

    Args:
        raw: uint8 [geometry.nbytes].
        geometry: the geometry of the compensator.
    """
    arrays = {name: dequantize3(*unpack(raw, a), a.columns) for name, a in geometry.arrays.items()}
    return corrections_of(arrays, geometry)


def corrections_of(
    factors: Mapping[tuple[str, str], torch.Tensor], geometry: CompensatorGeometry
) -> dict[str, Correction]:
    """The corrections of `gate_up` and `down`.

    Args:
        factors: the factors of each array, float32 [rank, columns].
        geometry: the geometry of the compensator.
    """
    gate, up, down = geometry.ranks
    return {
        matrix: Correction(factors[matrix, "v"], factors[matrix, "u"], ranks)
        for matrix, ranks in (("gate_up", (gate, up)), ("down", (down,)))
    }


def _slice(span: ByteRange) -> slice:
    return slice(span.offset, span.end)
