"""Another number of blocks for a tier: which experts leave, and which move to other blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edgemoe.cache.base import Victim
from edgemoe.cache.blocks import SharedBlocks
from edgemoe.cache.eviction import Eviction
from edgemoe.cache.pool import Pool
from edgemoe.cache.residents import Residents
from edgemoe.cache.version import Version

Evicted = Callable[[Victim], None]
"""Called with every expert that leaves whole, while its blocks are as they were."""


def resize(
    blocks: SharedBlocks | Pool,
    residents: Residents,
    eviction: Eviction,
    capacity: Mapping[str, int],
    on_evict: Evicted,
) -> None:
    """Changes the number of blocks, and takes or returns their memory; no version may be pinned.

    Experts without a block leave in the order of eviction, whole or in part; others keep their planes, some of them in
    other blocks.

    Args:
        blocks: the blocks of a tier.
        residents: its experts.
        eviction: the order in which they leave.
        capacity: kind's name -> blocks, at most as many as the tier began with.
        on_evict: called with each expert that leaves whole.
    """
    for kind in blocks.kinds[:1] if isinstance(blocks, Pool) else eviction.order:
        while blocks.exceeds(kind, capacity):
            version = eviction.first_candidate(kind)
            assert version
            _leave(residents, version, eviction.level_left[version.level, kind], on_evict)
    blocks.set_capacity(capacity)
    for version in list(residents.versions.values()):
        if leaving := blocks.leaving(version.indices):
            _move(blocks, residents, version, leaving, on_evict)
    blocks.fit_memory()


def _leave(residents: Residents, version: Version, level: int, on_evict: Evicted) -> None:
    """Demotes an expert whose blocks serve other purposes."""
    if level == 0:
        on_evict(Victim(version.key, version.level, version.blocks))
    residents.demote(version, level)


def _move(
    blocks: SharedBlocks | Pool,
    residents: Residents,
    version: Version,
    kinds: Sequence[str],
    on_evict: Evicted,
) -> None:
    """Copies blocks of some kinds to places that stay; where there is none the expert leaves."""
    indices = blocks.relocate(version.indices, kinds)
    if indices is None:
        _leave(residents, version, 0, on_evict)
        return
    views = blocks.views(indices)
    for kind in kinds:
        views[kind][:] = version.blocks[kind]
    residents.replace(version.key, Version(version.key, version.level, indices, views, version.arriving))
