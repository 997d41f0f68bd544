"""Requests and predictions in any order, in tiers of any size: right bytes, no deadlock, every byte counted."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from threading import Event

import pytest
from fetch_rig import WAIT, CountingReader, Rig, broken
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_integrity
from toys import MERGED, SLICED, ToyForm, contents, expected

from prefetch.lookahead_gate import LookaheadGate
from prefetch.transfers import Transfer
from storage.base import ExpertKey
from storage.errors import ChecksumMismatch

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
        transfers = self.fetcher._transfers
        self.reader = transfers._reader = PatientReader()
        self.demanded = 0
        await_done, end = transfers.await_done, transfers.end

        def opening(among: Collection[Transfer], seconds: float | None = None) -> None:
            self.reader.open.set()
            await_done(among, seconds)

        def counting(transfer: Transfer) -> object:
            if not transfer.ahead:
                self.demanded += transfer.read or 0
            return end(transfer)

        transfers.await_done, transfers.end = opening, counting

    def one_request(self, wanted: dict[ExpertKey, int], predicted: dict[ExpertKey, int], end: str) -> None:
        """Requests experts, predicts within the first list, and ends the request as `end` says."""
        self.reader.errors = {key: broken(key) for key in [*wanted, *predicted][:1] if end == "error"}
        got = []
        with suppress(ChecksumMismatch, RuntimeError), self.fetcher.request(wanted) as request:
            if not wanted:
                self.fetcher.read_ahead(predicted)
            for leases in request:
                if not got:
                    self.fetcher.read_ahead(predicted)
                for lease in leases:
                    assert lease.level >= wanted[lease.key]
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
            assert sorted(got) == sorted(wanted)
        for tier in (self.vram, self.dram) if self.dram else (self.vram,):
            check_integrity(tier)


@pytest.mark.timeout(120)
@settings(max_examples=250)
@given(
    form=st.sampled_from([MERGED, SLICED]),
    vram=st.integers(1, 6),
    dram=st.none() | st.integers(1, 4),
    workers=st.integers(1, 4),
    mode=st.sampled_from(["full", "full", "base", "auto"]),
    requests=st.lists(REQUEST, max_size=12),
)
def test_any_predictions_and_requests(
    form: ToyForm,
    vram: int,
    dram: int | None,
    workers: int,
    mode: str,
    requests: list[tuple[dict[ExpertKey, int], dict[ExpertKey, int], str, bool]],
) -> None:
    """Leases have the right bytes; every byte read was demanded, hidden or wasted; no lease is left."""
    r = StressRig(form, vram, dram, workers, mode, LookaheadGate(window=3, rest=2))
    try:
        for wanted, predicted, end, flowing in requests:
            (r.reader.open.set if flowing else r.reader.open.clear)()
            r.one_request(wanted, predicted, end)
        r.fetcher.release_pins()
        r.whole()
        counts = r.fetcher.take_counts()
        assert counts.ssd_bytes == r.reader.bytes
        # The rig's clock stands still, so a read that was half hidden counts as hidden.
        assert r.demanded + counts.hidden_bytes + counts.wasted_bytes == r.reader.bytes
        assert counts.speculated_used + counts.speculated_cancelled <= counts.speculated
        for layer in counts.lookahead.values():
            assert layer.right <= min(layer.predicted, layer.wanted)
        assert not r.fetcher._transfers.under_way
        for key in (key for wanted, *_ in requests for key in wanted):
            r.fetch({key: 8})
            r.fetcher.release_pins()
    finally:
        r.reader.open.set()
        r.fetcher.close()
