"""The invariants of a tier (cache.base) and of kept sequences, checked against their private state."""

from __future__ import annotations

from collections import Counter

from edgemoe.cache.blocks import SharedBlocks
from edgemoe.cache.fixed_places import FixedPlaces
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.cache.pool import Pool
from edgemoe.engine.scheduler import Scheduler


def check_integrity(tier: PlaneTier) -> None:
    """Raises AssertionError unless references, free blocks, policies and residents of a tier agree."""
    with tier._lock:
        pins = Counter(tier.residents.leases.values())
        alive = pins.keys() | set(tier.residents.versions.values())
        for version in alive:
            assert version.pins == pins[version]
            assert tuple(version.indices) == tuple(version.blocks) == tier.kinds.names[version.level]
        states = [*alive, *tier.residents.pending.values()]
        references = Counter(block for state in states for block in state.indices.items())
        _check_blocks(tier.blocks, references)
        for kind, policy in tier.eviction.policies.items():
            holders = [key for key, version in tier.residents.versions.items() if kind in version.indices]
            assert sorted(policy.candidates()) == sorted(holders)
        assert tier.eviction.first.keys() <= tier.residents.versions.keys()
        assert all(key == version.key for key, version in tier.residents.versions.items())


def _check_blocks(blocks: SharedBlocks | Pool | FixedPlaces, references: Counter[tuple[str, int]]) -> None:
    if isinstance(blocks, FixedPlaces):
        (kind,) = blocks.kinds
        assert blocks._references == [references[kind, index] for index in range(len(blocks._references))]
        return
    if isinstance(blocks, Pool):
        units: Counter[int] = Counter()
        for (kind, first), count in references.items():
            units.update(dict.fromkeys(range(first, first + blocks._units[kind]), count))
        assert list(blocks._references) == [units[unit] for unit in range(len(blocks._references))]
        assert not any(blocks._references[blocks._in_use :])
        return
    for kind, counts in blocks.references.items():
        assert counts == [references[kind, index] for index in range(len(counts))]
        free, in_use = blocks.arenas[kind].unused, blocks.arenas[kind].capacity
        assert sorted(free) == [index for index, count in enumerate(counts[:in_use]) if not count]
        assert not any(counts[in_use:])


def check_kept(scheduler: Scheduler) -> None:
    """Raises AssertionError unless kept sequences are found by their hashes alone and have reserved what they use."""
    kept, engine = scheduler.kept_sequences, scheduler.engine
    listed = {id(each) for each in kept.index.entries}
    found: dict[int, set[bytes]] = {}
    for digest, of_hash in kept.index._by_hash.items():
        assert of_hash
        for each in of_hash:
            found.setdefault(id(each), set()).add(digest)
    assert found.keys() == listed
    for each in kept.index.entries:
        assert found[id(each)] == set(each.hashes)
        assert len(each.tokens) == each.sequence.length <= each.sequence.reserved <= each.sequence.context
    sequences = [*kept._running, *(each.sequence for each in kept.index.entries)]
    assert len({id(sequence) for sequence in sequences}) == len(sequences)
    taken = sum(map(engine.sequences.bytes_of, sequences))
    assert taken == engine.memory.kv_bytes <= engine.plan.kv_bytes
