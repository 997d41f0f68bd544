"""How popular each expert is with two programs that answered the same prompt, side by side.

The two share routers and dense weights, not experts. So the first layer's choices for the prompt are the same but
for rounding, and further layers agree in kind: how uneven they are decides how much a cache can save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOP_SHARE = 0.25
"""Of a layer's experts, how many count as its popular ones."""


@dataclass(frozen=True)
class LayerPopularity:
    """One layer's experts with both programs.

    Args:
        layer: of the model.
        top: share of all choices that fall on the most popular quarter of the experts, for each program.
        unused: experts never chosen, for each program.
        correlation: of the two programs' counts, -1 to 1; None where one of them is even.
    """

    layer: int
    top: tuple[float, float]
    unused: tuple[int, int]
    correlation: float | None


def compare(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> list[LayerPopularity]:
    """Counts [layer][expert] of two programs, layer by layer.

    Raises:
        ValueError: not as many layers.
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
    """Share of the choices that fall on the most popular; 0 where there are none."""
    most = np.sort(counts)[::-1][: max(round(TOP_SHARE * len(counts)), 1)]
    return float(most.sum() / counts.sum()) if counts.any() else 0.0


def as_table(layers: Sequence[LayerPopularity], names: tuple[str, str]) -> str:
    """Markdown."""
    one, other = names
    lines = [
        f"| layer | choices on the top quarter: {one} | {other} | never chosen: {one} | {other} | correlation |",
        "|---" * 6 + "|",
    ]
    for of in layers:
        correlation = "-" if of.correlation is None else f"{of.correlation:.2f}"
        lines.append(
            f"| {of.layer} | {of.top[0]:.2f} | {of.top[1]:.2f} | {of.unused[0]} | {of.unused[1]} | {correlation} |"
        )
    return "\n".join(lines)
