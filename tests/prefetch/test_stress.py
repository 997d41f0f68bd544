"""Requests, predictions and changes of level in any order, in tiers of any size: right bytes, no deadlock, every byte
counted."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from random import Random
from threading import Event

import pytest
from fetch_rig import WAIT, CountingReader, Rig, broken
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_integrity
from toys import MERGED, SLICED, ToyForm, contents, expected

from edgemoe.cache.blocks import FreeList
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.errors import ChecksumMismatch
from edgemoe.prefetch.lookahead import LookaheadGate
from edgemoe.prefetch.transfers import Transfer
from edgemoe.storage.base import BlockKind, ExpertKey

pytestmark = pytest.mark.e2e

KEYS = st.builds(ExpertKey, st.integers(0, 2), st.integers(0, 3))
LEVELS = st.dictionaries(KEYS, st.sampled_from([2, 4, 8]), max_size=5)
REQUEST = st.tuples(
    LEVELS, LEVELS, st.sampled_from(["all", "all", "one", "error", "raise", "release"]), st.booleans()
)
"""(wanted, predicted, how the request ends, whether reads go on before the engine waits for one)."""


class PatientReader(CountingReader):
    """Reads wait for the event `open`; so reads ahead are under way until the engine waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.open = Event()

    def read(self, key, first, last, into):
        assert self.open.wait(WAIT)
        return super().read(key, first, last, into)


class StressRig(Rig):
    """Opens the reader when the engine waits, and adds up the bytes that were read on demand."""

    def __init__(
        self, form: ToyForm, vram: int, dram: int | None, workers: int, mode: str, gate: LookaheadGate
    ) -> None:
        super().__init__(form, vram, dram, workers, mode, gate)
        transfers = self.fetcher.transfers
        self.reader = transfers._reader = PatientReader()
        self.demanded = 0
        await_done, end = transfers.await_done, transfers.end_transfer

        def opening(among: Collection[Transfer], seconds: float | None = None) -> None:
            self.reader.open.set()
            await_done(among, seconds)

        def counting(transfer: Transfer) -> object:
            if transfer.owner is None:
                self.demanded += transfer.read or 0
            return end(transfer)

        transfers.await_done, transfers.end_transfer = opening, counting

    def one_request(
        self, levels: dict[ExpertKey, int], predicted: dict[ExpertKey, int], end: str, *, ordered: bool
    ) -> None:
        """Requests experts, as a scan if `ordered`, predicts within the first list, and ends as `end` says."""
        self.reader.errors = {key: broken(key) for key in [*levels, *predicted][:1] if end == "error"}
        got = []
        with (
            suppress(ChecksumMismatch, RuntimeError),
            self.fetcher.request(levels, scan=ordered, ordered=ordered) as request,
        ):
            if not levels:
                self.fetcher.read_ahead(predicted, scan=ordered)
            for leases in request:
                if not got:
                    self.fetcher.read_ahead(predicted, scan=ordered)
                for lease in leases:
                    assert lease.level >= levels[lease.key]
                    assert not (ordered and got) or lease.key > got[-1]
                    assert contents(lease.blocks) == expected(self.form, lease.key, lease.level)
                    got.append(lease.key)
                if end == "one":
                    break
                if end == "raise":
                    raise RuntimeError
        self.reader.errors = {}
        if end == "release":
            self.fetcher.release_pins()
            self.whole()
        if end in ("all", "release"):
            assert sorted(got) == sorted(levels)
        for tier in (self.vram, self.dram) if self.dram else (self.vram,):
            check_integrity(tier)


@pytest.mark.timeout(120)
@settings(max_examples=48)
@given(
    form=st.sampled_from([MERGED, SLICED]),
    vram=st.integers(1, 6),
    dram=st.none() | st.integers(1, 4),
    workers=st.integers(1, 4),
    mode=st.sampled_from(["full", "full", "base", "auto"]),
    requests=st.lists(REQUEST, max_size=12),
    ordered=st.booleans(),
)
def test_any_predictions_and_requests(
    form: ToyForm,
    vram: int,
    dram: int | None,
    workers: int,
    mode: str,
    requests: list[tuple[dict[ExpertKey, int], dict[ExpertKey, int], str, bool]],
    ordered: bool,
) -> None:
    """Leases have the right bytes, in order where it is wanted; every byte read was demanded, hidden or wasted."""
    r = StressRig(form, vram, dram, workers, mode, LookaheadGate(window=3, rest=2))
    try:
        for wanted, predicted, end, flowing in requests:
            (r.reader.open.set if flowing else r.reader.open.clear)()
            r.one_request(wanted, predicted, end, ordered=ordered)
        r.fetcher.release_pins()
        r.whole()
        counts = r.fetcher.take_counts()
        assert counts.ssd_bytes == r.reader.bytes
        # The rig's clock stands still, so a read that was half hidden counts as hidden.
        assert r.demanded + counts.hidden_bytes + counts.wasted_bytes == r.reader.bytes
        assert counts.speculated_used + counts.speculated_cancelled <= counts.speculated
        for layer in counts.lookahead.values():
            assert layer.right <= min(layer.predicted, layer.wanted)
        assert not r.fetcher.transfers.under_way
        for key in (key for wanted, *_ in requests for key in wanted):
            r.fetch({key: 8})
            r.fetcher.release_pins()
    finally:
        r.reader.open.set()
        r.fetcher.close()


