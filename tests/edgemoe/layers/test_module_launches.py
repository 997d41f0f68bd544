"""Captured launches of transformers' modules against the modules themselves, on a device that works late."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from counted_engine import CountedEngine
from device_double import DoubleDevice, poisoned
from engine_rig import limited, on_device
from family_models import random_model, save
from interpreter import round_like_a_gpu
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import DoesNotFit
from edgemoe.kernels.native import library as native
from edgemoe.kernels.registry import kernels_for
from edgemoe.kernels.triton import attention
from edgemoe.kernels.triton import experts as triton_experts
from edgemoe.kernels.triton.products import Tile
from edgemoe.kv.formats import KVFormat
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.graph import groups as graph_groups
from edgemoe.layers.graph.decode import GraphDecode
from edgemoe.layers.graph.module_launches import ModuleLaunches
from edgemoe.memory import tiers
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.settings import RunSettings

pytestmark = [
    pytest.mark.triton,
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of a gelu in the interpreter
    pytest.mark.skipif(
        not triton_experts.INTERPRETED, reason="only Triton's interpreter reads experts in RAM"
    ),
]

MODELS = {
    # gated delta nets, a shared expert with a gate
    "qwen3_5_moe_text": {"layer_types": ["full_attention", "linear_attention"]},
    "glm4_moe": {},  # a leading dense layer, shared experts, a sigmoid router with a bias
    "gpt_oss": {"sliding_window": 2},  # sinks, windows, experts with biases and an activation of their own
    "deepseek_v2": {},  # latents
    # keys of two shapes, norms after the experts, caps
    "gemma4_text": {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Model -> its config in addition to family_models.SMALL; each has two layers."""


PROMPT = [5, 9]


@pytest.fixture(scope="module")
def store(request, tmp_path_factory) -> Path:
    """A random model, converted."""
    name, place = request.param, tmp_path_factory.mktemp("modules")
    save(random_model(name, **{"num_hidden_layers": 2} | MODELS[name]), place / "source", fused=True)
    convert_checkpoint(place / "source", place / "store", max_level=8, layout="auto", dense_bits=16)
    return place / "store"


@pytest.fixture
def open_on(store, monkeypatch) -> Iterator[Callable[..., Engine]]:
    """Opens engines on a double by Triton's kernels, with blocks for so many experts in each tier (None: all)."""
    round_like_a_gpu(monkeypatch)
    monkeypatch.setattr(triton_experts, "VECTOR", Tile(rows=64))
    # The interpreter's time goes by programs.
    monkeypatch.setattr(attention.StoredRowAttention, "splits", 2)
    monkeypatch.setattr(tiers, "on_device", poisoned)
    monkeypatch.setattr(
        native, "available", lambda: False
    )  # the double's place is the CPU, which has kernels
    with ExitStack() as stack:

        def open_one(
            experts: int | None = None,
            dram_experts: int = 0,
            *,
            parallel: int = 1,
            kv: KVFormat | None = None,
            **settings,
        ) -> Engine:
            opened, device = StoreModel.open(store).with_kv(kv or KVFormat()), DoubleDevice(haste=0.2)
            compute = kernels_for("cuda")[0]
            form = compute.form(opened.manifest.geometry, opened.compute.layout, compute.layout)
            opened = on_device(replace(opened, form=form, compute=compute), device)
            chosen = RunSettings(**{"levels": (8,), "exact": True} | settings)
            stack.callback(device.end)  # no rule of a device's memory was broken
            return stack.enter_context(
                CountedEngine(opened, limited(opened, chosen, experts, dram_experts, parallel), chosen)
            )

        yield open_one


def logits(
    engine: Engine, tokens: tuple[int, ...] = (11, 250), prompt: Sequence[int] = PROMPT
) -> torch.Tensor:
    """Logits after each of some tokens that follow a prompt, [tokens, vocab]."""
    sequence = engine.sequences.new()
    engine.prefill(sequence, prompt)
    rows = [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in tokens]
    engine.sequences.end(sequence)
    return torch.stack(rows)


