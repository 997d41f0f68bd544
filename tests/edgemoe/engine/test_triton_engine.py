"""A whole model on Triton's kernels: from a store in another layout, through routing, gating and small tiers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from interpreter import rounds_as_a_gpu

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.kernels.registry import Compute, kernels_for
from edgemoe.kernels.triton import experts as triton_experts
from edgemoe.kv.step import Segment, Step
from edgemoe.memory.plan import MINIMUM_EXPERTS
from edgemoe.policy.settings import RunSettings

PROMPT = torch.randint(3, 300, (4,), generator=torch.Generator().manual_seed(2)).tolist()


def logits(directory: Path, kernel: Compute, *, experts: int | None) -> torch.Tensor:
    """Logits after a prompt and after a decoded token, [2, vocab]; experts at 4 bits, in RAM."""
    store, settings = StoreModel.open(directory), RunSettings.uniform(4)
    stored = store.compute.layout
    store = replace(store, form=kernel.form(store.manifest.geometry, stored, kernel.layout), compute=kernel)
    limit = None
    if experts is not None:
        least = store.plan(vram_limit=None, settings=settings, context=16).minimum_vram_bytes
        limit = least + (experts - MINIMUM_EXPERTS) * store.form.bytes_at(4)
    with Engine(store, store.plan(vram_limit=limit, settings=settings, context=16), settings) as engine:
        sequence = engine.new_sequence()
        rows = [engine.prefill(sequence, PROMPT)]
        rows += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in (11,)]
    return torch.stack(rows)


@pytest.mark.triton
@pytest.mark.skipif(not triton_experts.INTERPRETED, reason="experts in RAM are for the interpreter")
def test_triton_equals_torch_and_no_bit_depends_on_limits(tiny_store, monkeypatch):
    """Triton's logits are those of torch's operators to bf16's rounding, and the same bits from the smallest cache."""
    rounds_as_a_gpu(monkeypatch)
    found = set()
    launch_shape = triton_experts.launch_shape
    monkeypatch.setattr(
        triton_experts, "launch_shape", lambda *given: found.add(given[2]) or launch_shape(*given)
    )
    tritons, planes = kernels_for("cuda")
    resident = logits(tiny_store, tritons, experts=None)
    want = logits(tiny_store, planes, experts=None)
    assert (resident - want).norm() / want.norm() < 0.02
    assert torch.equal(logits(tiny_store, tritons, experts=MINIMUM_EXPERTS), resident)
    assert found == {"silu"}