SMALL = ToyForm(
    [BlockKind(name, 64, level) for name, level in (("base", 2), ("d4", 4), ("d8", 8))], merged=False
)
"""Small blocks, so that most of a test's time is the tiers' own."""

CROWD = [ExpertKey(layer, expert) for layer in range(2) for expert in range(6)]


class HastyReader(CountingReader):
    """A reader some of whose reads take a while, and some fail."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = Random(seed)

    def read(self, key, first, last, into):
        chance = self._chance.random()
        if chance < 0.1:
            time.sleep(chance / 100)
        elif chance < 0.15:
            raise broken(key)
        self.reads.clear()
        return super().read(key, first, last, into)


class WatchedBlocks(list[int]):
    """Indices of an arena's free blocks; asserts that each block taken is one of the tier's and not in use."""

    def __init__(self, arena: FreeList) -> None:
        super().__init__(arena.unused)
        self._taken, self._capacity = set[int](), arena.capacity
        assert len(self) == arena.capacity

    def pop(self) -> int:
        index = super().pop()
        assert 0 <= index < self._capacity
        assert index not in self._taken
        self._taken.add(index)
        return index

    def append(self, index: int) -> None:
        self._taken.remove(index)
        super().append(index)


def watch_blocks(tier: PlaneTier) -> None:
    """Asserts at every allocation that the block is one of the tier's, and that nothing else uses it."""
    for arena in tier.blocks.arenas.values():
        arena.unused = WatchedBlocks(arena)


class Crowd:
    """Steps, looks at who is hot, ends and errors in a random order, in tiers that are checked after each.

    Args:
        rig: a rig with a HastyReader.
        seed: seed of the order.
    """

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.chance = rig, Random(seed)
        rig.reader = rig.fetcher.transfers._reader = HastyReader(seed)
        self.tiers = [tier for tier in (rig.vram, rig.dram) if tier]
        for tier in self.tiers:
            watch_blocks(tier)

    def some(self, limit: int, levels: tuple[int, ...]) -> dict[ExpertKey, int]:
        keys = self.chance.sample(CROWD, self.chance.randint(1, limit))
        return {key: self.chance.choice(levels) for key in keys}

    def request(self) -> None:
        """Requests experts; their bytes are right, and a slow or failed move raises nothing."""
        rig, end = self.rig, self.chance.random()
        rig.fetcher.advance_changes(start=self.chance.random() < 0.8)
        wanted = self.some(4, (2, 2, 2, 2, 4, 8))
        with suppress(ChecksumMismatch, RuntimeError), rig.fetcher.request(wanted) as request:
            rig.fetcher.read_ahead(self.some(3, (2, 2, 4)))
            for leases in request:
                for lease in leases:
                    assert lease.level >= wanted.pop(lease.key)
                    assert contents(lease.blocks) == expected(SMALL, lease.key, lease.level)
                if end < 0.05:
                    raise RuntimeError
                if end < 0.1:
                    return
            assert not wanted

    def change(self) -> None:
        promote, rate = self.some(6, (2, 4, 4, 8)), self.chance.choice((None, None, 64e3))
        demote = self.some(6, (2, 2, 4))
        demote = {key: level for key, level in demote.items() if key not in promote}
        self.rig.fetcher.change_levels(demote, promote, rate=rate)
        self.rig.fetcher.advance_changes()

    def empty(self) -> None:
        self.rig.fetcher.release_pins()
        self.rig.whole()
        if self.chance.random() < 0.3:
            for tier in self.tiers:
                for key in tier.resident():
                    tier.drop(key)

    def step(self) -> None:
        """Does one thing, and checks every invariant of the tiers."""
        fetcher = self.rig.fetcher
        what = {
            self.request: 40,
            self.change: 15,
            fetcher.advance_changes: 40,
            lambda: fetcher.advance_changes(settle=True): 3,
            self.empty: 2,
        }
        self.rig.clock.now += self.chance.random() / 10
        self.chance.choices(list(what), what.values())[0]()
        for tier in self.tiers:
            check_integrity(tier)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("base", "dram", "mode"),
    [
        *((12, None, "off"), (5, 6, "full")),
        *(pytest.param(*how, marks=pytest.mark.folders) for how in ((5, None, "off"), (12, 6, "full"))),
    ],
)
def test_changes_of_level_in_any_order(base: int, dram: int | None, mode: str) -> None:
    """5,000 requests, looks, steps and ends: no block is lost or used twice, nothing hangs, every byte is counted."""
    r = Rig(SMALL, {"base": base, "d4": 4, "d8": 2}, dram, look_ahead=mode)
    try:
        crowd = Crowd(r, seed=base)
        for _ in range(5_000):
            crowd.step()
        r.fetcher.release_pins()
        r.whole()
        counts = r.fetcher.take_counts()
        assert counts.ssd_bytes == r.reader.bytes
        assert counts.moved_bytes <= counts.ssd_bytes + counts.dram_bytes
        assert counts.speculated_used + counts.speculated_cancelled <= counts.speculated
        assert min(counts.promoted, counts.demoted, counts.deferred) > 100  # by the threads' order
        assert counts.speculated_used > 20
        assert not r.fetcher.transfers.under_way
        assert not r.fetcher.transfers.moving
    finally:
        r.fetcher.close()