def require_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Captured launches sum in another order than modules, and round in other places."""
    assert (result - expected).norm() < 0.03 * expected.norm()


# Rounding can turn a router's choice between near experts, and with it all logits of so small a model.
@pytest.mark.folders
@pytest.mark.parametrize(
    ("store", "kind"),
    [(name, "q8_0" if name == "gpt_oss" else "bf16") for name in MODELS] + [("deepseek_v2", "q4_0")],
    indirect=["store"],
)
def test_a_new_token_is_computed_as_by_modules(open_on, kind):
    """Logits and counts equal the modules', which are not captured, with every expert resident.

    Latents, and rows within a window, which move, are also stored in codes, of which modules wrote the prompt's.
    """
    kv = KVFormat(kind, kind)
    engine = open_on(levels=(8, 4, 2), retention=0.75, exact=False, kv=kv)
    assert isinstance(engine.runner.fused, GraphDecode)
    assert isinstance(engine.runner.fused._launches, ModuleLaunches)
    got, counts, use = logits(engine), engine.take_counts(), engine.take_use()
    want = logits(engine.by_modules())
    theirs, their_use = engine.take_counts(), engine.take_use()
    require_near(got, want)
    assert counts.requests == theirs.requests
    assert use.damage == pytest.approx(their_use.damage, rel=0.02)


@pytest.mark.parametrize(
    "store", [pytest.param("qwen3_5_moe_text", marks=pytest.mark.folders), "gpt_oss"], indirect=True
)
def test_limits_do_not_change_a_bit(open_on, monkeypatch):
    """Logits are as with all experts resident where the host brings a layer's experts, and where a group stops."""
    monkeypatch.setattr(graph_groups, "GROUP", 1)
    want = logits(open_on(levels=(4,)), prompt=PROMPT[:1])
    engine = open_on(3, 0, levels=(4,))
    assert torch.equal(logits(engine, prompt=PROMPT[:1]), want)
    assert engine.take_counts().ssd_bytes > 0
    engine = open_on(4, 64, levels=(4,))
    tried, run = [], graph_groups.GraphGroups._try
    monkeypatch.setattr(
        graph_groups.GraphGroups, "_try", lambda *parts: (tried.append(parts[2]), run(*parts))[1]
    )
    assert torch.equal(
        logits(engine, prompt=PROMPT[:1]), want
    )  # groups stop where an expert is read from disk
    assert tried
    engine.fill()
    assert torch.equal(logits(engine, prompt=PROMPT[:1]), want)
    assert engine.take_counts().dram_hits > 0


@pytest.mark.parametrize("store", ["qwen3_5_moe_text"], indirect=True)
@pytest.mark.folders
def test_sequences_keep_their_states(open_on):
    """Two sequences in turn, one that has no token before, and one that is cropped have the logits of each alone."""
    engine = open_on(levels=(4,), parallel=2)
    alone = [logits(engine, tokens) for tokens in ((11, 250), (7,))]
    both = [engine.sequences.new() for _ in alone]
    for sequence in both:
        engine.prefill(sequence, PROMPT)
    rows = [
        (at, engine.step(Step((Segment(both[at], (token,)),)))[0])
        for at, token in ((0, 11), (1, 7), (0, 250))
    ]
    for i, want in enumerate(alone):
        assert torch.equal(torch.stack([row for at, row in rows if at == i]), want)
    first = both[0]
    first.crop(0)
    fresh = engine.step(Step((Segment(first, (5,)),)))[0]
    by_modules, other = engine.by_modules(), both[1]
    other.crop(0)
    require_near(fresh, by_modules.step(Step((Segment(other, (5,)),)))[0])


@pytest.mark.parametrize("store", ["glm4_moe"], indirect=True)
def test_a_model_that_cannot_be_captured_runs_by_modules(open_on, monkeypatch, caplog):
    """An operator that gives the host a number costs a warning, and the answers stay."""
    want = logits(open_on(levels=(4,)).by_modules())
    route = Glm4MoeTopkRouter.forward

    def reads(router: Glm4MoeTopkRouter, hidden: torch.Tensor) -> Any:
        if hidden.sum() < -1e30:
            raise AssertionError
        return route(router, hidden)

    monkeypatch.setattr(Glm4MoeTopkRouter, "forward", reads)
    with caplog.at_level(logging.WARNING, "edgemoe"):
        engine = open_on(levels=(4,))
    assert engine.runner.fused is None
    assert [each.message for each in caplog.records if "cannot be captured" in each.message]
    assert torch.equal(logits(engine), want)


@pytest.mark.parametrize("store", ["glm4_moe"], indirect=True)
def test_too_little_memory_is_no_reason_to_run_by_modules(open_on, monkeypatch):
    """A device without memory for the launches refuses the model."""

    def refuse(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(ModuleLaunches, "begin", refuse)
    with pytest.raises(DoesNotFit):
        open_on(levels=(4,))
