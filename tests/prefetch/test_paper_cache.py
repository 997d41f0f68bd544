"""DyMoE's cache (section 4.4.2) in the fetcher: bytes and experts against a simulation of the paper's rules."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest
from fetch_rig import Rig, rigs
from toys import PLANE_BYTES, SLICED, ToyForm, WholeToy

from edgemoe.cache.lru import PooledLRU, WholeLRU
from edgemoe.storage.base import BLOCK, BlockKind, ExpertKey, Plane

rig = pytest.fixture(rigs)

EQUAL = ToyForm([BlockKind("base", BLOCK, 2), BlockKind("d4", BLOCK, 4)], merged=False)
"""Blocks of one size: the pool has no gap of the wrong size, and the simulation is exact."""

READ = {2: PLANE_BYTES[Plane.BASE], 4: PLANE_BYTES[Plane.BASE] + PLANE_BYTES[Plane.D4]}
SIZE = {2: 1, 4: 2}


class PaperCache:
    """One LRU list of experts at 4 or 2 bits in one pool: no duplicates, promotion by a whole load, reuse from above.

    Args:
        size: the number of blocks in the pool.
        whole: a promotion loads the whole expert; False: the missing plane.
    """

    def __init__(self, size: int, *, whole: bool) -> None:
        self.size, self.whole = size, whole
        self.experts: OrderedDict[ExpertKey, int] = OrderedDict()
        self.read = self.promotions = 0

    def request(self, levels: dict[ExpertKey, int]) -> None:
        for key in sorted(levels.keys() & self.experts.keys()):
            self.experts.move_to_end(key)
        hits = {key for key, level in levels.items() if self.experts.get(key, 0) >= level}
        misses = sorted(levels.keys() - hits, key=lambda key: (key not in self.experts, key))
        loading: dict[ExpertKey, int] = {}
        for key in misses:
            held = self.experts.get(key, 0)
            self.promotions += held > 0
            in_place = bool(held) and not self.whole
            new = SIZE[levels[key]] - (SIZE[held] if in_place else 0)
            while (
                sum(SIZE[level] for level in self.experts.values()) + sum(loading.values()) + new > self.size
            ):
                pinned = hits | loading.keys() | {key}
                del self.experts[next(old for old in self.experts if old not in pinned)]
            loading[key] = new
            self.read += READ[levels[key]] - (READ[held] if in_place else 0)
        for key in misses:
            self.experts[key] = levels[key]
            self.experts.move_to_end(key)


def requests(seed: int) -> list[dict[ExpertKey, int]]:
    """Up to three of 16 experts at a time, some more popular than others, at 4 or 2 bits."""
    chance = Random(seed)
    popular = [expert for expert in range(16) for _ in range(16 // (expert + 1))]
    made = []
    for _ in range(300):
        experts = {chance.choice(popular) for _ in range(3)}
        made.append({ExpertKey(0, expert): chance.choice((4, 4, 4, 2)) for expert in experts})
    return made


def fetch(r: Rig, levels: dict[ExpertKey, int]) -> None:
    """Requests `levels` and looks at nothing else: a look at other experts would be a use of them."""
    with r.fetcher.request(levels) as request:
        came = [lease for leases in request for lease in leases]
    assert all(lease.level >= levels[lease.key] for lease in came)


@pytest.mark.e2e
@pytest.mark.parametrize("whole", [False, True], ids=["planes", "whole"])
@pytest.mark.parametrize("seed", range(3))
def test_the_pool_is_the_papers_cache(rig: type[Rig], seed: int, whole: bool) -> None:
    """After every request the same experts are resident at the same levels, and the same bytes were read."""
    r = rig(WholeToy(EQUAL) if whole else EQUAL, 6, workers=1, policy=PooledLRU)
    paper = PaperCache(12, whole=whole)
    for wanted in requests(seed):
        fetch(r, wanted)
        paper.request(wanted)
        assert r.vram.resident() == paper.experts
        assert r.fetcher.take_counts().ssd_bytes == r.reader.bytes
        assert r.reader.bytes == paper.read
        r.reader.bytes = paper.read = 0
    assert paper.promotions > 10


def test_each_rule_moves_other_bytes(rig: type[Rig]) -> None:
    """Whole promotions read more than missing planes; a pool reads less than blocks split evenly by kind."""

    def read(form: ToyForm | WholeToy, policy: type[WholeLRU]) -> int:
        r = rig(form, 6, workers=1, policy=policy)
        for wanted in requests(0):
            fetch(r, wanted)
        return r.reader.bytes

    whole, planes = read(WholeToy(EQUAL), PooledLRU), read(EQUAL, PooledLRU)
    assert planes < whole < read(WholeToy(EQUAL), WholeLRU)


def test_a_whole_promotion_takes_nothing_from_below(rig: type[Rig]) -> None:
    """Level 2 in either tier is of no use for level 4: all planes are read, and none is counted as DRAM's."""
    a, b, c = (ExpertKey(0, expert) for expert in range(3))
    for form, read in ((WholeToy(SLICED), 1200), (SLICED, 200)):
        r = rig(form, 2, 2, workers=1, policy=WholeLRU)
        r.fetch({a: 2})
        r.fetch({b: 8})
        r.fetch({c: 8})
        assert r.dram is not None
        assert r.dram.resident() == {a: 2}
        r.fetcher.take_counts()
        r.fetch({a: 4})
        counts = r.fetcher.take_counts()
        assert (counts.ssd_bytes, counts.dram_bytes) == (read, 0 if read == 1200 else 8192)
