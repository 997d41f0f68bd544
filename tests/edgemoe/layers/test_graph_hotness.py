"""Precision by hotness in captured launches, and compensators without them, on a device that works late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from compensator_bytes import add_random
from graph_rig import graph_engines, graph_store
from integrity import check_integrity

from edgemoe.engine import rules
from edgemoe.engine.engine import Engine
from edgemoe.kernels.triton import experts as triton_experts
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.graph.ahead import OneLaunch
from edgemoe.layers.graph.decode import GraphDecode
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.damage import Damage
from edgemoe.policy.hotness import Hotness
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


SMALL = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A random model of two layers, converted."""
    return graph_store(tmp_path_factory.mktemp("hot"), "qwen3_moe", **SMALL)


@pytest.fixture
def open_on(store, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """Opens engines at 4/2 by hotness, or at 2 without it, on a double (graph_engines); all experts are filled."""
    for open_any in graph_engines(store, monkeypatch):

        def open_one(
            hotness: Hotness | None = SETTLED,
            *,
            dram: int = 64,
            of: Callable[..., Engine] = open_any,
            **settings,
        ) -> Engine:
            levels = {"levels": (4, 2) if hotness else (2,), "exact": False, "hotness": hotness}
            engine = of(12, dram, **levels | settings)
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


def test_tokens_run_ahead_while_experts_move(open_on, monkeypatch):
    """Through staging buffers: no request, no wait of the host for a token that ran ahead, nor of kernels for copies.

    A token that ran ahead has the levels of its launch, and blocks change hands after it.
    """
    engine = open_on(replace(SETTLED, settled=False), dram=0, seed=5)
    device, transfers, sequence = engine.device, engine.source._transfers, engine.sequences.new()
    engine.prefill(sequence, [5])
    token, taken, settled, waited = step(engine, sequence, 7), [], [], []
    take, settle, await_copies = OneLaunch._take, OneLaunch.settle, device.await_copies
    monkeypatch.setattr(OneLaunch, "_take", lambda *parts: (taken.append(flight := take(*parts)), flight)[1])
    monkeypatch.setattr(OneLaunch, "settle", lambda whole: (settled.append(whole), settle(whole)))
    monkeypatch.setattr(FetcherStep, "request", None)
    monkeypatch.setattr(
        device, "await_copies", lambda events: (waited.extend(events := list(events)), await_copies(events))
    )
    for _ in range(5):
        token = step(engine, sequence, token)
        for transfer in list(transfers.moving.values()):
            transfers.await_done([transfer])
            transfer.load._copied.wait()
    assert sum(flight is not None for flight in taken) >= 3
    assert settled == waited == []
    monkeypatch.undo()
    engine.source.advance_changes(TransferCounts())
    check_integrity(engine.vram)
    assert hot(engine)
    counts = engine.take_counts()
    assert counts.promoted > 0
    assert counts.demoted > 0
    assert counts.requests == counts.vram_hits


def test_bits_of_a_wanted_time_reach_the_next_token(open_on, monkeypatch):
    """With --tpot-target slow tokens lower the bits of the token after them, also where one has run ahead."""
    monkeypatch.setattr(rules, "dram_price", lambda store, plan: 1.0)  # a busy processor measures any price
    engine = open_on(None, levels=(4,))
    layers, experts, slots = engine.shape.layers, engine.shape.experts_per_layer, engine.shape.top_k
    choices = torch.arange(slots).expand(layers, 4, slots)
    engine.rules.damage = Damage.typical(
        range(layers), experts, choices[0], torch.full((4, slots), 1 / slots)
    )
    engine.configure(engine.settings.with_(levels=(4, 2), tpot_target=0.05, bits=4.5))
    sequence = engine.sequences.new()
    engine.prefill(sequence, [5])
    engine.take_use()
    token = step(engine, sequence, step(engine, sequence, 7))
    assert engine.take_use().scheduled == {4: 2 * layers * slots}
    for _ in range(100):
        engine.rules.observe_token(0.5)
    step(engine, sequence, token)
    assert 0 < engine.take_use().scheduled[2] <= layers * slots


def step(engine: Engine, sequence: SequenceKV, token: int) -> int:
    """The likeliest token after a token."""
    return int(engine.step(Step((Segment(sequence, (token,)),)))[0].argmax())
