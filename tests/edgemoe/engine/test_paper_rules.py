"""An engine under DyMoE's own rules: its reads, against a simulation fed with the experts that it requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import pytest
import torch
from counted_engine import CountedEngine

from edgemoe.bench.timed_source import TimedSource, TimedStep
from edgemoe.bench.timeline import Timeline
from edgemoe.engine.engine import StoreModel
from edgemoe.engine.parts import Wraps
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch import workers
from edgemoe.prefetch.base import ExpertSource, StepExperts
from edgemoe.storage.base import ExpertKey

BASE, D4 = 8192, 4096
"""Bytes of the tiny store's planes."""

SIZE = {2: BASE, 4: BASE + D4}
PAPER = {"eviction": "lru-pool", "promotion": "whole", "scan": "off", "readers": 1}
PROMPTS = torch.randint(3, 300, (4, 24), generator=torch.Generator().manual_seed(1)).tolist()


class Recorded(TimedSource):
    """Sends a request for every layer, and keeps what was wanted and predicted."""

    def __init__(self, source: ExpertSource) -> None:
        super().__init__(source, Timeline())
        self.requests: list[dict[ExpertKey, int]] = []
        self.predicted: list[dict[ExpertKey, int]] = []

    def begin(self) -> RecordedStep:
        return RecordedStep(self._source.begin(), self)


class RecordedStep(TimedStep):
    """A step of a Recorded source."""

    def __init__(self, step: StepExperts, source: Recorded) -> None:
        super().__init__(step, source, Timeline())
        self._notes = source

    def request(self, levels: Mapping[ExpertKey, int], **how):
        self._notes.requests.append(dict(levels))
        return super().request(levels, **how)

    def read_ahead(self, predicted: Mapping[ExpertKey, int], **how: bool) -> None:
        self._notes.predicted.append(dict(predicted))
        super().read_ahead(predicted, **how)


def run(store: StoreModel, monkeypatch: pytest.MonkeyPatch, experts: int, **changes: object):
    """Answers PROMPTS with blocks for so many experts: (source, bytes read, bytes of the pool, what is resident)."""
    monkeypatch.setattr(workers, "SCAN_WORKERS", 0)  # one reader: experts arrive in the order of their reads
    settings = RunSettings(**{"levels": (4, 2), "retention": 0.6, "critical": "ceil"} | PAPER | changes)
    least = store.plan(vram_limit=None, settings=settings, context=64).minimum_vram_bytes
    plan = store.plan(vram_limit=least + (experts - 2) * SIZE[4], settings=settings, context=64)
    pool = sum(plan.vram_blocks[kind.name] * kind.size for kind in store.form.kinds_at(4))
    with CountedEngine(store, plan, settings, Wraps(source=Recorded)) as engine:
        source = engine.source
        assert isinstance(source, Recorded)
        sequence = engine.sequences.new()
        for prompt in PROMPTS:
            sequence.crop(0)
            token = int(engine.prefill(sequence, prompt).argmax())
            for _ in range(8):
                token = int(engine.step(Step((Segment(sequence, (token,)),))).argmax())
        return source, engine.take_counts().ssd_bytes, pool, engine.vram.resident()


def simulated(requests: list[dict[ExpertKey, int]], pool: int) -> tuple[int, dict[ExpertKey, int]]:
    """Bytes that the paper's cache reads, and what is in it: one LRU list over whole experts, loaded whole again."""
    cache: OrderedDict[ExpertKey, int] = OrderedDict()
    read = 0
    for wanted in requests:
        for key in sorted(wanted.keys() & cache.keys()):
            cache.move_to_end(key)
        hits = {key for key, level in wanted.items() if cache.get(key, 0) >= level}
        loading: dict[ExpertKey, int] = {}
        for key in sorted(wanted.keys() - hits, key=lambda key: (key not in cache, key)):
            size = SIZE[wanted[key]]
            while sum(map(SIZE.__getitem__, (*cache.values(), *loading.values()))) + size > pool:
                del cache[next(old for old in cache if old not in hits | loading.keys() | {key})]
            loading[key] = wanted[key]
            read += size
        for key, level in loading.items():
            cache[key] = level
            cache.move_to_end(key)
    return read, dict(cache)


@pytest.mark.e2e
def test_an_engine_reads_what_the_papers_cache_reads(tiny_store, monkeypatch):
    """Prompts and tokens at 4/2 in room for 11 of 16 experts: gaps in the pool cost at most 4 % more bytes."""
    source, read, pool, _ = run(StoreModel.open(tiny_store), monkeypatch, 11)
    want, _ = simulated(source.requests, pool)
    assert {level for wanted in source.requests for level in wanted.values()} == {4, 2}
    assert want <= read <= 1.04 * want
    planes = run(StoreModel.open(tiny_store), monkeypatch, 11, promotion="planes")[1]
    assert planes < read


def test_a_prompts_use_counts_as_any_other(tiny_store, monkeypatch):
    """At one level the pool has no gaps: bytes and residents are the simulation's; with the scan rule they are not."""
    store = StoreModel.open(tiny_store)
    one = {"levels": (4,), "exact": True}
    source, read, pool, resident = run(store, monkeypatch, 11, **one)
    assert any(len(wanted) > 4 for wanted in source.requests)
    assert (read, resident) == simulated(source.requests, pool)
    source, read, pool, resident = run(store, monkeypatch, 11, **one, scan="on")
    assert (read, resident) != simulated(source.requests, pool)


def test_only_critical_experts_are_read_ahead(tiny_store, monkeypatch):
    """Layer 2, the last of 3 at r = 0.6, lam = 0.2: t = ceil(0.2 M) of the M predicted, at the high level."""
    store = StoreModel.open(tiny_store)
    full = run(store, monkeypatch, 11, exact=True, speculate="full")[0].predicted
    critical = run(store, monkeypatch, 11, exact=True, speculate="critical")[0].predicted
    assert len(full) == len(critical) == len(PROMPTS) * 9
    for every, top in zip(full, critical, strict=True):
        assert {key.layer for key in every} == {2}
        assert len(top) == -(-len(every) // 5)
        assert list(top) == list(every)[: len(top)]
        assert set(top.values()) == {4}
