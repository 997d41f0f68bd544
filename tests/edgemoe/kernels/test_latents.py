"""Latent attention of a prompt: the equations' results, and the same bits however the prompt is cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from availability import needs_native

from edgemoe.kernels.native.attention import StoredAttention
from edgemoe.kernels.native.attention_rows import LayerKV, Received
from edgemoe.kernels.native.latents import HALVES, PAIRS, WIDE_PAIRS, NativeLatents, ProjectedRows
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.mla import CompiledLatents
from edgemoe.storage.store.dense import quantize_rows

pytestmark = needs_native

HEADS, KEY, VALUE, LATENT, ROTARY, ROWS = 3, 16, 12, 32, 16, 150
"""More rows than a block of them has."""

SCALING = 0.2


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotated(x: torch.Tensor, angles: torch.Tensor, pairing: int) -> torch.Tensor:
    """x [rows, ..., rotary] by angles [rows, rotary / 2], in float64; PAIRS leave both halves apart."""
    x = x.double()
    low, high = x.chunk(2, -1) if pairing == HALVES else (x[..., ::2], x[..., 1::2])
    cosine, sine = (each.view(len(x), *[1] * (x.dim() - 2), -1) for each in (angles.cos(), angles.sin()))
    a, b = low * cosine - high * sine, high * cosine + low * sine
    return torch.stack((a, b), -1).flatten(-2) if pairing == WIDE_PAIRS else torch.cat((a, b), -1)


def attended(
    native: NativeLatents, rows: ProjectedRows, ends: list[int], sums: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes a prompt in calls that end at `ends`, and writes the attention that tokens receive to `sums`."""
    keys, attention = (
        torch.zeros(1, ROWS, LATENT + ROTARY).bfloat16(),
        StoredAttention(HEADS, 1, LATENT + ROTARY, SCALING),
    )
    parts, start = [], 0
    for end in ends:
        of_call = ProjectedRows(*(each[start:end] for each in rows))
        received = None if sums is None else Received(sums, 0)
        parts.append(
            native.attend(of_call, attention, LayerKV(keys, keys, start, latent=LATENT), None, received)
        )
        start = end
    return torch.cat(parts)


@pytest.mark.parametrize(("pairing", "bits"), [(HALVES, 16), (PAIRS, 8), (WIDE_PAIRS, 8)])
def test_a_prompt_attends_as_the_equations_say(pairing, bits):
    """Every head has the keys and values that its matrices make of the normed latents, with one rotated part."""
    weight, scale = normal(HEADS * (KEY + VALUE), LATENT, seed=1).bfloat16(), None
    exact = weight.double()
    if bits == 8:
        weight, scale = quantize_rows(weight.float())
        exact = weight.double() * scale.double()[:, None]
    linear = DenseLinear(weight, scale, None)
    of_keys, of_values = exact.view(HEADS, -1, LATENT).split((KEY, VALUE), dim=1)
    module = SimpleNamespace(qk_nope_head_dim=KEY, v_head_dim=VALUE, kv_lora_rank=LATENT, kv_b_proj=linear)
    norm = normal(LATENT, seed=2).bfloat16()
    native = NativeLatents(CompiledLatents(module).matrices, ROTARY, (norm, 1e-6), pairing)
    angles = normal(ROWS, ROTARY // 2, seed=3)
    both = angles if pairing == WIDE_PAIRS else torch.cat((angles, angles), -1)
    dtype = torch.float32 if pairing == WIDE_PAIRS else torch.bfloat16
    rows = ProjectedRows(
        normal(ROWS, HEADS * (KEY + ROTARY), seed=4).bfloat16(),
        normal(ROWS, LATENT + ROTARY, seed=5).bfloat16(),
        *(each.to(dtype) for each in (both.cos(), both.sin())),
    )
    plain, turning = rows.queries.view(ROWS, HEADS, -1).split((KEY, ROTARY), dim=-1)
    latents, turned = rows.compressed.double().split((LATENT, ROTARY), dim=-1)
    latents = latents / (latents.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    scores = torch.einsum("rhk,hkl,tl->hrt", plain.double(), of_keys, latents)
    scores += torch.einsum("rhd,td->hrt", rotated(turning, angles, pairing), rotated(turned, angles, pairing))
    hidden = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
    weights = (scores * SCALING).masked_fill(hidden, -torch.inf).softmax(-1)
    want = torch.einsum("hrt,tl,hvl->rhv", weights, latents, of_values).reshape(ROWS, -1)
    got = attended(native, rows, [ROWS])
    assert (got - want).norm() / want.norm() < 0.02
    assert torch.equal(attended(native, rows, [1, 131, 140, ROWS]), got)
    sums = torch.empty(ROWS)
    assert torch.equal(attended(native, rows, [ROWS], sums), got)
    torch.testing.assert_close(sums, weights.mean(0).sum(0).float(), rtol=0.03, atol=0.02)


def test_rows_of_other_sizes_are_refused():
    """Compiled code would read past them."""
    linear = DenseLinear(torch.zeros(HEADS * (KEY + VALUE), LATENT).bfloat16(), None, None)
    module = SimpleNamespace(qk_nope_head_dim=KEY, v_head_dim=VALUE, kv_lora_rank=LATENT, kv_b_proj=linear)
    norm = torch.ones(LATENT).bfloat16(), 1e-6
    native = NativeLatents(CompiledLatents(module).matrices, ROTARY, norm, HALVES)
    sizes = HEADS * (KEY + ROTARY), LATENT + ROTARY, ROTARY, ROTARY
    for wrong in range(4):
        rows = ProjectedRows(
            *(torch.zeros(4, size - (i == wrong)).bfloat16() for i, size in enumerate(sizes))
        )
        with pytest.raises(ValueError, match="expected rows of"):
            attended(native, rows, [4])
    rows = ProjectedRows(*(torch.zeros(ROWS + 1, size).bfloat16() for size in sizes))
    with pytest.raises(ValueError, match="latent attention"):
        attended(native, rows, [ROWS + 1])
