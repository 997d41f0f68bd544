"""Triton's kernels of one new token against transformers' operators: on a GPU if present, else in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu
from pairwise import pairwise

from edgemoe.kernels.triton.attention import RowAttention, scratch_size
from edgemoe.kernels.triton.dense import Matrix, add_and_normalise, multiply
from edgemoe.kernels.triton.router import choose_experts
from edgemoe.layers.attend import attend
from edgemoe.layers.dense import DenseLinear

pytestmark = [
    pytest.mark.triton,
    pytest.mark.gpu,
    NEEDS_TRITON,
]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def empty(*shape: int) -> torch.Tensor:
    """Memory that a kernel must overwrite."""
    return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)


def close(result: torch.Tensor, want: torch.Tensor, error: float = 0.006) -> bool:
    result, want = result.float(), want.float()
    return bool((result - want).norm() <= error * want.norm())


@pairwise(
    sizes=[(5,), (3, 7), (8, 1, 6), (130, 4, 4)], cols=[24, 2048], int8=[False, True], biased=[False, True]
)
def test_products_match_float32(sizes, cols, int8, biased):
    """Up to three matrices, rows and columns that fill no tile, 8-bit weights and biases."""
    x, matrices, want = numbers(cols), [], []
    for seed, rows in enumerate(sizes, start=1):
        weight, scale = numbers(rows, cols, seed=seed), None
        exact = weight.float()
        if int8:
            weight = (weight.float() * 40).clamp(-127, 127).round().to(torch.int8)
            scale = numbers(rows, seed=seed + 9).abs()
            exact = weight.float() * scale.float()[:, None]
        bias = numbers(rows, seed=seed + 5) if biased else None
        product = (exact @ x.float()).bfloat16()
        want.append(product if bias is None else product + bias)
        matrices.append(Matrix(weight, scale, bias))
    out = empty(sum(sizes))
    multiply(x, matrices, out)
    assert close(out, torch.cat(want))


@pytest.mark.parametrize("size", [24, 300, 2048])
@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_sums_and_norms_match_torch(size, count):
    """The residual and its norm; a row with gate weight 0 is not read, though it is not finite."""
    hidden, weight, normed = numbers(size), numbers(size, seed=1), empty(size)
    rows, gates = numbers(count, size, seed=2), torch.rand(count, device=DEVICE)
    want = hidden.clone()
    if count >= 3:
        gates[1] = 0
    if count:
        kept = rows.float() * gates[:, None]
        want += kept.sum(0).bfloat16()
    if count >= 3:
        rows[1] = torch.nan
    add_and_normalise(rows if count else None, gates if count else None, hidden, weight, 1e-5, normed)
    assert close(hidden, want)
    scaled = hidden.float() * (hidden.float().square().mean() + 1e-5).rsqrt()
    assert close(normed, weight * scaled.bfloat16())


@pytest.mark.parametrize(("experts", "top_k"), [(6, 1), (6, 3), (64, 2), (128, 8)])
@pytest.mark.parametrize("normalise", [False, True])
def test_the_choice_matches_torch(experts, top_k, normalise):
    """The chosen experts, their gate weights, and the next router's choice."""
    logits = numbers(2 * experts)
    report = torch.full((3 * top_k,), -1, dtype=torch.int32, device=DEVICE)
    choose_experts(logits, report, top_k, normalise=normalise, rounded=True)
    best, chosen = logits[:experts].float().softmax(-1).topk(top_k)
    best = (best / best.sum() if normalise else best).bfloat16()
    assert report[:top_k].tolist() == chosen.tolist()
    assert report[top_k : 2 * top_k].tolist() == logits[experts:].float().topk(top_k).indices.tolist()
    assert close(report[2 * top_k :].view(torch.float32), best)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_choice_that_is_not_finite_stays_in_the_layer():
    """From logits that are NaN the router chooses experts that exist: the step ends with an error of its own."""
    logits = numbers(12).fill_(torch.nan)
    report = torch.full((9,), -1, dtype=torch.int32, device=DEVICE)
    choose_experts(logits, report, 3, normalise=True, rounded=True)
    assert report[:6].min() >= 0
    assert report[:6].max() < 6


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def normalised(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm over the last weight.numel() elements of [heads, dim], a head or all of them."""
    flat = x.reshape(-1, weight.numel()).float()
    scaled = flat * (flat.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (weight * scaled.bfloat16()).view(x.shape)


CASES = {
    "grouped": RowAttention(6, 2, 16, None, 0.25, 0, 1),
    "one head each": RowAttention(4, 4, 24, None, 0.2, 0, 0),
    "a window": RowAttention(4, 1, 32, None, 0.2, 70, 0),
    "a quarter of qwen3-30b-a3b": RowAttention(8, 1, 128, None, 128**-0.5, 0, 1),
}


@pairwise(name=CASES, norm=["none", "head", "whole"], past=[0, 5, 300, 16 * 64 + 70])
def test_attention_matches_torch(name, norm, past):
    """A token after `past` others: its key and value are written, and it attends to all within the window."""
    shape = CASES[name]
    heads, kv_heads, dim, context, layers = shape.heads, shape.kv_heads, shape.dim, past + 3, 2
    if norm != "none":
        sizes = (dim, dim) if norm == "head" else (heads * dim, kv_heads * dim)
        shape = replace(shape, norms=((numbers(sizes[0], seed=7), 1e-5), (numbers(sizes[1], seed=8), 1e-5)))
    qkv, keys, values = (
        numbers((heads + 2 * kv_heads) * dim),
        numbers(layers, kv_heads, context, dim, seed=1),
        numbers(layers, kv_heads, context, dim, seed=2),
    )
    cosine, sine = numbers(dim, seed=3), numbers(dim, seed=4)
    q, k, v = (part.view(-1, dim) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim]))
    if shape.norms:
        q, k = normalised(q, *shape.norms[0]), normalised(k, *shape.norms[1])
    q, k = rotated(q, cosine, sine), rotated(k, cosine, sine)
    want_keys, want_values = keys.clone(), values.clone()
    want_keys[shape.layer, :, past], want_values[shape.layer, :, past] = k, v
    places = [[keys[i].data_ptr(), values[i].data_ptr(), context] for i in range(layers)]
    state = torch.tensor([past, 0, *(number for place in places for number in place)], device=DEVICE)
    out, queries = empty(heads * dim), empty(heads * dim)
    scratch = torch.full((scratch_size(heads, dim),), torch.nan, device=DEVICE)
    shape.launch(qkv, (cosine, sine), state, queries, scratch, out)
    assert close(keys, want_keys, 0.002)
    assert torch.equal(values, want_values)
    assert close(queries, q.flatten(), 0.002)
    # A GPU rounds some queries the other way, and random queries magnify it: attention has its own queries here.
    seen = slice(0, past + 1)
    want = attend(
        queries.view(heads, 1, dim).float(),
        keys[shape.layer, :, seen].float(),
        values[shape.layer, :, seen].float(),
        shape.scaling,
        shape.window or None,
    )
    assert close(out, want.flatten(), 0.005)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_dense_layer_multiplies_one_row(bits):
    """DenseLinear's product of a single row on a device, with a bias, is the product of float32 rounded twice."""
    weight, scale, bias = numbers(40, 96), numbers(40, seed=1).abs(), numbers(40, seed=2)
    exact = weight.float()
    if bits == 8:
        weight = (exact * 40).clamp(-127, 127).round().to(torch.int8)
        exact = weight.float() * scale.float()[:, None]
    x = numbers(1, 96, seed=3)
    got = DenseLinear(weight, scale if bits == 8 else None, bias).one_row(x)
    assert got.shape == (1, 40)
    assert close(got, (x.float() @ exact.T).bfloat16() + bias)
