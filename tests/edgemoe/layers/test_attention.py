"""Attention over the KV against softmax written out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from pairwise import pairwise

from edgemoe.errors import ModelRefused
from edgemoe.kv.formats import TILE
from edgemoe.layers import attend as attend_module
from edgemoe.layers import mla as latent_module
from edgemoe.layers.attend import attend, attend_tiles
from edgemoe.layers.attention import window_of_mask


def written_out(query, keys, values, scaling, window):
    """Row by row in float64, straight from the definition."""
    heads, rows, _ = query.shape
    groups, past = heads // keys.shape[0], keys.shape[1] - rows
    out = torch.empty_like(query, dtype=torch.float64)
    for head in range(heads):
        for row in range(rows):
            position = past + row
            first = 0 if window is None else max(position - window + 1, 0)
            k, v = (t[head // groups, first : position + 1].double() for t in (keys, values))
            weights = torch.softmax(k @ query[head, row].double() * scaling, 0)
            out[head, row] = weights @ v
    return out


@pytest.mark.parametrize("fast", [False, True], ids=["float32", "bf16"])
@pairwise(
    window=[None, 3, 100],
    span=[(1, 0), (1, 9), (6, 0), (6, 5), (17, 1)],
    shape=[(4, 4), (8, 2), (6, 1)],
)
def test_attend_is_causal_grouped_attention(monkeypatch, fast, window, span, shape):
    """Every row sees itself and earlier tokens within the window, for any number of cached tokens."""
    (rows, past), (heads, kv_heads) = span, shape
    monkeypatch.setattr(attend_module, "fast_bf16", lambda: fast)
    generator = torch.Generator().manual_seed(rows + past)
    query = torch.randn(heads, rows, 16, generator=generator).bfloat16()
    keys, values = (torch.randn(kv_heads, past + rows, 16, generator=generator).bfloat16() for _ in range(2))
    got = attend(query, keys, values, 1 / math.sqrt(16), window).double()
    want = written_out(query, keys, values, 1 / math.sqrt(16), window)
    assert (got - want).norm() / want.norm() < 0.01


def reader(keys, values):
    """Reads tokens of tensors; no call wants more than a tile."""

    def read(first, end):
        assert 0 < end - first <= TILE
        return keys[:, first:end], values[:, first:end]

    return read


@pytest.mark.parametrize("window", [None, 1, 200, 300])
@pytest.mark.parametrize(("rows", "past"), [(1, 0), (1, 700), (150, 0), (150, 449), (300, 212)])
def test_tiles_give_the_same_attention(rows, past, window):
    """Keys and values that come in tiles of TILE tokens: causal attention over all of them, to float32's rounding."""
    generator = torch.Generator().manual_seed(rows + past)
    query = torch.randn(4, rows, 16, generator=generator) * 2
    keys = torch.randn(2, past + rows, 16, generator=generator)
    values = torch.randn(2, past + rows, 12, generator=generator)
    got = attend_tiles(query, reader(keys, values), past + rows, 0.25, window)
    want = written_out(query, keys, torch.nn.functional.pad(values, (0, 4)), 0.25, window)[..., :12]
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_without_bf16_a_tokens_attention_makes_no_float32_copy_of_all_keys(monkeypatch):
    """The float32 tensors of a token's attention over 64 tiles have less than a tenth of the keys' numbers."""
    monkeypatch.setattr(attend_module, "fast_bf16", lambda: False)
    tokens, largest = 64 * TILE, 0
    keys, values = (torch.ones(2, tokens, 16).bfloat16() for _ in range(2))
    made = torch.Tensor.float

    def noted(tensor):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return made(tensor)

    monkeypatch.setattr(torch.Tensor, "float", noted)
    out = attend(torch.ones(4, 1, 16).bfloat16(), keys, values, 0.25, None)
    assert torch.equal(out, torch.ones(4, 1, 16).bfloat16())
    assert 0 < largest < keys.numel() / 10


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(("rows", "past"), [(1, 0), (1, 9), (6, 5), (37, 0), (20, 20)])
def test_a_sink_is_a_score_without_a_value(window, rows, past):
    """Each head's sink is one more score whose token has no value, in every row."""
    generator = torch.Generator().manual_seed(rows + past)
    query = torch.randn(8, rows, 16, generator=generator).bfloat16()
    keys, values = (torch.randn(2, past + rows, 16, generator=generator).bfloat16() for _ in range(2))
    sinks = torch.randn(8, generator=generator).bfloat16()
    got = attend_tiles(query, reader(keys, values), past + rows, 0.25, window, sinks).double()
    want = torch.empty_like(got)
    for head in range(8):
        for row in range(rows):
            position = past + row
            first = 0 if window is None else max(position - window + 1, 0)
            k, v = (t[head // 4, first : position + 1].double() for t in (keys, values))
            scores = torch.cat((sinks[head : head + 1].double(), k @ query[head, row].double() * 0.25))
            want[head, row] = torch.softmax(scores, 0)[1:] @ v
    assert (got - want).norm() / want.norm() < 0.01


@pytest.mark.parametrize("fast", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize(("rows", "past"), [(1, 4), (5, 0), (5, 4)])
def test_values_may_be_narrower_than_keys(monkeypatch, fast, rows, past):
    """The result has the size of the values, where keys are wider."""
    monkeypatch.setattr(attend_module, "fast_bf16", lambda: fast)
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(4, rows, 24, generator=generator).bfloat16()
    keys = torch.randn(2, past + rows, 24, generator=generator).bfloat16()
    values = torch.randn(2, past + rows, 12, generator=generator).bfloat16()
    got = attend(query, keys, values, 0.2, None).double()
    wide = written_out(query, keys, torch.nn.functional.pad(values, (0, 12)), 0.2, None)
    assert got.shape == (4, rows, 12)
    assert (got - wide[..., :12]).norm() / wide.norm() < 0.01


def test_a_mask_is_a_window_or_nothing():
    """A sliding layer's mask is its window, a causal layer's is None, and any other mask is refused."""
    assert window_of_mask(batch_size=1, q_length=3) is None
    window = window_of_mask(batch_size=1, local_size=4, allow_is_causal_skip=True)
    assert window is not None
    assert int(window) == 4
    with pytest.raises(ModelRefused, match="model's own"):
        window_of_mask(allow_is_causal_skip=False)


@pytest.mark.parametrize("eight_bits", [False, True])
def test_latents_are_attended_to_as_if_every_head_had_its_keys(monkeypatch, eight_bits):
    """Scores and sums over latents equal scores and sums over the keys and values that kv_b_proj makes of them."""
    # Two heads' matrices at a time do not fit, so that the weights are taken in slices.
    monkeypatch.setattr(latent_module, "SLICE_BYTES", 4 * 16 * 32)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(4 * (16 + 12), 32, generator=generator)
    codes, scale = (weight * 20).round().clamp(-127, 127).to(torch.int8), None
    if eight_bits:
        scale = torch.rand(len(weight), generator=generator).bfloat16() / 16
        weight = codes.float() * scale.float().unsqueeze(1)
    linear = SimpleNamespace(weight=codes if eight_bits else weight.bfloat16(), scale=scale)
    module = SimpleNamespace(qk_nope_head_dim=16, v_head_dim=12, kv_lora_rank=32, kv_b_proj=linear)
    query, cached = (torch.randn(n, 5, d, generator=generator).bfloat16() for n, d in ((4, 24), (1, 40)))
    heads = latent_module.LatentHeads(module)
    scores = heads.query(query).float() @ cached.float().mT
    expanded = weight.view(4, 28, 32) @ cached[..., :32].float().mT
    plain = query[..., :16].float() @ expanded[:, :16]
    want = plain + query[..., 16:].float() @ cached[..., 32:].float().mT
    assert (scores - want).norm() / want.norm() < 0.02
    weights = torch.rand(4, 5, 5, generator=generator).bfloat16()
    got = heads.value(weights @ cached[..., :32]).float()
    want = weights.float() @ expanded[:, 16:].mT
    assert (got - want).norm() / want.norm() < 0.02
