"""Compares how often two programs chose each expert while they answered the same prompt.

The two have the same routers and dense weights, but other experts. The first layer's choices for the prompt are equal
up to rounding; in later layers the skew is similar, and the skew decides how much a cache can save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOP_FRACTION = 0.25
"""Fraction of a layer's experts that count as its popular ones."""


@dataclass(frozen=True)
class LayerPopularity:
    """One layer's choices by both programs.

    Args:
        layer: number of the layer.
        top: fraction of the choices that fall on the most popular quarter of the experts, for each program.
        unused: experts never chosen, for each program.
        correlation: correlation of the two programs' counts, -1 to 1; None where either's counts are all equal.
    """

    layer: int
    top: tuple[float, float]
    unused: tuple[int, int]
    correlation: float | None


def compare(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> list[LayerPopularity]:
    """Compares two programs' counts [layer][expert] layer by layer.

    Raises:
        ValueError: the numbers of layers differ.
    """
    out = []
    for layer, pair in enumerate(zip(one, other, strict=True)):
        a, b = (np.array(counts, dtype=np.float64) for counts in pair)
        even = not a.std() or not b.std()
        out.append(
            LayerPopularity(
                layer,
                (_top(a), _top(b)),
                (int((a == 0).sum()), int((b == 0).sum())),
                None if even else float(np.corrcoef(a, b)[0, 1]),
            )
        )
    return out


def _top(counts: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """The fraction of the choices that fall on the most popular experts; 0 without any choice."""
    most = np.sort(counts)[::-1][: max(round(TOP_FRACTION * len(counts)), 1)]
    return float(most.sum() / counts.sum()) if counts.any() else 0.0


def as_table(layers: Sequence[LayerPopularity], names: tuple[str, str]) -> str:
    """A Markdown table with a row for each layer."""
    one, other = names
    lines = [
        f"| layer | choices on the top quarter: {one} | {other} | never chosen: {one} | {other} | correlation |",
        "|---" * 6 + "|",
    ]
    for row in layers:
        correlation = "-" if row.correlation is None else f"{row.correlation:.2f}"
        top, unused = row.top, row.unused
        lines.append(
            f"| {row.layer} | {top[0]:.2f} | {top[1]:.2f} | {unused[0]} | {unused[1]} | {correlation} |"
        )
    return "\n".join(lines)
