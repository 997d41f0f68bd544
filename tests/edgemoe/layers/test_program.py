"""Lists of operations: an error in one is found when it is made, and dense gated layers are transformers' own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from availability import needs_native
from family_models import random_model
from torch import nn

from edgemoe.kernels.list_widths import with_widths
from edgemoe.kernels.native.functions import values_of
from edgemoe.kernels.program import HIDDEN, NORMED, Add, Call, LayerProgram, Linear, Norm, Scale
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.gated_mlp import GatedMLP

WIDTH = 8

NORM = Norm(HIDDEN, NORMED, torch.ones(WIDTH).bfloat16(), 1e-6)


def product(source: str, target: str, rows: int, cols: int) -> Linear:
    return Linear(source, target, (torch.zeros(rows, cols).bfloat16(), None, None))


def test_widths_follow_the_operations():
    """A buffer may have rows of another width after another operation; a gate of one number scales any."""
    values = values_of(torch.sigmoid)
    listed = (
        NORM,
        product(NORMED, "gate", 1, WIDTH),
        product(NORMED, "block", WIDTH, WIDTH),
        Scale("gate", "block", values),
        Add("block", HIDDEN),
        product(NORMED, "block", 3, WIDTH),
        Call("block", "block", lambda step, x: x, WIDTH),
        Add("block", HIDDEN),
    )
    found = with_widths(LayerProgram(listed, 0), WIDTH)
    assert [(reads, writes) for _, reads, writes in found] == [
        *((8, 8), (8, 1), (8, 8), (1, 8), (8, 8), (8, 3), (3, 8), (8, 8)),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        product("block", NORMED, WIDTH, WIDTH),  # nothing has written it
        product(NORMED, "block", WIDTH, WIDTH + 1),
        Add("block", HIDDEN),
        Norm(HIDDEN, NORMED, torch.ones(WIDTH + 1).bfloat16(), 1e-6),
    ],
    ids=["unwritten", "narrow", "added", "norm"],
)
def test_an_operation_of_another_width_is_refused(wrong):
    """Before anything is computed."""
    with pytest.raises(ValueError, match="expected rows of"):
        with_widths(LayerProgram((NORM, wrong), 0), WIDTH)


@pytest.mark.parametrize("function", [F.silu, torch.sigmoid])
def test_a_table_has_the_bits_that_torch_gives_short_rows(function):
    """Every bf16 number, alone and among others: torch computes whole vectors in another way than what is left."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    short = torch.cat([function(part) for part in bits.split(7)])
    known = ~short.isnan()
    assert torch.equal(values_of(function)[known].view(torch.int16), short[known].view(torch.int16))
    assert values_of(function)[~known].isnan().all()


class _Doubled(nn.Module):
    """A dense gated layer of another formula."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = module.children()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(2 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@needs_native
@pytest.mark.parametrize("model_type", ["glm4_moe", "beam"])
def test_dense_gated_layers_are_transformers_own(model_type):
    """Both products joined give equal bits; a module that computes something else is left alone.

    Beam rounds only the product of its activation and up.
    """
    module = random_model(model_type).model.layers[0].mlp.bfloat16()
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(module, name, DenseLinear(getattr(module, name).weight.data, None, None))
    x = torch.randn(5, 64).bfloat16()
    with torch.inference_mode():
        want = module(x)
        made = GatedMLP.try_from(module)
        assert torch.equal(made(x), want)
        assert made.wide == (model_type == "beam")
        assert GatedMLP.try_from(_Doubled(module)) is None
        assert torch.equal(module(x), want)  # its weights are views of the joined one
