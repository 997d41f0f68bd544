"""Engines whose compensators are larger than their budget: bits as with all in memory, and faults by name."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from compensated_steps import PROMPTS, RANKS, alone, together
from compensator_bytes import add_random
from faults import REAL, FaultyPreadv, Pauses, error, short
from integrity import check_integrity
from pairwise import few
from small_store import flip

import edgemoe
from edgemoe.chat.answer_lines import stats_lines
from edgemoe.console.sizes import format_least, format_size
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import ChecksumMismatch, DoesNotFit, ReadFailed, TruncatedFile, UserError
from edgemoe.kv.step import Segment, Step
from edgemoe.memory.compensator_bytes import CompensatorBytes
from edgemoe.memory.describe import plan_lines
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.step import FetcherStep
from edgemoe.storage.base import BLOCK, ExpertKey
from edgemoe.storage.compensators.index import FOLDER, CompensatorIndex
from edgemoe.storage.files.retry import PATIENCE

LARGE = (32, 30, 17)


def ranks(layer: int, expert: int) -> tuple[int, int, int]:
    """Of three sizes, one of them empty."""
    return LARGE if expert % 4 == 2 else RANKS[expert % 3]


@pytest.fixture(scope="module", params=[2, 4], ids=["residual 2", "residual 4"])
def streamed(request, tiny_store, tmp_path_factory) -> Path:
    """The tiny store with compensators of random codes, of level 2 and of level 4."""
    store = Path(shutil.copytree(tiny_store, tmp_path_factory.mktemp("streamed") / "store"))
    add_random(store, ranks, base_level=request.param)
    return store


@pytest.fixture
def own(tiny_store, tmp_path) -> Path:
    """Such a store of level 2, for tests that change it."""
    store = Path(shutil.copytree(tiny_store, tmp_path / "store"))
    add_random(store, ranks)
    return store


def index_of(store: Path) -> CompensatorIndex:
    index = StoreModel.open(store).manifest.compensators
    assert index
    return index


def fewest(store: Path) -> int:
    return 2 * index_of(store).largest


@pytest.mark.e2e
@pytest.mark.parametrize("seed", few(range(4), [0, 1]))
def test_no_bit_depends_on_what_is_in_memory(open_engine, streamed, seed):
    """Random budgets of both, levels, readers, look-ahead and eviction, against everything in memory."""
    chance, base = Random(seed), index_of(streamed).base_level
    how = {"parallel": 4, "compensation": Compensation(chance.choice([1, 2]))}
    how |= chance.choice([{"levels": (base,)}, {"levels": (4, 2), "retention": chance.choice([0.3, 0.6])}])
    resident = open_engine(streamed, **how)
    want = alone(resident)
    assert resident.plan.compensators_resident_bytes == index_of(streamed).nbytes
    limit = chance.randrange(fewest(streamed), index_of(streamed).nbytes, BLOCK)
    limits = {
        "compensators_limit": limit,
        "experts": chance.choice([None, 2, 4]),
        "dram_experts": chance.choice([0, 3]),
        "readers": chance.choice([1, 3]),
        "speculate": chance.choice(["off", "full"]),
        "eviction": chance.choice(["lfru", "lru-planes", "lru-pool"]),
    }
    engine = open_engine(streamed, **how | limits)
    assert engine.plan.compensators_resident_bytes == limit
    engine.take_counts()
    for _ in range(2):
        assert torch.equal(alone(engine), want)
        assert torch.equal(together(engine), want)
    assert engine.take_counts().compensator_bytes > 0
    tier = engine.compensators.where.tier
    check_integrity(tier)
    assert not tier.residents.leases
    assert sum(index_of(streamed).entry(key).length for key in tier.resident()) <= limit


def test_reads_are_counted_in_bytes_and_bits(open_engine, own):
    """Bytes from disk count the compensators that were absent; bits read per weight do not depend on it."""
    how, uses = {"level": 2, "compensation": Compensation(2)}, []
    for limit in (None, fewest(own)):
        engine = open_engine(own, compensators_limit=limit, **how)
        alone(engine)
        engine.take_counts(), engine.take_use()
        alone(engine)
        counts, use = engine.take_counts(), engine.take_use()
        uses.append([*use.compensation.values(), use.bits_computed, use.bits_scheduled])
        assert counts.ssd_bytes == counts.compensator_bytes
        assert (counts.compensator_bytes > 0) == (limit is not None)
        assert counts.compensator_bytes % BLOCK == 0
    assert uses[0] == pytest.approx(uses[1], rel=1e-12)


def test_fused_decode_stops_for_a_missing_compensator_alone(open_engine, own, monkeypatch):
    """A layer is a request of its own only where one that it needs is absent; the kernel computes all others."""
    engine = open_engine(own, level=2, compensation=Compensation(1), compensators_limit=fewest(own))
    compensators, requests = engine.compensators, []
    tier, request = compensators.where.tier, FetcherStep.request
    engine.fill()
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPTS[1])
    absent: list[bool] = []

    def seen(step, levels, **how):
        requests.append(min(levels).layer)
        absent.append(any(not tier.level_of(key) for key in how["compensated"]))
        return request(step, levels, **how)

    monkeypatch.setattr(FetcherStep, "request", seen)
    chosen: list[tuple[int, int]] = []
    engine.watch(lambda layer, experts: chosen.append((layer, int(experts[0, 0]))))
    for token in (11, 250, 42, 99, 7, 180, 64, 12):
        engine.step(Step((Segment(sequence, (token,)),)))
    assert all(absent)
    assert 0 < len(requests) < len(chosen) == 2 * 8
    # A token again, alone in memory with what it needs: no layer stops.
    sequence.crop(len(PROMPTS[1]))
    for key in list(tier.resident()):
        tier.drop(key)
    both = [ExpertKey(layer, expert) for layer, expert in chosen[:2]]
    sizes = [index_of(own).entry(key).length for key in both]
    assert sum(sizes) <= fewest(own)
    engine.step(Step((Segment(sequence, (11,)),)))
    count = len(requests)
    sequence.crop(len(PROMPTS[1]))
    engine.step(Step((Segment(sequence, (11,)),)))
    assert len(requests) == count


def test_experts_at_more_bits_read_none(open_engine, own):
    """Unless exact an expert at resident 4 bits is computed without, and its compensator is not read."""
    how = {"levels": (4, 2), "retention": 0.5, "exact": False, "compensation": Compensation(2)}
    engine = open_engine(own, compensators_limit=fewest(own), **how)
    for key in list(engine.vram.resident()):
        engine.vram.drop(key)
    engine.configure(engine.settings.with_(compensation=None, levels=(4,)))
    alone(engine)
    engine.configure(engine.settings.with_(compensation=Compensation(2), levels=(4, 2)))
    engine.take_counts(), engine.take_use()
    rows = alone(engine)
    use, counts = engine.take_use(), engine.take_counts()
    assert rows.isfinite().all()
    assert use.scheduled[2] > 0 == use.experts.get(2, 0)
    assert (use.compensated, counts.compensator_bytes) == (0, 0)


def missed(engine: Engine, store: Path) -> tuple[ExpertKey, list[int]]:
    """An expert whose compensator a token needs and the budget has not, and that token's prompt."""
    compensators, found = engine.compensators, []
    engine.watch(lambda layer, experts: found.append(ExpertKey(layer, int(experts[0, 0]))))
    for token in range(3, 300):
        sequence = engine.sequences.new()
        tier, found[:] = compensators.where.tier, []
        before = tier.resident()
        engine.prefill(sequence, [token])
        engine.sequences.end(sequence)
        lacking = [key for key in found if compensators.of(key) and key not in before]
        if lacking:
            for key in list(tier.resident()):
                tier.drop(key)
            return lacking[0], [token]
    raise AssertionError("every compensator was in memory")


