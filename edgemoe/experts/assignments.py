"""Which rows of a layer each expert computes, and at what level: the router's choice, grouped by expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from edgemoe.cache.base import Lease
from edgemoe.kernels.base import MOST_ROWS
from edgemoe.storage.base import ExpertKey

_LEVEL_RANGE = 16
"""Above every level: packs (expert, level) into one number."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The (token, slot) pairs of one expert that are computed at one level.

    Args:
        level: scheduled for them.
        rows: how many.
        places: int64 [rows], indices into the flat [T * k]: the compensated ones, then the others, each ascending.
        compensated: rows that are computed with the expert's compensator, at a level that has one.
    """

    level: int
    rows: int
    places: torch.Tensor
    compensated: int = 0

    def parts(self, most: int) -> Iterator[Assignment]:
        """Parts of at most `most` rows, where it has more."""
        for start in range(0, self.rows, most):
            places = self.places[start : start + most]
            compensated = min(max(self.compensated - start, 0), len(places))
            yield Assignment(self.level, len(places), places, compensated)


@dataclass(frozen=True)
class Assignments:
    """One layer's experts for the rows of a step, and how their results are summed.

    >>> chosen, levels = torch.tensor([[2, 0], [2, 1]]), torch.tensor([[4, 2], [4, 0]])
    >>> made = Assignments.of(chosen, levels, torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    >>> [(expert, one.level, one.places.tolist()) for expert, some in made.by_expert.items() for one in some]
    [(0, 2, [1]), (2, 4, [0, 2])]
    >>> made.rows, made.skipped
    (3, [1])

    Args:
        by_expert: expert -> its assignments, of one level each; of a single token in the router's order.
        gates: float32 [T, k], gate weights, 0 where the level is 0.
        rows: (token, slot) pairs that are computed.
        skipped: number of (token, slot) pairs of each skipped expert.
    """

    by_expert: dict[int, list[Assignment]]
    gates: torch.Tensor
    rows: int
    skipped: list[int]

    @classmethod
    def of(
        cls,
        chosen: torch.Tensor,
        levels: torch.Tensor,
        gates: torch.Tensor,
        compensated: torch.Tensor | None = None,
    ) -> Assignments:
        """Groups a router's choice.

        Args:
            chosen: int64 [T, k], experts.
            levels: int64 [T, k]; 0: skipped.
            gates: [T, k], 0 where the level is 0.
            compensated: bool [T, k]; None: no pair.
        """
        if chosen.shape[0] == 1:
            flags = compensated[0].tolist() if compensated is not None else ()
            return cls.of_token(chosen[0].tolist(), levels[0].tolist(), gates.float(), flags)
        by_expert: dict[int, list[Assignment]] = {}
        skipped, rows = [], chosen.numel()
        joined = (chosen * _LEVEL_RANGE + levels).reshape(-1)
        plain = torch.ones_like(joined) if compensated is None else (~compensated).reshape(-1).long()
        order = (joined * 2 + plain).argsort(stable=True)
        values, group, counts = joined[order].unique_consecutive(return_inverse=True, return_counts=True)
        firsts = (counts - torch.zeros_like(counts).index_add_(0, group, plain[order])).tolist()
        sizes = counts.tolist()
        for value, size, places, first in zip(
            values.tolist(), sizes, order.split(sizes), firsts, strict=True
        ):
            expert, level = divmod(value, _LEVEL_RANGE)
            if level:
                by_expert.setdefault(expert, []).append(Assignment(level, size, places, first))
            else:
                skipped.append(size)
                rows -= size
        return cls(by_expert, gates.float().contiguous(), rows, skipped)

    @classmethod
    def of_token(
        cls,
        chosen: Sequence[int],
        levels: Sequence[int],
        gates: torch.Tensor,
        compensated: Sequence[bool] = (),
    ) -> Assignments:
        """Makes the short list of a single token's assignments.

        Args:
            chosen: k experts, in the router's order.
            levels: k levels; 0: skipped.
            gates: float32 [1, k], 0 where the level is 0.
            compensated: k; empty: no expert.
        """
        count = len(chosen)
        slots = zip(chosen, levels, _each_slot(count), compensated or _no_slot(count), strict=True)
        by_expert = {
            expert: [Assignment(level, 1, place, int(flag))] for expert, level, place, flag in slots if level
        }
        skipped = [1] * levels.count(0)
        return cls(by_expert, gates, len(by_expert), skipped)

    def wanted(self, layer: int) -> dict[ExpertKey, int]:
        """Key -> the highest level of each expert."""
        if len(self.gates) == 1:
            return {ExpertKey(layer, expert): some[0].level for expert, some in self.by_expert.items()}
        return {
            ExpertKey(layer, expert): max(one.level for one in some)
            for expert, some in self.by_expert.items()
        }

    def batches(self, leases: Sequence[Lease], most: int) -> list[list[tuple[Lease, Assignment]]]:
        """Splits the assignments of leased experts into calls.

        A call has at most `most` rows, or a larger part of one assignment. A part has at most MOST_ROWS rows.
        """
        batches: list[list[tuple[Lease, Assignment]]] = []
        left = 0
        for lease in leases:
            for one in self.by_expert[lease.key.expert]:
                for assignment in one.parts(MOST_ROWS) if one.rows > MOST_ROWS else (one,):
                    left -= assignment.rows
                    if left < 0:
                        batches.append([])
                        left = most - assignment.rows
                    batches[-1].append((lease, assignment))
        return batches


@cache
def _each_slot(slots: int) -> tuple[torch.Tensor, ...]:
    """The places of a single token's slots."""
    return tuple(torch.tensor([slot]) for slot in range(slots))


@cache
def _no_slot(slots: int) -> tuple[bool, ...]:
    """No slot of a token is compensated."""
    return (False,) * slots
