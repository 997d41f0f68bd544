"""Which rows of a layer each expert computes: what the router chose, by expert and level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from cache.base import Lease


@dataclass(frozen=True)
class Share:
    """The (token, slot) pairs of one expert that are scheduled at one level."""

    level: int
    rows: int
    places: torch.Tensor
    """int64 [rows], ascending indices into the flat [T * k]."""
    slot: int = 0
    """Of a single token: the one place."""


def shares_of(top_k_index: torch.Tensor, levels: torch.Tensor) -> dict[int, list[Share]]:
    """expert -> its (token, slot) pairs by level."""
    if top_k_index.shape[0] == 1:
        chosen = zip(top_k_index[0].tolist(), levels[0].tolist(), _each(top_k_index.shape[1]), strict=True)
        return {expert: [Share(level, 1, *place)] for expert, level, place in chosen}
    shares: dict[int, list[Share]] = {}
    joined = (top_k_index * _LEVEL_RANGE + levels).reshape(-1)
    order = joined.argsort(stable=True)
    values, counts = joined[order].unique_consecutive(return_counts=True)
    sizes = counts.tolist()
    for value, rows, group in zip(values.tolist(), sizes, order.split(sizes), strict=True):
        expert, level = divmod(value, _LEVEL_RANGE)
        shares.setdefault(expert, []).append(Share(level, rows, group))
    return shares


@cache
def _each(slots: int) -> tuple[tuple[torch.Tensor, int], ...]:
    """Every slot of a single token, as a share has it."""
    return tuple((torch.tensor([slot]), slot) for slot in range(slots))


_LEVEL_RANGE = 16
"""Above every level: packs (expert, level) into one number."""


def take_skipped(shares: dict[int, list[Share]]) -> list[Share]:
    """Removes what is at level 0 from `shares`, and returns it."""
    skipped = [share for parts in shares.values() for share in parts if share.level == 0]
    if skipped:
        kept = {expert: [s for s in parts if s.level] for expert, parts in shares.items()}
        shares.clear()
        shares.update((expert, parts) for expert, parts in kept.items() if parts)
    return skipped


def batches(
    leases: Sequence[Lease], shares: dict[int, list[Share]], most: int
) -> Iterator[list[tuple[Lease, Share]]]:
    """Every expert's shares, as many together as have `most` rows, or one that has more."""
    batch: list[tuple[Lease, Share]] = []
    room = most
    for lease in leases:
        for share in shares[lease.key.expert]:
            room -= share.rows
            if batch and room < 0:
                yield batch
                batch, room = [], most - share.rows
            batch.append((lease, share))
    if batch:
        yield batch
