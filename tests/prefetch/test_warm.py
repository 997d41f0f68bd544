"""Fetcher.fill: experts read into free blocks before their first request, and scans that evict their own experts."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from device_double import DoubleDevice
from device_rig import DeviceRig
from engine_rig import DECODED, PROMPT, engines_on, logits
from fetch_rig import WAIT, Rig, broken, rigs
from toys import MERGED, SLICED, disk_bytes

from edgemoe.prefetch import fetcher
from edgemoe.prefetch.lookahead import LookaheadGate
from edgemoe.prefetch.step import FetcherStep
from edgemoe.storage.base import ExpertKey

KEYS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(3)]

rig = pytest.fixture(rigs)


@pytest.fixture(autouse=True)
def batches_of_two(monkeypatch) -> None:
    """Has a batch read two toy experts at level 4."""
    monkeypatch.setattr(fetcher, "BATCH_BYTES", 2 * SLICED.bytes_at(4))


@pytest.fixture
def engines(tiny_store, monkeypatch):
    """Opens engines on a double, or in RAM; ends them after the test."""
    yield from engines_on(tiny_store, monkeypatch)


def fill(r: Rig | DeviceRig, keys: Sequence[ExpertKey], *levels: int) -> None:
    """Fills free blocks to the end."""
    r.fetcher.fill(keys, levels or (4,), lambda: True)


def test_the_first_keys_come_while_blocks_are_free(rig: type[Rig]) -> None:
    """In several batches; no byte more is read, and the counters start anew."""
    r = rig(SLICED, 5)
    fill(r, KEYS)
    assert r.vram.resident() == dict.fromkeys(KEYS[:5], 4)
    assert r.reader.bytes == 5 * disk_bytes(0, 4)
    assert r.fetcher.take_counts().requests == 0
    r.whole()


def test_the_next_level_uses_blocks_that_the_highest_leaves(rig: type[Rig]) -> None:
    """With blocks of d4 for two experts only, the others come at 2."""
    r = rig(SLICED, 4)
    r.vram.blocks.take(("d4",), {})  # as if the tier had fewer
    r.vram.blocks.take(("d4",), {})
    fill(r, KEYS, 4, 2)
    assert r.vram.resident() == dict.fromkeys(KEYS[:2], 4) | dict.fromkeys(KEYS[2:4], 2)


def test_no_expert_is_evicted_or_read_again(rig: type[Rig]) -> None:
    """A resident expert stays, at any level, and nothing is read for a full tier."""
    r = rig(MERGED, 3)
    r.fetch({KEYS[5]: 8, KEYS[0]: 2})
    fill(r, KEYS)
    assert r.vram.resident() == {KEYS[5]: 8, KEYS[0]: 2, KEYS[1]: 4}
    read = r.reader.bytes
    fill(r, KEYS)
    assert r.reader.bytes == read
    r.whole()


def test_a_prompt_evicts_experts_of_the_last_layers_first(rig: type[Rig]) -> None:
    """The evicted are neither requested ones, nor an expert that was used before the others came."""
    r = rig(SLICED, 4)
    r.fetch({KEYS[2]: 4})
    fill(r, [KEYS[0], KEYS[3], KEYS[4]])
    assert r.fetch({KEYS[0]: 4, KEYS[1]: 4}, scan=True) == [KEYS[0], KEYS[1]]
    assert r.vram.resident().keys() == {KEYS[0], KEYS[1], KEYS[2], KEYS[3]}


def test_layers_of_a_scan_evict_each_other(rig: type[Rig]) -> None:
    """Experts that a scan read are evicted first, the latest before the earlier, until a request that is no scan."""
    r = rig(SLICED, 3)
    for key in KEYS[4:6]:  # one after the other: together they arrive in either order
        r.fetch({key: 4})
    for key in KEYS[:3]:
        scanned(r, key)
        assert r.vram.resident().keys() == {KEYS[4], KEYS[5], key}
    with r.fetcher.request({KEYS[3]: 4}) as request:
        assert [[lease.key for lease in leases] for leases in request] == [[KEYS[3]]]
    assert r.vram.resident().keys() == {KEYS[5], KEYS[2], KEYS[3]}
    r.whole()


def scanned(r: Rig, *keys: ExpertKey) -> None:
    """Requests experts at level 4 as part of a scan; touches no other expert."""
    with r.fetcher.request(dict.fromkeys(keys, 4), scan=True) as request:
        assert sorted(lease.key for leases in request for lease in leases) == list(keys)


def test_an_expert_that_is_requested_again_stays(rig: type[Rig]) -> None:
    """The second part of a prompt found an expert that the first part had read."""
    r = rig(SLICED, 3)
    for keys in (KEYS[:2], KEYS[1:2], KEYS[2:3], KEYS[3:4]):
        scanned(r, *keys)
    assert r.vram.resident().keys() == {KEYS[0], KEYS[1], KEYS[3]}


def test_a_scan_marks_its_predicted_experts_too(rig: type[Rig]) -> None:
    """An expert that was read ahead for the scan is evicted before experts that were resident."""
    r = rig(SLICED, 3, look_ahead="full")
    r.fetch({KEYS[5]: 4})
    with r.fetcher.request({KEYS[0]: 4}, scan=True) as request:
        r.fetcher.read_ahead({KEYS[1]: 4})
        assert [[lease.key for lease in leases] for leases in request] == [[KEYS[0]]]
        r.landed(KEYS[1])
    scanned(r, KEYS[1])
    scanned(r, KEYS[2])
    assert r.vram.resident().keys() == {KEYS[5], KEYS[0], KEYS[2]}


def test_go_on_ends_it_within_a_batch(rig: type[Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A read under way arrives, and no other begins."""
    r = rig(SLICED, 6, workers=1)
    monkeypatch.setattr(fetcher, "BATCH_BYTES", 6 * SLICED.bytes_at(4))
    begun, gate = r.reader.delay(KEYS[1])
    calls = []

    def go_on() -> bool:
        calls.append(True)
        if len(calls) == 1:  # before the batch; the second call follows its first expert
            return True
        assert begun.wait(WAIT)
        threading.Timer(0.2, gate.set).start()
        return False

    r.fetcher.fill(KEYS, [4], go_on)
    assert r.reader.reads == KEYS[:2]
    assert r.vram.resident().keys() == set(KEYS[:2])
    r.whole()


