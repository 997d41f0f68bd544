"""Hotness, compensators and agreeing on experts on a real GPU. Skipped where there is none."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from compensator_bytes import add_random
from counted_engine import CountedEngine
from family_models import random_model, save
from integrity import check_integrity
from steps import decoded_together

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.graph.decode import GraphDecode
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.hotness import Hotness
from edgemoe.policy.remapping import Remapping
from edgemoe.policy.settings import RunSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]

PROMPT, DECODED = [5, 9, 200, 17, 3], [11, 250, 11, 42, 99, 7, 180, 64]
ROUNDING = 0.05
"""Largest relative difference of logits, as vectors, that other kernels' order of bf16 rounding may make."""


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A random model whose layers all have experts: a new token goes through captured launches."""
    place = tmp_path_factory.mktemp("papers")
    save(random_model("qwen3_moe", num_experts_per_tok=3), place / "source", fused=True)
    convert_checkpoint(place / "source", place / "store", max_level=8, layout="cuda", dense_bits=16)
    return place / "store"


@pytest.fixture
def open_on() -> Iterator[Callable[..., Engine]]:
    """Opens engines on the GPU with so many bytes more than the smallest limit (None: all experts fit)."""
    from edgemoe.machine.cuda import CudaDevice

    device = CudaDevice()
    with ExitStack() as stack:

        def open_one(of: Path, more: int | None = None, dram: int = 0, parallel: int = 1, **how) -> Engine:
            settings, model = RunSettings(**how), StoreModel.open(of, device)
            sizes = {"settings": settings, "context": 64, "parallel": parallel}
            least = model.plan(vram_limit=None, **sizes).minimum_vram_bytes
            plan = model.plan(vram_limit=None if more is None else least + more, dram_limit=dram, **sizes)
            return stack.enter_context(CountedEngine(model, plan, settings))

        yield open_one
    gc.collect()


def logits(engine: Engine) -> torch.Tensor:
    """Logits after a prompt and after each token, [9, vocab]."""
    sequence = engine.sequences.new()
    rows = [engine.prefill(sequence, PROMPT)]
    rows += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in DECODED]
    return torch.stack(rows)


def test_captured_launches_compute_hot_experts_at_their_level(open_on, store):
    """With hot sets that stay, levels and counts are the ones of modules, and logits but for rounding."""
    how = {"levels": (4, 2), "hotness": Hotness(warmup=1000), "more": 1 << 20}
    captured, modules = open_on(store, **how), open_on(store, **how).by_modules()
    assert isinstance(captured.runner.fused, GraphDecode)
    for engine in (captured, modules):
        engine.fill()
        engine.rules.hot.fix({layer: {0, 2, 5} for layer in range(engine.shape.layers)})
    got, want = logits(captured), logits(modules)
    assert (got - want).norm() < ROUNDING * want.norm()
    use = captured.take_use()
    assert use == modules.take_use()
    assert use.experts.keys() == {2, 4}
    assert captured.take_counts().requests == modules.take_counts().requests


@pytest.mark.parametrize("dram", [0, 1 << 26])
def test_no_token_requests_an_expert_while_others_move(open_on, store, dram):
    """Hot sets change in the background, from the disk and from DRAM; memory stays within the limit."""
    soon = Hotness(interval=1, warmup=1, half_life=4, margin=0)
    engine = open_on(store, 1 << 16, dram, levels=(4, 2), hotness=soon)
    engine.fill()
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPT)
    engine.take_counts()
    for token in DECODED * 3:
        assert torch.isfinite(engine.step(Step((Segment(sequence, (token,)),)))).all()
    counts = engine.take_counts()
    assert counts.requests == counts.vram_hits > 0
    assert counts.promoted > 0
    check_integrity(engine.vram)
    assert engine.peak.bytes <= engine.plan.vram_limit_bytes


def test_compensated_experts_on_a_gpu(open_on, open_engine, store, tmp_path):
    """Prompts and tokens have a CPU's logits but for rounding, in Triton's kernels without their activation."""
    gpu = Path(shutil.copytree(store, tmp_path / "gpu"))
    add_random(gpu, lambda layer, expert: (8, 4, 4))
    how = {"levels": (2,), "compensation": Compensation(2)}
    got, want = logits(open_on(gpu, exact=True, **how)), logits(open_engine(gpu, exact=True, **how))
    off = logits(open_on(gpu, levels=(2,), exact=True))
    assert (got - want).norm() < ROUNDING * want.norm() < (off - want).norm()
    assert torch.equal(logits(open_on(gpu, 1 << 16, exact=True, **how)), got)


def test_tokens_agree_on_a_gpu(open_on, store):
    """With --lynx the choice of a step of several sequences is the one that a CPU makes of the routers' logits."""
    remapping, seen = Remapping(8, 4), []
    engine = open_on(store, parallel=4, levels=(4,), remapping=remapping)

    def check(module: object, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        scores, _, chosen = output
        if len(chosen) == 4:
            seen.append(torch.equal(chosen.cpu(), remapping.choose(scores.cpu(), chosen.shape[1])))

    for layer in engine.model.model.layers:
        layer.mlp.gate.register_forward_hook(check)
    decoded_together(engine, [[5, 9], [17], [60, 3], [7]], [[11, 250], [99, 7], [64, 12], [201, 31]])
    assert seen == [True] * 2 * engine.shape.layers
    assert engine.take_use().agreement["active"] > 0