@pytest.fixture
def engine(open_engine, own) -> Engine:
    return open_engine(own, level=2, compensation=Compensation(1), compensators_limit=fewest(own))


def answer(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """The logits of a prompt, with no compensator in memory before it."""
    tier = engine.compensators.where.tier
    for key in list(tier.resident()):
        tier.drop(key)
    sequence = engine.sequences.new()
    try:
        return engine.prefill(sequence, prompt)
    finally:
        engine.sequences.end(sequence)
        check_integrity(tier)
        assert not tier.residents.leases
        assert not tier.residents.pending


def place(store: Path, key: ExpertKey) -> tuple[Path, int, int]:
    index = index_of(store)
    return store / FOLDER / index.layers[key.layer].file, index.entry(key).offset, index.entry(key).length


def test_a_damaged_factor_fails_its_step_by_name(engine, own):
    """Layer, expert, file and offset; the engine goes on, and once the byte is mended with the same bits."""
    key, prompt = missed(engine, own)
    want = answer(engine, prompt)
    path, offset, length = place(own, key)
    flip(path, offset + length // 3)
    with pytest.raises(ChecksumMismatch) as caught:
        answer(engine, prompt)
    assert f"the compensator of layer {key.layer}, expert {key.expert}" in str(caught.value)
    assert f"from {path} at offset {offset}" in str(caught.value)
    assert (caught.value.exit_code, "edgemoe compensate" in str(caught.value)) == (4, True)
    flip(path, offset + length // 3)
    assert torch.equal(answer(engine, prompt), want)


def test_what_a_disk_does_changes_no_bit(engine, own, monkeypatch):
    """A transient error is read again and counted, a short read goes on; a disk that stays broken is an error."""
    _, prompt = missed(engine, own)
    want, pauses, disk = answer(engine, prompt), Pauses(), FaultyPreadv()
    pauses.install(monkeypatch)
    monkeypatch.setattr(os, "preadv", disk)
    for fault, retries in ((error(errno.EIO), 1), (short(BLOCK // 2), 1), (error(errno.EINVAL), 0)):
        engine.take_counts()
        disk.faults.append(fault)
        assert torch.equal(answer(engine, prompt), want)
        assert not disk.faults
        assert engine.take_counts().read_retries == retries
    disk.rest = pauses.until(pauses.now + 2 * PATIENCE, errno.EIO)
    with pytest.raises(ReadFailed, match=r"the compensator of layer \d, expert \d"):
        answer(engine, prompt)
    disk.rest = REAL
    assert torch.equal(answer(engine, prompt), want)


def test_a_file_that_ends_early_is_named(engine, own):
    key, prompt = missed(engine, own)
    path, offset, _ = place(own, key)
    whole = path.read_bytes()
    os.truncate(path, offset + 1)
    with pytest.raises(TruncatedFile, match=f"the compensator of layer {key.layer}, expert {key.expert}"):
        answer(engine, prompt)
    path.write_bytes(whole)
    assert answer(engine, prompt).isfinite().all()


def test_a_file_that_is_replaced_is_read_as_it_was(engine, own):
    """Another file under its name, and none: an open engine reads what it has opened."""
    key, prompt = missed(engine, own)
    want, (path, *_) = answer(engine, prompt), place(own, key)
    other = path.with_suffix(".other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)
    assert torch.equal(answer(engine, prompt), want)
    path.unlink()
    assert torch.equal(answer(engine, prompt), want)


def plan_of(store: Path, limit: int | None = None, **settings):
    settings = {"levels": (2,), "compensation": Compensation(1)} | settings
    return StoreModel.open(store).plan(vram_limit=limit, settings=RunSettings(**settings), context=64)


@pytest.mark.e2e
def test_a_plan_streams_what_does_not_fit(own):
    """All in memory where both fit, a part at the smallest limit; in between every byte has a purpose."""
    whole, index = plan_of(own), index_of(own)
    assert whole.compensators_resident_bytes == index.nbytes
    settings = RunSettings(levels=(2,), compensation=Compensation(1))
    assert "streamed" not in "".join(plan_lines(whole, settings))
    fits = whole.vram_limit_bytes
    resident = []
    for limit in range(whole.minimum_vram_bytes, fits + 1, (fits - whole.minimum_vram_bytes) // 20):
        found = plan_of(own, limit)
        parts = ("dense", "kv", "workspace", "long_step", "compensators", "plane")
        assert sum(getattr(found, f"{part}_bytes") for part in parts) == limit
        resident.append(found.compensators_resident_bytes)
    assert plan_of(own, fits).compensators_resident_bytes == index.nbytes
    assert resident[0] == 2 * index.largest
    assert resident == sorted(resident)
    line = "\n".join(plan_lines(plan_of(own, whole.minimum_vram_bytes), settings))
    assert re.search(r"compensators +[0-9.]+ KB: [0-9.]+ KB of [0-9.]+ KB, the others are streamed\n", line)
    with pytest.raises(DoesNotFit, match="compensators") as caught:
        plan_of(own, whole.minimum_vram_bytes - 1)
    assert caught.value.minimum == whole.minimum_vram_bytes
    more = plan_of(own, compensators_limit=index.nbytes)
    assert more.minimum_vram_bytes == whole.minimum_vram_bytes + index.nbytes - 2 * index.largest


def test_a_limit_of_compensators_is_kept_or_refused(own):
    """Below two of the largest it is refused with the smallest that works; above all it is all."""
    least = fewest(own)
    assert plan_of(own, compensators_limit=least).compensators_resident_bytes == least
    assert plan_of(own, compensators_limit=1 << 40).compensators_resident_bytes == index_of(own).nbytes
    with pytest.raises(DoesNotFit, match=f"--compensators-limit {format_least(least)}") as caught:
        plan_of(own, compensators_limit=least - 1)
    assert (caught.value.exit_code, caught.value.minimum) == (3, least)
    with pytest.raises(UserError, match="give compensate=1 with it"):
        edgemoe.load(own, levels="2", compensators_limit="1MB")


def test_bytes_of_a_budget_by_use():
    """By hand: the cost of reading all, by use, relative to planes; planes leave the rest; a limit is kept."""
    each = {"experts": 10, "total": 3_000_000, "largest": 300_000, "fixed": 0}
    # Ten reads cost 2,000,000 bytes more on either side.
    assert CompensatorBytes(**each, use=1.0).budget(16_000_000, 33_000_000) == 2_000_000
    assert CompensatorBytes(**each, use=0.2).budget(36_000_000, 39_000_000) == 857_142
    assert CompensatorBytes(**each, use=0.2).budget(41_000_000, 39_000_000) == 2_000_000
    assert CompensatorBytes(**each, use=0.2).budget(50_000_000, 39_000_000) == 3_000_000
    assert CompensatorBytes(**each, use=0.01).budget(10_000_000, 39_000_000) == 600_000
    assert CompensatorBytes(**each, use=0.01, limit=2_000_000).budget(10_000_000, 39_000_000) == 2_000_000


@pytest.mark.e2e
def test_an_answer_stays_within_its_limit(own):
    """Through the API, where the smallest limit streams: the text is as with all in memory, and reads are counted."""
    least = format_least(plan_of(own, exact=True, readers=2).minimum_vram_bytes)
    texts, reads = [], []
    for limit in (None, least):
        with edgemoe.load(own, exact=2, compensate=1, vram_limit=limit, context=64) as model:
            answer = model.generate("fox", max_new_tokens=6, temperature=0)
            line = "\n".join(stats_lines(answer))
            reads.append(answer.compensated.pop("bytes_read"))
            assert f"experts of tokens ({format_size(reads[-1])} read)" in line
            texts.append((answer.text, answer.bits, answer.compensated))
            assert answer.peak_vram_bytes <= answer.limit_bytes
            plan = model.engine.plan
    assert plan.compensators_resident_bytes < plan.compensators_total_bytes
    assert texts[0] == texts[1]
    assert reads[0] == 0 < reads[1]
