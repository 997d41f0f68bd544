"""The arithmetic of a record: quantizing to 8-bit codes, and slicing and merging their planes.

Per group of consecutive inputs, with s the step and z the centre, both stored rounded to bf16:

    code = round((w - z) / s + 135.5)                       0..255
    level 8:  w ~ (code - 135.5) * s + z
    level 4:  w ~ (16 * (code >> 4) + 7.5 - 135.5) * s + z  mid-point of the codes that share 4 bits
    level 2:  w ~ (64 * (code >> 6) + 31.5 - 135.5) * s + z

With n = code >> 4 and S = 16 s, level 4 is (n - 8) * S + z: the 4-bit kernel's own form, so parameters are
stored as (S, z). Level 8 adds (m - 8) * s + s/2 for m = code & 15, whose parameters are powers of two
times S: exact. Level 2 is level 4's form at n = 4 * (code >> 6) + 1 and centre z + S/2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

_CHUNK = 1 << 14
"""uint64 words merged at a time: five such arrays stay inside a 1 MiB L2 cache."""

REST = {4: 8, 5: 4, 6: 2, 8: 0}
"""Bits of a code -> what the 8-bit code of which it is the top has in its other bits."""

_LOW = np.uint64(0x3333333333333333)
_HIGH = np.uint64(0xCCCCCCCCCCCCCCCC)
_MIDPOINT = np.uint64(0x1111111111111111)
_TWO = np.uint64(2)


def quantize(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a matrix group-wise to 8-bit codes against the bf16-rounded parameters.

    The step is computed from the rounded centre and rounded up, so no weight is clipped. A constant group is legal and
    exact to the centre's rounding.

    Args:
        weight: [N, K] floating point, K a multiple of group; finite.
        group: consecutive inputs per scale.

    Returns:
        codes uint8 [N, K]; parameters bf16 [K / group, N, 2] holding (16 s, z).
    """
    rows, cols = weight.shape
    w = weight.to(torch.float32).view(rows, cols // group, group)
    low, high = w.amin(-1), w.amax(-1)
    # 135.5 steps lie below the centre and 119.5 above it: the centre that balances both ends.
    centre = (low + (high - low) * (135.5 / 255)).to(torch.bfloat16).float()
    step = torch.maximum((high - centre) / 119.5, (centre - low) / 135.5)
    scale = round_up_bf16(step * 16)
    s = (scale.float() / 16).clamp_min(torch.finfo(torch.float32).tiny)
    # round(x + 135.5) to even is off at the ties; floor(x + 136) is round-half-up, the same everywhere.
    steps = (w - centre.unsqueeze(-1)).div_(s.unsqueeze(-1)).add_(136).clamp_(0, 255)
    # The cast of a non-negative value is its floor; numpy's cast is several times as fast as torch's.
    codes = torch.from_numpy(steps.numpy().astype(np.uint8))
    parameters = torch.stack((scale, centre.to(torch.bfloat16)), -1).transpose(0, 1).contiguous()
    return codes.view(rows, cols), parameters


def rest_of(bits: int, level: int) -> float:
    """The value, in steps, of a code's 8 - bits lower bits at the highest level that computes it, 8 or 4.

    Level 4 counts the middle of the 16 codes that share the upper bits.
    """
    return 7.5 if level == 4 else float(REST[bits])


def quantize_narrow(
    weight: torch.Tensor, group: int, bits: int, level: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a matrix group-wise to codes of fewer than 8 bits, the top of 8-bit codes, as `quantize` does.

    Args:
        weight: [N, K] floating point, K a multiple of group; finite.
        group: consecutive inputs per scale.
        bits: 4, 5 or 6.
        level: the highest level that computes the matrix, 8 or 4.

    Returns:
        codes uint8 [N, K], 0..255, whose lower 8 - bits bits are REST[bits]; parameters as `quantize`.
    """
    rows, cols = weight.shape
    w = weight.to(torch.float32).view(rows, cols // group, group)
    low, high = w.amin(-1), w.amax(-1)
    unit = 1 << (8 - bits)
    below = 135.5 - rest_of(bits, level)  # steps from the lowest code's value to the centre
    above = 256 - unit - below
    centre = (low + (high - low) * (below / (below + above))).to(torch.bfloat16).float()
    scale = round_up_bf16(torch.maximum((high - centre) / above, (centre - low) / below) * 16)
    s = (scale.float() / 16).clamp_min(torch.finfo(torch.float32).tiny)
    steps = (w - centre.unsqueeze(-1)).div_(s.unsqueeze(-1) * unit).add_(below / unit + 0.5)
    codes = torch.from_numpy(steps.clamp_(0, (1 << bits) - 1).numpy().astype(np.uint8))
    codes = codes.bitwise_left_shift_(8 - bits).bitwise_or_(REST[bits])
    parameters = torch.stack((scale, centre.to(torch.bfloat16)), -1).transpose(0, 1).contiguous()
    return codes.view(rows, cols), parameters


def round_up_bf16(x: torch.Tensor) -> torch.Tensor:
    """Rounds non-negative float32 up to bf16."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def dequantize(codes: torch.Tensor, parameters: torch.Tensor, level: int) -> torch.Tensor:
    """Computes the float32 [N, K] weights of `level`: slow and plain, the reference of the kernels' tests.

    Args:
        codes: uint8 [N, K].
        parameters: bf16 [K / group, N, 2] as quantize returns them.
        level: 8, 4 or 2.
    """
    rows, cols = codes.shape
    shift = 8 - level
    middle: float = (2**shift - 1) / 2
    value = (codes >> shift).float() * float(2**shift) + middle - 135.5
    scale, centre = parameters.float().transpose(0, 1).unbind(-1)
    grouped = value.view(rows, parameters.shape[0], -1)
    return (grouped * (scale / 16).unsqueeze(-1) + centre.unsqueeze(-1)).view(rows, cols)


def split(p4: Bytes) -> tuple[Bytes, Bytes]:
    """Slices a nibble array into (top 2 bits, next 2 bits), each half as long.

    Byte i of a plane serves byte i of p4's first half and byte i of its second half.
    """
    a, b = p4[: p4.size // 2], p4[p4.size // 2 :]
    low, high, two = np.uint8(0x33), np.uint8(0xCC), np.uint8(2)
    base = ((a >> two) & low) | (b & high)
    d4 = (a & low) | ((b & low) << two)
    return base, d4


def merge(p4: Bytes) -> None:
    """Merges d4 | base, one after the other, into the nibble array that they were sliced from, in place.

    The planes lie in the reverse order of the disk, so that one exchange of two-bit fields merges them: six operations
    a word instead of eight (docs/decisions/0004). Releases the GIL in its inner loops.

    Args:
        p4: uint8, 8-byte aligned, its length a multiple of 16.
    """
    words = p4.view(np.uint64)
    half = words.size // 2
    scratch = np.empty(min(_CHUNK, half), np.uint64)
    for start in range(0, half, _CHUNK):
        end = min(start + _CHUNK, half)
        d4, base, differing = words[start:end], words[half + start : half + end], scratch[: end - start]
        np.right_shift(d4, _TWO, out=differing)
        np.bitwise_xor(differing, base, out=differing)
        np.bitwise_and(differing, _LOW, out=differing)
        np.bitwise_xor(base, differing, out=base)
        np.left_shift(differing, _TWO, out=differing)
        np.bitwise_xor(d4, differing, out=d4)


def midpoint(p4: Bytes) -> None:
    """Turns a nibble array whose second half is base into level 2's nibbles 4 * (code >> 6) + 1, in place.

    Args:
        p4: uint8, 8-byte aligned, its length a multiple of 16; its first half is overwritten.
    """
    words = p4.view(np.uint64)
    half = words.size // 2
    rest, base = words[:half], words[half:]
    np.bitwise_and(base, _LOW, out=rest)
    np.left_shift(rest, _TWO, out=rest)
    np.bitwise_or(rest, _MIDPOINT, out=rest)
    np.bitwise_and(base, _HIGH, out=base)
    np.bitwise_or(base, _MIDPOINT, out=base)


def base_of(p4: Bytes, out: Bytes) -> None:
    """Slices base out of a nibble array of level 2 or 4 into `out`, half as long."""
    words, base = p4.view(np.uint64), out.view(np.uint64)
    half = words.size // 2
    np.right_shift(words[:half], _TWO, out=base)
    np.bitwise_and(base, _LOW, out=base)
    np.bitwise_or(base, words[half:] & _HIGH, out=base)


def truncate_to_base(p4: Bytes, out: Bytes) -> None:
    """Writes level 2's nibbles of a level 4 nibble array into `out`, of the same length."""
    np.bitwise_and(p4.view(np.uint64), _HIGH, out=out.view(np.uint64))
    np.bitwise_or(out.view(np.uint64), _MIDPOINT, out=out.view(np.uint64))
