"""The choice of a layer's hot experts: the best scores, changed only where that is worth a move (DynaExq, 3.5)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Moves(NamedTuple):
    """The changes of one layer's hot set.

    >>> Moves(promote=[3], demote=[1]).promote
    [3]

    Args:
        promote: experts that enter, the hottest first.
        demote: experts that leave, the coldest first.
    """

    promote: list[int]
    demote: list[int]


def capacity(blocks: int, layers: int) -> list[int]:
    """Hot experts of each layer where there are blocks for so many in all, as even as possible.

    >>> capacity(10, 4)
    [3, 3, 2, 2]
    """
    each, more = divmod(blocks, layers)
    return [each + (layer < more) for layer in range(layers)]


def moves(
    scores: npt.NDArray[np.float64],
    hot: npt.NDArray[np.bool_],
    may_enter: npt.NDArray[np.bool_],
    size: int,
    margin: float,
) -> Moves:
    """Compares a layer's hot set with its scores.

    Free places are filled with the best experts that have a score. Beyond that the hottest one outside and the coldest
    one inside change places as long as their scores differ by more than the margin, pair by pair. So equal scores, in
    whatever order they come, move nothing.

    Args:
        scores: float64 [experts].
        hot: [experts], now in the hot set.
        may_enter: bool [experts], experts that could be promoted at once.
        size: experts of a full hot set.
        margin: least difference of scores, as a fraction of the hot set's mean score.

    Returns:
        the changes, after which at most `size` experts are hot.
    """
    inside = np.flatnonzero(hot)
    inside = inside[np.argsort(scores[inside], kind="stable")]
    outside = np.flatnonzero(~hot & may_enter & (scores > 0))
    outside = outside[np.argsort(-scores[outside], kind="stable")]
    excess, room = max(len(inside) - size, 0), max(size - len(inside), 0)
    demote, promote = inside[:excess].tolist(), outside[:room].tolist()
    inside, outside = inside[excess:], outside[room:]
    least = margin * float(scores[inside].mean()) if len(inside) else 0.0
    for better, worse in zip(outside.tolist(), inside.tolist(), strict=False):
        if not scores[better] > scores[worse] + least:
            break
        promote.append(better)
        demote.append(worse)
    return Moves(promote, demote)
