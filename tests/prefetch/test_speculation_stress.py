"""Demands and guesses in any order, in tiers of any size: right bytes, no deadlock, and every byte is accounted for."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from threading import Event

import pytest
from fetch_rig import WAIT, CountingReader, Rig, broken
from hypothesis import given, settings
from hypothesis import strategies as st
from prefetch.transfer import Transfer
from toys import MERGED, SLICED, ToyForm, contents, expected

from prefetch.lookahead_gate import Judge
from storage.base import ExpertKey
from storage.errors import ChecksumMismatch

pytestmark = pytest.mark.e2e

KEYS = st.builds(ExpertKey, st.integers(0, 2), st.integers(0, 3))
LEVELS = st.dictionaries(KEYS, st.sampled_from([2, 4, 8]), max_size=5)
PASS = st.tuples(
    LEVELS, LEVELS, st.sampled_from(["all", "all", "one", "error", "raise", "settle"]), st.booleans()
)
"""(wanted, predicted, how the stream ends, whether reads go on before the engine waits for one)."""


class PatientReader(CountingReader):
    """While not `open`, reads wait; so guesses are under way for as long as the engine has no need to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.open = Event()

    def read(self, key, first, last, into):
        assert self.open.wait(WAIT)
        return super().read(key, first, last, into)


class StressRig(Rig):
    """Opens the reader when the engine waits, and counts what was read on demand."""

    def __init__(
        self, form: ToyForm, vram: int, dram: int | None, workers: int, mode: str, judge: Judge
    ) -> None:
        super().__init__(form, vram, dram, workers, mode, judge)
        traffic = self.fetcher._traffic
        self.reader = traffic._reader = PatientReader()
        self.demanded = 0
        next_done, settle = traffic.next_done, traffic.settle

        def opening(among: Collection[Transfer]) -> Transfer:
            self.reader.open.set()
            return next_done(among)

        def counting(transfer: Transfer) -> object:
            if not transfer.ahead:
                self.demanded += transfer.read or 0
            return settle(transfer)

        traffic.next_done, traffic.settle = opening, counting

    def one_pass(self, wanted: dict[ExpertKey, int], predicted: dict[ExpertKey, int], end: str) -> None:
        """A stream with a guess after its first lease, ended in one of several ways."""
        self.reader.errors = {key: broken(key) for key in [*wanted, *predicted][:1] if end == "error"}
        got = []
        with suppress(ChecksumMismatch, RuntimeError), self.fetcher.stream(wanted) as leases:
            if not wanted:
                self.fetcher.speculate(predicted)
            for lease in leases:
                assert lease.level >= wanted[lease.key]
                assert contents(lease.blocks) == expected(self.form, lease.key, lease.level)
                if not got:
                    self.fetcher.speculate(predicted)
                    assert contents(lease.blocks) == expected(self.form, lease.key, lease.level)
                got.append(lease.key)
                if end == "one":
                    break
                if end == "raise":
                    raise RuntimeError
        self.reader.errors = {}
        if end == "settle":
            self.fetcher.settle()
            self.whole()
        if end in ("all", "settle"):
            assert sorted(got) == sorted(wanted)
        for tier in (self.vram, self.dram) if self.dram else (self.vram,):
            tier.check_integrity()


@pytest.mark.timeout(120)
@settings(max_examples=250, deadline=None)
@given(
    form=st.sampled_from([MERGED, SLICED]),
    vram=st.integers(1, 6),
    dram=st.none() | st.integers(1, 4),
    workers=st.integers(1, 4),
    mode=st.sampled_from(["full", "full", "base", "auto"]),
    passes=st.lists(PASS, max_size=12),
)
def test_any_guesses_and_demands(
    form: ToyForm,
    vram: int,
    dram: int | None,
    workers: int,
    mode: str,
    passes: list[tuple[dict[ExpertKey, int], dict[ExpertKey, int], str, bool]],
) -> None:
    """Leases show the truth; at the end every byte read was demanded, hidden or wasted, and nothing is held."""
    r = StressRig(form, vram, dram, workers, mode, Judge(window=3, rest=2))
    try:
        for wanted, predicted, end, flowing in passes:
            (r.reader.open.set if flowing else r.reader.open.clear)()
            r.one_pass(wanted, predicted, end)
        r.fetcher.settle()
        r.whole()
        counts = r.fetcher.take_counts()
        assert counts.ssd_bytes == r.reader.bytes
        # The rig's clock stands still, so a read that was half hidden counts as hidden.
        assert r.demanded + counts.hidden_bytes + counts.wasted_bytes == r.reader.bytes
        assert counts.speculated_used + counts.speculated_cancelled <= counts.speculated
        for layer in counts.lookahead.values():
            assert layer.right <= min(layer.predicted, layer.wanted)
        assert not r.fetcher._traffic.under_way
        for key in (key for wanted, *_ in passes for key in wanted):
            r.fetch({key: 8})
            r.fetcher.settle()
    finally:
        r.reader.open.set()
        r.fetcher.close()
