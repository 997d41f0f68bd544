"""Eviction from a tier: the order in which experts leave, and the victims that free blocks for another expert.

Eviction is by kind of block, and every kind has a policy of its own, which sees the experts that have such a block.
Where a reservation needs a block and none is free, the first candidate whose block has no other reference loses it and
every plane above it; under a policy of whole experts it loses everything. Under a pooled policy all kinds share the
bytes of the tier, and candidates lose everything until neighbouring bytes are free for each needed block. So they do
among fixed places, until the bytes of one are free.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from edgemoe.cache.base import EvictionPolicy
from edgemoe.cache.blocks import Indices, SharedBlocks
from edgemoe.cache.fixed_places import FixedPlaces
from edgemoe.cache.level_kinds import LevelKinds
from edgemoe.cache.pool import Pool
from edgemoe.cache.version import TierBlocks, Version
from edgemoe.storage.base import ExpertKey

Victims = tuple[dict[Version, int], Indices]
"""Victim -> the level left of it; and kind's name -> the needed block that this frees."""


class Eviction:
    """The order of eviction of a tier's experts. Not thread-safe: the tier that owns it locks.

    Args:
        kinds: the kinds of the tier's form, by level.
        policies: kind's name -> its policy, for every kind of the form.
        blocks: the blocks of the tier.
        versions: resident expert -> its version; others change it.

    Attributes:
        policies: kind's name -> its policy, for every kind that the tier has blocks of.
        order: the kinds in which victims are chosen: a victim's loss of one frees those after it.
        level_left: (level, kind) -> the level that a victim has left when it loses its block of a kind.
        first: residents marked for eviction before all others, the last of them first.
        last: experts that are evicted after all others.
    """

    def __init__(
        self,
        kinds: LevelKinds,
        policies: Mapping[str, EvictionPolicy],
        blocks: TierBlocks,
        versions: Mapping[ExpertKey, Version],
    ) -> None:
        self._kinds, self._blocks, self._versions = kinds, blocks, versions
        self.policies = {kind: policies[kind] for kind in blocks.kinds}
        whole = any(policy.whole for policy in policies.values())
        self.order = blocks.kinds[::-1] if whole else blocks.kinds
        self.level_left = dict.fromkeys(kinds.below, 0) if whole else kinds.below
        self.first: dict[ExpertKey, None] = {}
        self.last: frozenset[ExpertKey] = frozenset()
        self._counts_predictions = all(policy.counts_predictions for policy in policies.values())

    def mark_first(self, keys: Sequence[ExpertKey]) -> None:
        """Marks resident `keys` as the first candidates, most recent call first, until they are used or leave."""
        for key in reversed(keys):
            if key in self._versions:
                self.first.pop(key, None)
                self.first[key] = None

    def heat(self) -> dict[ExpertKey, float]:
        """Returns how hot each expert is by the policy of the base planes (EvictionPolicy.heat)."""
        return self.policies[self._blocks.kinds[0]].heat()

    def used(self, keys: Sequence[ExpertKey], *, predicted: bool = False) -> None:
        """Counts uses of residents in the policy of every kind of block that they have, and ends their marks.

        Args:
            keys: the experts.
            predicted: they are not requested yet: a use only where the policy counts predictions.
        """
        if predicted and not self._counts_predictions:
            return
        for key in keys:
            self.first.pop(key, None)
        versions = self._versions
        for kind, policy in self.policies.items():
            some = []
            for key in keys:
                if kind in versions[key].indices:
                    some.append(key)
            if some:
                policy.used(some)

    def victims(self, key: ExpertKey, kinds: Sequence[str]) -> Victims | None:
        """Chooses the victims that free one block of each needed kind for an expert. Changes nothing.

        A reservation needs one block of a kind and an eviction only frees more, so kinds are independent and a choice
        is found wherever one exists.

        Returns:
            None: too many experts are leased or reserved.
        """
        blocks = self._blocks
        for kind in kinds:
            if kind not in self.policies:
                return None
        if not isinstance(blocks, SharedBlocks):
            return self._victims_in_pool(blocks, key, kinds)
        losers: dict[Version, int] = {}
        yielded: Indices = {}
        for kind in self.order:
            if kind not in kinds or kind in yielded or blocks.arenas[kind].unused:
                continue
            version = self.first_candidate(kind, key)
            if version is None:
                return None
            left = losers[version] = self.level_left[version.level, kind]
            for lost in version.indices.keys() - self._kinds.names[left]:
                index = version.indices[lost]
                if lost in kinds and blocks.references[lost][index] == 1:
                    yielded.setdefault(lost, index)
        return losers, yielded

    def _victims_in_pool(
        self, pool: Pool | FixedPlaces, key: ExpertKey, kinds: Sequence[str]
    ) -> Victims | None:
        """Chooses victims, which lose everything, until the pool has a place for each needed kind; as `victims`."""
        losers: dict[Version, int] = {}
        while (places := pool.place(key, kinds, [version.indices for version in losers])) is None:
            version = self.first_candidate(pool.kinds[0], key, losers)
            if version is None:
                return None
            losers[version] = 0
        return losers, places

    def first_candidate(
        self, kind: str, key: ExpertKey | None = None, losers: Container[Version] = ()
    ) -> Version | None:
        """Returns the first candidate whose block of a kind has no other reference, `key` and the losers apart."""
        candidates: Iterator[ExpertKey] = chain(reversed(self.first), self.policies[kind].candidates())
        for candidate in self._last_after(candidates) if self.last else candidates:
            version = self._versions[candidate]
            index = version.indices.get(kind)
            if index is None or version.pins or candidate == key or version in losers:
                continue
            if self._blocks.sole(kind, index):
                return version
        return None

    def _last_after(self, order: Iterable[ExpertKey]) -> Iterator[ExpertKey]:
        """Yields keys in an order, but the experts that are evicted last after the others."""
        last = []
        for candidate in order:
            if candidate in self.last:
                last.append(candidate)
            else:
                yield candidate
        yield from last
