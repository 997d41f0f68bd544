"""Ranks of compensators from a budget: by kurtosis, as router-guided low-rank compensation has it, or by what is left.

Pure functions: their results depend on their arguments alone, so bytes do not depend on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

BUCKET = (0, 16, 32, 128, 256, 512, 1024)
"""Ranks that kurtosis_ranks chooses from."""


def kurtosis(weight: torch.Tensor) -> float:
    """The kurtosis of all numbers of a matrix, 3 for a normal distribution; 0 for a constant matrix."""
    centred = weight.double() - weight.double().mean()
    variance = centred.square().mean()
    return float(centred.pow(4).mean() / variance.square()) if variance > 0 else 0.0


def kurtosis_ranks(
    kurtoses: Sequence[float], mean: int, limit: int, bucket: Sequence[int] = BUCKET
) -> list[int]:
    """Assigns ranks greedily, by falling kurtosis: each projection takes the largest rank of the bucket that is left.

    Args:
        kurtoses: kurtosis of each of the projections that share a budget; the first of equal ones goes first.
        mean: budget of a projection: the ranks add up to at most mean * projections.
        limit: largest rank that a projection can have; larger ones of the bucket count as this.
        bucket: ranks to choose from, with 0.

    >>> kurtosis_ranks([3.0, 9.0, 4.0, 5.0], mean=16, limit=32)
    [0, 32, 0, 32]
    """
    ranks, left = [0] * len(kurtoses), mean * len(kurtoses)
    choices = sorted({min(rank, limit) for rank in bucket}, reverse=True)
    for index in sorted(range(len(kurtoses)), key=lambda i: -kurtoses[i]):
        ranks[index] = next(rank for rank in choices if rank <= left)
        left -= ranks[index]
    return ranks


def error_ranks(
    spectra: torch.Tensor, size: Callable[[Sequence[int]], int], mean: int
) -> list[tuple[int, ...]]:
    """Assigns ranks so that little squared error is left: greedily, by the error that a byte takes away.

    An expert gets its ranks in the order of their singular values, and pays for whole blocks: its choices are the most
    ranks of each size, without choices that take away less per byte than a larger one.

    Args:
        spectra: [experts, projections, R], squared singular values of each error, falling.
        size: bytes of an expert's ranks; grows with each.
        mean: the budget is the bytes of this rank for every projection.

    >>> spectra = torch.tensor([[[9.0, 4, 1, 0], [3, 1, 0, 0]], [[5.0, 2, 0, 0], [1, 1, 0, 0]]])
    >>> error_ranks(spectra, sum, mean=1)
    [(2, 1), (1, 0)]
    """
    experts, projections, _ = spectra.shape
    steps = []
    for expert, of_expert in enumerate(spectra.double().numpy()):
        choices = _best_choices(of_expert, size)
        for (start, gain, _), (end, larger, ranks) in pairwise(choices):
            steps.append(((gain - larger) / (end - start), expert, end - start, ranks))
    left = size([mean] * projections) * experts
    assigned = [(0,) * projections] * experts
    ended: set[int] = set()
    for _, expert, cost, ranks in sorted(steps, key=lambda step: step[0]):
        if cost > left:
            ended.add(expert)
        elif expert not in ended:
            assigned[expert] = ranks
            left -= cost
    return assigned


def _best_choices(
    spectra: npt.NDArray[np.float64], size: Callable[[Sequence[int]], int]
) -> list[tuple[int, float, tuple[int, ...]]]:
    """(bytes, squared error taken away, ranks) of each choice of an expert, the best step first."""
    projections, most = spectra.shape
    order = np.argsort(-spectra, axis=None, kind="stable")
    order = order[: np.count_nonzero(spectra)]
    gains = np.cumsum(spectra.reshape(-1)[order])
    ranks = [0] * projections
    choices = [(0, 0.0, (0,) * projections)]
    for index, gain in zip((order // most).tolist(), gains.tolist(), strict=True):
        ranks[index] += 1
        nbytes = size(ranks)
        if nbytes == choices[-1][0]:
            choices.pop()
        # Of three choices the one in the middle goes where it lies below the line between the others.
        while len(choices) > 1 and _slope(choices[-2], choices[-1]) <= _slope(choices[-1], (nbytes, gain)):
            choices.pop()
        choices.append((nbytes, gain, tuple(ranks)))
    return choices


def _slope(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Squared error a byte between two choices."""
    return float((other[1] - one[1]) / (other[0] - one[0]))
