"""Routers of few rows by Triton's kernel, against transformers' routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from family_models import blocks_of, random_model, router_of, router_weight
from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu

from edgemoe.families.traits import TRAITS
from edgemoe.kernels.triton import scored_router
from edgemoe.kernels.triton.experts import INTERPRETED
from edgemoe.kernels.triton.scored_router import TritonRouter
from edgemoe.layers import device_router
from edgemoe.layers.device_router import DeviceRouter, choose_on_device
from edgemoe.layers.router import further_arguments

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]

ROUTERS = {
    "qwen3_5_moe_text": {"num_experts_per_tok": 3},  # a softmax, normalised
    "glm4_moe": {
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
    },  # sigmoids, a bias, groups by two experts
    "deepseek_v2": {},  # a softmax, a group by its best expert
    "hy_v3": {},  # a bias that is an argument
    "lfm2_moe": {},  # scores that are rounded, and a scale
    "gpt_oss": {},  # a bias of the product, and weights that are rounded
    "gemma4_text": {"top_k_experts": 4},  # a norm of its own, and a factor of each expert
    "ernie4_5_moe": {"moe_k": 3},  # a float32 weight, and a bias in a module of its own
    "kolibri1": {"num_experts_per_tok": 3},  # a choice by the product and a bias
}
"""Model -> its config in addition to family_models.SMALL."""

ROUNDED = ("lfm2_moe", "gpt_oss", "gemma4_text", "qwen3_5_moe_text")
"""Models whose product is rounded: sums in another order may change a last bit."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    round_like_a_gpu(monkeypatch)
    monkeypatch.setattr(device_router, "triton_runs", lambda place: True)  # the interpreter's is the CPU
    if INTERPRETED:  # its time goes by programs
        monkeypatch.setattr(scored_router, "_ROWS", 16)
        monkeypatch.setattr(scored_router, "_COLS", 64)


def block_of(model_type: str, **changes: Any) -> tuple[Any, Any]:
    """A MoE block of a random model, with a router that decides, and the model's config."""
    model = random_model(model_type, **changes)
    block = blocks_of(model)[0].to(DEVICE)
    router_weight(router_of(block)).mul_(20)
    return block, model.config


def states(rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", ROUTERS)
def test_the_kernel_chooses_as_transformers(model_type):
    """Experts, as a set, and their gate weights; one row has the bits that it has among several."""
    block, config = block_of(model_type, **ROUTERS[model_type])
    theirs, x = router_of(block), states(8)
    further = [getattr(block, name) for name in further_arguments(block, theirs)]
    with torch.inference_mode():
        _, their_gates, their_experts = theirs(x, *further)
        choose_on_device(block, theirs, TRAITS[model_type], config)
        assert isinstance(theirs.forward, DeviceRouter)
        logits, gates, experts = theirs(x, *further)
        single = theirs(x[3:4], *further)
    assert (gates.dtype, experts.dtype) == (their_gates.dtype, torch.int64)
    want, result = (
        torch.zeros(logits.shape, device=DEVICE).scatter(1, choice, weights.float())
        for choice, weights in ((their_experts, their_gates), (experts, gates))
    )
    same = torch.isclose(result, want, rtol=1e-4, atol=1e-6).all(1)
    assert same.sum() >= (6 if model_type in ROUNDED else 8)
    for all_rows, one in zip((logits, gates, experts), single, strict=True):
        assert torch.equal(all_rows[3:4], one)


def test_many_rows_and_none_are_left_to_transformers(monkeypatch):
    """A prompt goes through transformers' operators, with their bits."""
    block, config = block_of("glm4_moe")
    router, x = router_of(block), states(40)
    want = router(x)
    choose_on_device(block, router, TRAITS["glm4_moe"], config)
    monkeypatch.setattr(TritonRouter, "__call__", lambda *_: pytest.fail("the kernel ran"))
    assert all(map(torch.equal, router(x), want))


def test_routers_of_another_formula_stay_transformers_own(monkeypatch):
    """A trial refuses scores divided by a temperature; a mixture of two experts has no kernel."""
    block, config = block_of("glm4_moe")
    router = router_of(block)
    forward = type(router).forward
    monkeypatch.setattr(type(router), "forward", lambda self, x: forward(self, x / 2))
    choose_on_device(block, router, TRAITS["glm4_moe"], config)
    assert "forward" not in vars(router)
    mixture, config = block_of("phimoe")
    assert DeviceRouter.try_from(router_of(mixture), TRAITS["phimoe"], config) is None


def test_numbers_that_are_not_finite_choose_different_experts():
    """With a NaN in a state all experts are equal, and none is outside the layer or taken twice."""
    block, config = block_of("glm4_moe", n_group=1, topk_group=1, num_experts_per_tok=5)
    own = DeviceRouter.try_from(router_of(block), TRAITS["glm4_moe"], config)
    assert own is not None
    x = states(2)
    x[0, 5] = torch.nan
    _, _, experts = own(x)
    assert [len(row.unique()) for row in experts] == [5, 5]
    assert experts.min() >= 0
    assert experts.max() < len(router_weight(router_of(block)))


def test_places_without_triton_keep_transformers_routers(monkeypatch):
    """A CPU's routers have a compiled kernel."""
    monkeypatch.setattr(device_router, "triton_runs", lambda place: False)
    block, config = block_of("glm4_moe")
    choose_on_device(block, router_of(block), TRAITS["glm4_moe"], config)
    assert "forward" not in vars(router_of(block))
