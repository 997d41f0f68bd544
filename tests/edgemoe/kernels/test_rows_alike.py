"""Products and attention of finished queries: right, and the same bits for a row alone and among others."""

from __future__ import annotations

import pytest
import torch
from availability import needs_native

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention import NativeAttention, StoredAttention
from edgemoe.kernels.native.attention_rows import LayerKV

pytestmark = needs_native

ROWS = (1, 2, 3, 4, 7, 8, 65, 130)


@pytest.fixture(params=[True, False], ids=["bf16", "float32"])
def instructions(request):
    """Products with AVX512-BF16 where it exists, and without."""
    before = native.library().edgemoe_bf16(-1)
    native.use_bf16(request.param)
    yield
    native.use_bf16(bool(before))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cols", [64, 33])
def test_products_of_heads(instructions, cols):
    """x W^T of each head, by torch in float64; matrices may lie apart; each row has the bits of it alone."""
    x, weight = normal(3, 130, cols).bfloat16(), normal(3, 50, cols, seed=1).bfloat16()[:, 4:44]
    whole = native.head_products(x, weight)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().mT, rtol=0.01, atol=0.05)
    for rows in ROWS:
        assert torch.equal(native.head_products(x[:, -rows:].contiguous(), weight), whole[:, -rows:])
    assert torch.equal(whole[1], native.dense_product(x[1], weight[1].contiguous(), None))


@pytest.mark.parametrize("cols", [64, 33])
def test_wide_products(cols):
    """x W^T by torch in float64; each row has the bits of it alone."""
    x, weight = normal(130, cols), normal(50, cols, seed=1)
    whole = native.wide_product(x, weight)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
    for rows in ROWS:
        assert torch.equal(native.wide_product(x[-rows:].contiguous(), weight), whole[-rows:])


def test_products_of_other_sizes_are_refused():
    """K of both, and a matrix that is not contiguous."""
    with pytest.raises(ValueError, match=r"\[2, N, 8\]"):
        native.head_products(normal(2, 3, 8).bfloat16(), normal(2, 5, 9).bfloat16())


@pytest.mark.parametrize("cols", [24, 33, 192])
@pytest.mark.parametrize("by_column", [True, False])
def test_products_of_heads_with_8_bit_matrices_are_those_with_rounded_ones(instructions, cols, by_column):
    """An int8 weight times its row's or column's scale, rounded to bf16, has the bits of that bf16 matrix.

    For few tokens it is rounded as it is read, for more before.
    """
    codes = (normal(3, 22, cols) * 40).to(torch.int8)
    scale = normal(3, cols if by_column else 22, seed=1).mul(0.01).bfloat16()
    wide = codes.bfloat16() * scale.unsqueeze(1 if by_column else 2)
    for tokens in (1, 5, 70):
        x = normal(3, tokens, cols).bfloat16()
        y = native.head_products(x, codes, scale, by_column=by_column)
        assert torch.equal(y, native.head_products(x, wide.contiguous()))


def test_other_numbers_of_columns_are_refused():
    """K of both."""
    with pytest.raises(ValueError, match="rows of 9"):
        native.wide_product(normal(3, 8), normal(5, 9))


HEADS, KV_HEADS, DIM, TOKENS = 8, 2, 32, 150


@pytest.mark.parametrize("window", [None, 40])
def test_attention_of_finished_queries(window):
    """The bits of attention that projects nothing: positions that rotate by no angle, no norm, the same KV."""
    qkv = normal(TOKENS, (HEADS + 2 * KV_HEADS) * DIM).bfloat16()
    keys, values = (torch.zeros(KV_HEADS, TOKENS, DIM).bfloat16() for _ in range(2))
    rotation = torch.ones(TOKENS, DIM).bfloat16(), torch.zeros(TOKENS, DIM).bfloat16()
    projected = NativeAttention(HEADS, KV_HEADS, DIM, None, 0.3)
    want = projected(qkv.clone(), rotation, LayerKV(keys, values, 0), window).view(TOKENS, HEADS, DIM)
    queries = qkv[:, : HEADS * DIM].view(TOKENS, HEADS, DIM).transpose(0, 1)
    stored, done = StoredAttention(HEADS, KV_HEADS, DIM, 0.3), 0
    for rows in (1, 70, 1, 78):
        part = queries[:, done : done + rows]
        got = stored(part, LayerKV(keys, values, done), window)
        assert torch.equal(got.transpose(0, 1), want[done : done + rows])
        done += rows


@pytest.mark.parametrize("rows", [1, 60])
def test_a_sink_is_a_score_without_a_value(rows):
    """Of each head, by a softmax in float64."""
    queries, sinks = normal(HEADS, rows, DIM, seed=1).bfloat16(), normal(HEADS, seed=2) * 3
    keys, values = (normal(KV_HEADS, 100 + rows, DIM, seed=seed).bfloat16() for seed in (3, 4))
    got = StoredAttention(HEADS, KV_HEADS, DIM, 0.3, sinks)(queries, LayerKV(keys, values, 100), None)
    wide = [each.double().repeat_interleave(HEADS // KV_HEADS, 0) for each in (keys, values)]
    scores = queries.double() @ wide[0].mT * 0.3
    scores.masked_fill_(torch.ones(rows, 100 + rows, dtype=torch.bool).triu(101), -torch.inf)
    scores = torch.cat((sinks.double()[:, None, None].expand(HEADS, rows, 1), scores), dim=2)
    want = scores.softmax(2)[:, :, 1:] @ wide[1]
    assert float((got.double() - want).norm() / want.norm()) < 0.01


def test_values_that_are_a_part_of_keys():
    """With latents the first numbers of the result are the sums of the keys' first numbers."""
    queries, keys = normal(HEADS, 5, DIM, seed=1).bfloat16(), normal(1, 70, DIM, seed=2).bfloat16()
    attention = StoredAttention(HEADS, 1, DIM, 0.3)
    latent = attention(queries, LayerKV(keys, keys, 65, latent=16), None)
    assert torch.equal(latent, attention(queries, LayerKV(keys, keys.clone(), 65), None))


def test_latents_of_a_real_model_in_parts():
    """Keys of 576 numbers that 16 heads share: the bits of a row in one call and in parts, one of them of one row."""
    queries, keys = normal(16, 100, 576, seed=1).bfloat16(), normal(1, 100, 576, seed=2).bfloat16()
    attention = StoredAttention(16, 1, 576, 0.05)
    whole = attention(queries, LayerKV(keys, keys, 0, latent=512), None)
    for start, end in ((0, 1), (1, 70), (70, 71), (71, 100)):
        part = attention(queries[:, start:end], LayerKV(keys, keys, start, latent=512), None)
        assert torch.equal(part, whole[:, start:end])


def test_projected_numbers_are_clipped():
    """The bits of numbers that were clipped before; some are above the limit, below its negative, and at it."""
    qkv = normal(20, (HEADS + 2 * KV_HEADS) * DIM).bfloat16()
    qkv[3, ::5] = 0.75
    rotation = [normal(20, DIM, seed=seed).bfloat16() for seed in (1, 2)]
    results = []
    for clip, given in ((0.75, qkv), (None, qkv.clamp(-0.75, 0.75))):
        kv = [torch.zeros(KV_HEADS, 20, DIM).bfloat16() for _ in range(2)]
        attention = NativeAttention(HEADS, KV_HEADS, DIM, None, 0.3, clip)
        results.append((attention(given.clone(), (rotation[0], rotation[1]), LayerKV(*kv, 0), None), *kv))
    assert all(map(torch.equal, *results))
    assert qkv.abs().max() > 2
