"""A whole model on Triton's kernels: a store in another layout, routing, gating and a minimal VRAM tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from counted_engine import CountedEngine
from interpreter import round_like_a_gpu

from edgemoe.engine.engine import StoreModel
from edgemoe.kernels.activation import CUSTOM
from edgemoe.kernels.registry import Compute, kernels_for
from edgemoe.kernels.triton import experts as triton_experts
from edgemoe.kv.step import Segment, Step
from edgemoe.memory.split import MINIMUM_EXPERTS
from edgemoe.policy.settings import RunSettings

PROMPT = torch.randint(3, 300, (2,), generator=torch.Generator().manual_seed(2)).tolist()


def logits(directory: Path, compute: Compute, *, experts: int | None) -> torch.Tensor:
    """The logits of a prompt's last token and of one decoded token, [2, vocab], with experts at 4 bits in RAM."""
    store, settings = StoreModel.open(directory), RunSettings.uniform(4)
    form = compute.form(store.manifest.geometry, store.compute.layout, compute.layout)
    store = replace(store, form=form, compute=compute)
    limit = None
    if experts is not None:
        least = store.plan(vram_limit=None, settings=settings, context=16).minimum_vram_bytes
        limit = least + (experts - MINIMUM_EXPERTS) * store.form.bytes_at(4)
    with CountedEngine(
        store, store.plan(vram_limit=limit, settings=settings, context=16), settings
    ) as engine:
        sequence = engine.sequences.new()
        prefilled = engine.prefill(sequence, PROMPT)
        return torch.stack([prefilled, engine.step(Step((Segment(sequence, (11,)),)))[0]])


@pytest.mark.triton
@pytest.mark.skipif(not triton_experts.INTERPRETED, reason="only Triton's interpreter reads experts in RAM")
def test_logits_match_torch_and_do_not_depend_on_the_limit(tiny_store, monkeypatch):
    """Triton's logits match torch's operators to bf16's rounding, and keep their bits under the smallest limit."""
    round_like_a_gpu(monkeypatch)
    found = set()
    launch_shape = triton_experts.launch_shape
    monkeypatch.setattr(
        triton_experts, "launch_shape", lambda *args: found.add(args[2]) or launch_shape(*args)
    )
    tritons, planes = kernels_for("cuda")
    resident = logits(tiny_store, tritons, experts=None)
    want = logits(tiny_store, planes, experts=None)
    assert (resident - want).norm() / want.norm() < 0.02
    assert torch.equal(logits(tiny_store, tritons, experts=MINIMUM_EXPERTS), resident)
    assert found == {"silu", CUSTOM}
