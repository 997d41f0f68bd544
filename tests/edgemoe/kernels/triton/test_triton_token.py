"""Triton's kernels of a token's beginning and end against torch: on a GPU if present, else in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu

from edgemoe.kernels.triton import token as kernels
from edgemoe.layers.embedding import DenseEmbedding
from edgemoe.storage.store import dense_groups

pytestmark = [
    pytest.mark.triton,
    pytest.mark.gpu,
    NEEDS_TRITON,
]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)
    monkeypatch.setattr(kernels, "BLOCK", 64)


@pytest.mark.parametrize("int8", [False, True])
def test_an_embedding_has_the_bits_of_its_module(int8):
    """Rows of a table that fill no block, with and without a scale."""
    chance = torch.Generator().manual_seed(1)
    weight, scale = torch.randn(9, 150, generator=chance).bfloat16(), None
    if int8:
        weight = torch.randint(-128, 128, (9, 150), generator=chance, dtype=torch.int8)
        scale = torch.randn(9, generator=chance).bfloat16()
    module, hidden = DenseEmbedding(weight, scale).to(DEVICE), torch.zeros(150, dtype=torch.bfloat16)
    module.scale, hidden = None if scale is None else scale.to(DEVICE), hidden.to(DEVICE)
    for token in (0, 5, 8):
        token = torch.tensor([token], device=DEVICE)
        kernels.embed(token, module.weight.data, module.scale, hidden)
        assert torch.equal(hidden, module(token)[0])


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_an_embedding_in_groups_has_the_bits_of_its_module(bits):
    """Rows of every half and eighth of a block, in the first block and the last one."""
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(1))
    module = DenseEmbedding(dense_groups.quantize_groups(weight, bits), None).to(DEVICE)
    hidden = torch.zeros(192, dtype=torch.bfloat16, device=DEVICE)
    for row in (0, 5, 13, 18, 31, 64, 95):
        token = torch.tensor([row], device=DEVICE)
        kernels.embed(token, module.weight.data, None, hidden)
        assert torch.equal(hidden, module(token)[0])


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, int, list[int]]:
    """The logits as float32, the likeliest token, and the state after them."""
    parts, state = kernels.parts_of(len(logits)), torch.tensor([41, 7, 99], device=DEVICE)
    highest = torch.zeros(parts, device=DEVICE)
    numbers, result = torch.zeros(len(logits), device=DEVICE), highest.new_zeros(1 + parts, dtype=torch.int32)
    kernels.choose_likeliest(logits.to(DEVICE), highest, numbers, result, state)
    return numbers, int(result[0]), state.tolist()


@pytest.mark.parametrize("vocab", [7, 64, 300])
def test_the_first_of_the_largest_logits_is_the_likeliest(vocab):
    """It is torch.argmax of the sampler, with ties within a part and between parts included."""
    chance = torch.Generator().manual_seed(vocab)
    for seed in range(6):
        logits = torch.randint(-3, 2 + seed, (vocab,), generator=chance).bfloat16() * 0.3
        numbers, token, state = likeliest(logits)
        assert torch.equal(numbers.cpu(), logits.float())
        assert token == int(logits.float().argmax())
        assert state == [42, token, 99]


def test_a_nan_leaves_the_token_within_the_vocabulary():
    """The next token's launches look up a row of the table, whatever the logits are."""
    some = torch.full((70,), torch.nan)
    some[[3, 66]] = 1
    for logits in (some, torch.full((70,), -torch.inf)):
        assert 0 <= likeliest(logits.bfloat16())[1] < 70
