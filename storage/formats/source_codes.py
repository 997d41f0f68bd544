"""Uniform codes of a source's matrices, which records keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SourceCodes:
    """A matrix [N, K] whose weights are uniform codes: w = (code - 2^(bits - 1)) * scale + centre.

    Args:
        codes: uint8 [N, K], 0..2^bits - 1.
        scale: float32 [N, ceil(K / group)], of either sign.
        centre: float32 [N, ceil(K / group)].
        group: consecutive inputs that share scale and centre; one of formats.base.GROUPS.
        bits: 2 to 8.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    centre: torch.Tensor
    group: int
    bits: int = 4

    def weights(self) -> torch.Tensor:
        """Computes the source's weights, float32 [N, K]."""
        columns = self.codes.shape[1]

        def wide(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(self.group, 1)[:, :columns]

        return (self.codes.float() - (1 << (self.bits - 1))) * wide(self.scale) + wide(self.centre)

    def rows(self, start: int, end: int) -> SourceCodes:
        """Returns the matrix [end - start, K] of rows start..end."""
        codes, scale, centre = (values[start:end] for values in (self.codes, self.scale, self.centre))
        return SourceCodes(codes, scale, centre, self.group, self.bits)

    def append(self, other: SourceCodes) -> SourceCodes:
        """Returns this matrix with the rows of another one, of the same K, appended, in the narrower of both groups."""
        bits, group = max(self.bits, other.bits), min(self.group, other.group)
        ours, theirs = (matrix.widened(bits).regrouped(group) for matrix in (self, other))
        pairs = ((ours.codes, theirs.codes), (ours.scale, theirs.scale), (ours.centre, theirs.centre))
        codes, scale, centre = map(torch.cat, pairs)
        return SourceCodes(codes, scale, centre, group, bits)

    def widened(self, bits: int) -> SourceCodes:
        """Returns the weights as codes of more bits, each near the middle of the codes that share the present bits."""
        added = bits - self.bits
        if not added:
            return self
        rest = ((1 << added) - 1) // 2
        scale = self.scale / (1 << added)
        return SourceCodes(self.codes << added | rest, scale, self.centre - rest * scale, self.group, bits)

    def regrouped(self, group: int) -> SourceCodes:
        """Returns the same matrix in narrower groups; `group` divides its own."""
        if group == self.group:
            return self
        columns = self.codes.shape[1]
        scale, centre = (regroup(each, self.group, group, columns) for each in (self.scale, self.centre))
        return SourceCodes(self.codes, scale, centre, group, self.bits)


Matrix = torch.Tensor | SourceCodes
"""A matrix [N, K] as floats, or as the codes of its source."""


def regroup(values: torch.Tensor, group: int, ours: int, columns: int) -> torch.Tensor:
    """Expands parameters [N, ceil(K / group)] of a source to [N, ceil(K / ours)] of a record's narrower groups."""
    wide = values.repeat_interleave(max(group // ours, 1), 1)
    return wide[:, : -(-columns // ours)] if group < columns else values.expand(-1, -(-columns // ours))