def test_go_on_is_called_before_every_batch(rig: type[Rig]) -> None:
    """False before the first batch reads nothing."""
    r = rig(SLICED, 6)
    r.fetcher.fill(KEYS, [4], lambda: False)
    assert r.reader.reads == []


def test_a_second_fill_keeps_the_marks_of_the_first(rig: type[Rig]) -> None:
    """An expert that was used stays while experts of either fill can be evicted."""
    r = rig(SLICED, 5)
    r.fetch({KEYS[2]: 4})
    for keys in (KEYS[:2], KEYS[3:5]):
        fill(r, keys)
    assert len(r.vram.resident()) == 5
    for key in (KEYS[5], *(ExpertKey(2, expert) for expert in range(3))):
        scanned(r, key)
        assert KEYS[2] in r.vram.resident()


def test_experts_beside_a_damaged_one_are_marked_too(rig: type[Rig]) -> None:
    """No request wants them yet either."""
    r = rig(SLICED, 6, workers=1)
    r.reader.errors[KEYS[1]] = broken(KEYS[1])
    fill(r, KEYS)
    assert r.vram.resident().keys() == r.vram.eviction.first.keys() != set()


def test_a_damaged_expert_ends_it_without_an_error(rig: type[Rig]) -> None:
    """The tier is whole, and a request for the expert raises the error."""
    r = rig(SLICED, 6)
    r.reader.errors[KEYS[1]] = broken(KEYS[1])
    fill(r, KEYS)
    assert KEYS[1] not in r.vram.resident()
    r.whole()
    with pytest.raises(type(broken(KEYS[1]))):
        r.fetch({KEYS[1]: 4})


def test_an_open_request_or_a_closed_source_refuses(rig: type[Rig]) -> None:
    """Both are ValueErrors, and nothing is read."""
    r = rig(SLICED, 2)
    with r.fetcher.request({}), pytest.raises(ValueError, match="no open request, got one"):
        fill(r, KEYS)
    r.fetcher.close()
    with pytest.raises(ValueError, match="closed"):
        fill(r, KEYS)
    assert r.reader.reads == []


def test_the_gate_does_not_count_it(rig: type[Rig]) -> None:
    """Its requests are without predictions, and mode auto is on afterwards."""
    r = rig(SLICED, 6, look_ahead="auto", gate=LookaheadGate(window=2))
    fill(r, KEYS)
    assert len(r.vram.resident()) == 6
    assert r.fetcher.looks_ahead


def test_a_prediction_ends_before_it(rig: type[Rig]) -> None:
    """Its reads and leases end, so that the blocks can be filled."""
    r = rig(SLICED, 6, look_ahead="full")
    r.predict({KEYS[5]: 4})
    fill(r, KEYS)
    assert not r.fetcher.predicting
    assert len(r.vram.resident()) == 6
    r.whole()


@pytest.mark.e2e
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("experts", [None, 5])
def test_an_engine_gives_the_same_logits_with_fewer_reads(engines, experts, on_device) -> None:
    """Logits are equal to the bit; where every expert fits, there is no read."""

    def device():
        return DoubleDevice(seed=1) if on_device else None

    plain, filled = engines(device(), experts), engines(device(), experts)
    filled.fill()
    assert len(filled.vram.resident()) == (experts or filled.shape.experts)
    assert torch.equal(logits(plain), logits(filled))
    before, after = plain.take_counts(), filled.take_counts()
    assert after.ssd_bytes < before.ssd_bytes
    assert after.ssd_bytes == 0 or experts


def test_a_prompt_scans_and_a_token_does_not(engines, monkeypatch) -> None:
    """21 tokens want nearly all of a layer; one token wants two experts, two tokens at most four."""
    engine, scans = engines(None, 6), []
    request = FetcherStep.request

    def seen(step, levels, *, scan=False, **how):
        scans.append((len(levels), scan))
        return request(step, levels, scan=scan, **how)

    monkeypatch.setattr(FetcherStep, "request", seen)
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPT)
    engine.prefill(sequence, DECODED[:1])
    engine.prefill(sequence, DECODED[1:3])
    assert {scan for _, scan in scans} == {False, True}
    assert all(scan == (wanted > 4) for wanted, scan in scans)


def test_an_engine_without_a_cache_fills_nothing(engines) -> None:
    """A run that loads on demand keeps doing so."""
    engine = engines(None, cache=False)
    engine.fill()
    assert engine.vram.resident() == {}
