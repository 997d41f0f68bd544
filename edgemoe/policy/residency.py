"""The choice of a layer's hot experts: the best scores, changed only where that is worth a move (DynaExq, 3.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


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
    slack: int = 0,
) -> Moves:
    """Compares a layer's hot set with its scores: `all_moves` of one layer, whose arrays are [experts]."""
    return all_moves(scores[None], hot[None], may_enter[None], [size], margin, slack)[0]


def all_moves(
    scores: npt.NDArray[np.float64],
    hot: npt.NDArray[np.bool_],
    may_enter: npt.NDArray[np.bool_],
    sizes: Sequence[int],
    margin: float,
    slack: int = 0,
) -> list[Moves]:
    """Compares the hot sets of layers with their scores, all layers at once.

    Free places are filled with the best experts that have a score. Beyond that the hottest one outside and the coldest
    one inside change places as long as their scores differ by more than the margin, pair by pair. So equal scores, in
    whatever order they come, move nothing.

    Args:
        scores: float64 [layers, experts].
        hot: [layers, experts], now in the hot set.
        may_enter: bool [layers, experts], experts that could be promoted at once.
        sizes: experts of a full hot set, for each layer.
        margin: least difference of scores, as a fraction of the hot set's mean score.
        slack: a hot expert changes places only from the rank size + slack on, 0 for the best score of the layer.

    Returns:
        the changes of each layer, after which at most as many experts as its size are hot.
    """
    outside = ~hot & may_enter & (scores > 0)
    coldest = np.argsort(np.where(hot, scores, np.inf), axis=1, kind="stable")
    hottest = np.argsort(np.where(outside, -scores, np.inf), axis=1, kind="stable")
    inside_count, outside_count = hot.sum(1), outside.sum(1)
    more = inside_count - (full := np.asarray(sizes))
    excess, room = np.maximum(more, 0), np.maximum(-more, 0)
    ranked_in = np.take_along_axis(np.where(hot, scores, np.nan), coldest, 1)
    fallen = np.take_along_axis(_ranks(scores) >= full[:, None] + slack, coldest, 1) | (not slack)
    ranked_out = np.take_along_axis(np.where(outside, scores, np.nan), hottest, 1)
    pairs = _pairs(ranked_in, fallen, ranked_out, excess, room, margin)
    entering, leaving = np.minimum(room, outside_count) + pairs, excess + pairs
    return [
        Moves(hottest[i, :enter].tolist(), coldest[i, :leave].tolist())
        for i, (enter, leave) in enumerate(zip(entering.tolist(), leaving.tolist(), strict=True))
    ]


def _ranks(scores: Scores) -> Counts:
    """The rank of each expert of each layer, [layers, experts], 0 for the best score."""
    return np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1)


def _pairs(
    inside: Scores, fallen: Flags, outside: Scores, excess: Counts, room: Counts, margin: float
) -> Counts:
    """How many experts of each layer change places, pair by pair: the hottest outside and the coldest inside.

    Args:
        inside: float64 [layers, experts], scores of the hot set, the coldest first; NaN after them.
        fallen: bool of that shape and order, whether the expert's rank allows another one in its place.
        outside: float64 [layers, experts], scores of experts that could enter, the hottest first; NaN after them.
        excess: the hot set's coldest experts that leave in any case, for each layer.
        room: the hottest experts outside that enter in any case, for each layer.
        margin: least difference of two scores that change places, as a fraction of the hot set's mean score.
    """
    place = np.arange(inside.shape[1])
    stays = np.where(place >= excess[:, None], inside, np.nan)
    count = np.maximum((~np.isnan(stays)).sum(1), 1)
    least = margin * np.nansum(stays, 1) / count
    last = len(place) - 1
    worse = np.take_along_axis(stays, np.minimum(excess[:, None] + place, last), 1)
    better = np.take_along_axis(outside, np.minimum(room[:, None] + place, last), 1)
    known = np.maximum(excess, room)[:, None] + place <= last
    allowed = np.take_along_axis(fallen, np.minimum(excess[:, None] + place, last), 1)
    wins = known & allowed & (better > worse + least[:, None])  # NaN wins nothing
    pairs: Counts = np.logical_and.accumulate(wins, 1).sum(1)
    return pairs
