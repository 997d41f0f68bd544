"""Precision by hotness in captured launches, and compensators without them, on a device that works late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from compensator_bytes import add_random
from counted_engine import CountedEngine
from device_double import DoubleDevice, poisoned
from engine_rig import limited, on_device
from family_models import random_model, save
from integrity import check_integrity
from interpreter import round_like_a_gpu

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.kernels.registry import kernels_for
from edgemoe.kernels.triton import attention, dense
from edgemoe.kernels.triton import experts as triton_experts
from edgemoe.kernels.triton.products import Tile
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.dense import DenseNorm
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.graph.decode import GraphDecode
from edgemoe.layers.router import CompiledRouter
from edgemoe.memory import tiers
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.hotness import Hotness
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.step import FetcherStep

pytestmark = [
    pytest.mark.triton,
    pytest.mark.e2e,
    pytest.mark.skipif(
        not triton_experts.INTERPRETED, reason="only Triton's interpreter reads experts in RAM"
    ),
]

TOKENS = (11, 250, 11)
SETTLED = Hotness(interval=1, warmup=1, half_life=4, margin=0, experts=4, settled=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A random model of two layers with four experts each, converted."""
    place = tmp_path_factory.mktemp("hot")
    model = random_model(
        "qwen3_moe", num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1
    )
    save(model, place / "source", fused=True)
    convert_checkpoint(place / "source", place / "store", max_level=4, layout="auto", dense_bits=16)
    return place / "store"


@pytest.fixture
def open_on(store, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """Opens engines at 4/2 by hotness on a double by Triton's kernels, all experts filled at 2."""
    round_like_a_gpu(monkeypatch)
    for module, name, few in ((dense, "ROWS", 512), (dense, "COLS", 64), (attention, "SPLITS", 2)):
        monkeypatch.setattr(module, name, few)
    monkeypatch.setattr(triton_experts, "VECTOR", Tile(rows=64))
    monkeypatch.setattr(tiers, "on_device", poisoned)
    for part in (GroupedQueryAttention, CompiledRouter, DenseNorm):
        monkeypatch.setattr(part, "try_from", lambda *args: None)
    with ExitStack() as stack:

        def open_one(
            hotness: Hotness | None = SETTLED, *, dram: int = 64, seed: int = 0, **settings
        ) -> Engine:
            opened, device = StoreModel.open(store), DoubleDevice(seed, haste=0.2)
            compute = kernels_for("cuda")[0]
            form = compute.form(opened.manifest.geometry, opened.compute.layout, compute.layout)
            opened = on_device(replace(opened, form=form, compute=compute), device)
            chosen = RunSettings(levels=(4, 2) if hotness else (2,), hotness=hotness, **settings)
            engine = stack.enter_context(CountedEngine(opened, limited(opened, chosen, 12, dram), chosen))
            engine.fill()
            return engine

        yield open_one


def logits(engine: Engine) -> torch.Tensor:
    """Logits after each of some tokens that follow a prompt, [tokens, vocab]."""
    sequence = engine.sequences.new()
    engine.prefill(sequence, [5])
    rows = [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in TOKENS]
    engine.sequences.end(sequence)
    return torch.stack(rows)


def hot(engine: Engine) -> set[object]:
    return {key for key, level in engine.vram.resident().items() if level == 4}


def test_captured_launches_compute_at_the_levels_of_modules(open_on, monkeypatch):
    """Settled hot sets, levels, choices and counts are equal; logits differ by rounding alone."""
    engine = open_on()
    assert isinstance(engine.runner.fused, GraphDecode)
    got, use, counts = logits(engine), engine.take_use(), engine.take_counts()
    plain = open_on(seed=1).by_modules()
    want, their_use, their_counts = logits(plain), plain.take_use(), plain.take_counts()
    assert use == their_use
    assert use.experts.keys() == {2, 4}
    assert hot(engine) == hot(plain) != set()
    assert (counts.requests, counts.vram_hits, counts.transitions) == (
        their_counts.requests, their_counts.vram_hits, their_counts.transitions
    )  # fmt: skip
    assert (engine.rules.hot.scores.values > 0).any()
    torch.testing.assert_close(
        engine.rules.hot.scores.values, plain.rules.hot.scores.values, rtol=0.02, atol=0.01
    )
    assert (got - want).norm() < 0.03 * want.norm()


def test_a_token_waits_for_no_expert_that_moves(open_on, monkeypatch):
    """In the background, through staging buffers: no request, and no copy that a kernel waits for."""
    engine = open_on(replace(SETTLED, settled=False), dram=0)
    device, transfers, waited = engine.device, engine.source._transfers, []
    sequence = engine.sequences.new()
    engine.prefill(sequence, [5])
    engine.step(Step((Segment(sequence, (7,)),)))
    await_copies = device.await_copies
    monkeypatch.setattr(FetcherStep, "request", None)
    monkeypatch.setattr(
        device, "await_copies", lambda events: (waited.extend(events := list(events)), await_copies(events))
    )
    for token in TOKENS:
        engine.step(Step((Segment(sequence, (token,)),)))
        for transfer in list(transfers.moving.values()):
            transfers.await_done([transfer])
            transfer.load._copied.wait()
    assert waited == []
    engine.source.advance_changes(TransferCounts())
    check_integrity(engine.vram)
    assert hot(engine)
    counts = engine.take_counts()
    assert counts.promoted > 0
    assert counts.requests == counts.vram_hits


def test_compensated_tokens_take_modules(open_on, store, monkeypatch):
    """Captured launches add no compensators; the kernel's products without an activation do, in Triton's kernels."""
    add_random(store, lambda layer, expert: (8, 4, 4))
    monkeypatch.setattr(GraphDecode, "__call__", None)
    rows = []
    for compensation in (Compensation(2), Compensation(1)):
        engine = open_on(None, dram=0, compensation=compensation)
        sequence = engine.sequences.new()
        engine.prefill(sequence, [5])
        engine.take_use()
        rows.append(engine.step(Step((Segment(sequence, (7,)),)))[0])
        assert engine.take_use().compensated == compensation.count * engine.shape.layers
    assert torch.isfinite(torch.stack(rows)).all()
    assert not torch.equal(*rows)
