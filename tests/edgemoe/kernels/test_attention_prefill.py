"""Attention of several tokens in one call, against reference equations and against other splits of the prompt."""

from __future__ import annotations

import platform

import pytest
import torch
from attention_equations import by_the_equations
from availability import needs_native
from native_paths import forced, running
from pairwise import pairwise

from edgemoe.kernels.native import paths
from edgemoe.kernels.native.attention import MOST_SHARING, NativeAttention
from edgemoe.kernels.native.attention_rows import LayerKV, Received

pytestmark = needs_native

CONTEXT = 210


PATHS = ["neon"] if platform.machine() == "aarch64" else ["avx2", "avx512-vnni", "avx512-bf16", "amx"]
PATHS = [*PATHS, paths.EMULATED]
"""Paths that have code for a prompt's attention; AMX leaves a token alone to another one."""


class Prompt:
    """Random projections and rotations of every token, and a random KV cache."""

    def __init__(self, heads: int, kv_heads: int, dim: int, normed: bool = True) -> None:
        generator = torch.Generator().manual_seed(heads * dim)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        self.heads, self.norms = heads, None
        if normed:
            self.norms = (1 + random(dim) / 8, 1e-5), (1 + random(kv_heads * dim) / 8, 1e-5)
        angle = torch.rand(CONTEXT, dim // 2, generator=generator).mul(6).repeat(1, 2)
        self.rotation = angle.cos().bfloat16(), angle.sin().bfloat16()
        self.qkv = random(CONTEXT, (heads + 2 * kv_heads) * dim)
        self.keys, self.values = random(kv_heads, CONTEXT, dim), random(kv_heads, CONTEXT, dim)
        self.scaling = 2 * dim**-0.5
        self.attention = NativeAttention(heads, kv_heads, dim, self.norms, self.scaling)

    def attended(self, past, cuts, window):
        """Results for rows [past, cuts[-1]), a call for each part that ends at one of `cuts`; keys and values."""
        keys, values, out = self.keys.clone(), self.values.clone(), []
        for start, end in zip((past, *cuts), cuts, strict=False):
            rotation = self.rotation[0][start:end], self.rotation[1][start:end]
            out.append(
                self.attention(self.qkv[start:end].clone(), rotation, LayerKV(keys, values, start), window)
            )
        return torch.cat(out), keys, values


SHAPES = [(4, 4, 16), (6, 2, 48), (14, 2, 80), (32, 4, 128), (40, 1, 16)]


@pytest.mark.e2e
@pairwise(
    path=running(PATHS),
    shape=SHAPES,
    span=[(0, 2), (0, 70), (5, 8), (61, 200), (128, 193)],
    window=[None, 1, 40, 128],
)
def test_results_match_the_equations(path, shape, span, window):
    """Results match to bf16's rounding; only the KV entries of these tokens change."""
    (heads, _, dim), (past, end) = shape, span
    prompt = Prompt(*shape, normed=dim != 80)
    with forced(path):
        out, keys, values = prompt.attended(past, (end,), window)
    for row in {past, (past + end) // 2, end - 2, end - 1}:
        rotation = prompt.rotation[0][row], prompt.rotation[1][row]
        first = max(row + 1 - window, 0) if window else 0
        expected, key, value = by_the_equations(
            *(prompt.qkv[row], prompt.norms, rotation, keys, values, row, first, heads, prompt.scaling)
        )
        torch.testing.assert_close(out[row - past].double(), expected, atol=0.03, rtol=0.03)
        torch.testing.assert_close(keys[:, row].double(), key, atol=0.03, rtol=0.02)
        assert torch.equal(values[:, row].double(), value)
    others = [token for token in range(CONTEXT) if not past <= token < end]
    assert torch.equal(keys[:, others], prompt.keys[:, others])
    assert torch.equal(values[:, others], prompt.values[:, others])


@pytest.mark.e2e
@pairwise(path=running(PATHS), shape=SHAPES, window=[None, 40])
def test_bits_do_not_depend_on_the_split(path, shape, window):
    """A token's bits depend neither on the prompt's split into calls, of one token too, nor on the instruction set."""
    prompt = Prompt(*shape)
    with forced(paths.available()[0]):
        whole = prompt.attended(3, (200,), window)
    with forced(path):
        for cuts in ((200,), (5, 200), (64, 66, 200), (67, 131, 150, 200), range(4, 201)):
            assert all(map(torch.equal, prompt.attended(3, cuts, window), whole))


@pytest.mark.e2e
@pytest.mark.parametrize("path", PATHS)
def test_small_numbers_have_the_same_bits(path):
    """Instructions on bf16 take operands and results below 2^-126 for zero, and so does every path: values of 2^-130 to
    2^-60, whose products with weights and sums lie on both sides of it."""
    prompt = Prompt(6, 2, 48, normed=False)
    size = torch.arange(-130, -60).repeat(CONTEXT // 70).double().exp2()[None, :, None]
    prompt.values = (prompt.values.double() * size).bfloat16()
    prompt.qkv[:, -2 * 48 :] = (prompt.qkv[:, -2 * 48 :].double() * size[0]).bfloat16()
    prompt.qkv[:, : -4 * 48] *= 20  # so that weights reach e^-87
    with forced(paths.available()[0]):
        want = prompt.attended(3, (200,), None)[0]
    with forced(path):
        found = [prompt.attended(3, cuts, None)[0] for cuts in ((200,), range(4, 201))]
    assert all(torch.equal(each.view(torch.int16), want.view(torch.int16)) for each in found)
    assert 0 < want[want != 0].abs().min() < 2.0**-115


def received_by_the_equations(queries, keys, scaling, past, first, window):
    """Attention [tokens] that each token receives from the rows from `first` on, in float64, a row and head at a time.

    Args:
        queries: [rows, heads, dim], of tokens from `past` on.
        keys: [kv_heads, tokens, dim].
    """
    received = torch.zeros(keys.shape[1], dtype=torch.double)
    for row in range(first, len(queries)):
        seen = slice(max(past + row + 1 - window, 0) if window else 0, past + row + 1)
        for head, query in enumerate(queries[row].double()):
            of = head * len(keys) // len(queries[row])
            received[seen] += (keys[of, seen].double() @ query * scaling).softmax(0) / len(queries[row])
    return received


@pytest.mark.e2e
@pairwise(
    shape=[(6, 2, 48), (32, 4, 128), (40, 1, 16)],
    span=[(0, 70, 0), (61, 200, 0), (61, 200, 100), (128, 129, 0)],
    window=[None, 40],
)
def test_attention_that_tokens_receive(shape, span, window):
    """Sums match the equations as closely as bf16 weights do; they are the same bits by every path, and counting them
    changes no result."""
    (heads, _, dim), (past, end, first) = shape, span
    prompt = Prompt(*shape)
    rotation = prompt.rotation[0][past:end], prompt.rotation[1][past:end]
    found = []
    for path in (*paths.available(), paths.EMULATED):
        with forced(path):
            keys, values, qkv = prompt.keys.clone(), prompt.values.clone(), prompt.qkv[past:end].clone()
            received = Received(torch.full((end,), -1.0), first)
            out = prompt.attention(qkv, rotation, LayerKV(keys, values, past), window, received)
            found.append((out, received.sums))
    if end - past > 1:
        assert torch.equal(found[0][0], prompt.attended(past, (end,), window)[0])
    assert all(torch.equal(*pair) for other in found for pair in zip(found[0], other, strict=True))
    # The call leaves queries with their norms and rotations in their place.
    queries = qkv.view(end - past, -1, dim)[:, :heads]
    want = received_by_the_equations(queries, keys[:, :end], prompt.scaling, past, first, window)
    torch.testing.assert_close(found[0][1].double(), want, atol=1e-5, rtol=3e-3)


def test_sums_of_other_tokens_are_refused():
    """The sums have a place for each token of the sequence; C would write past fewer."""
    prompt = Prompt(4, 4, 16)
    rotation = prompt.rotation[0][:4], prompt.rotation[1][:4]
    with pytest.raises(ValueError, match="sums of 7 tokens"):
        prompt.attention(
            *(prompt.qkv[:4].clone(), rotation, LayerKV(prompt.keys, prompt.values, 3), None),
            received=Received(torch.zeros(6), 0),
        )


def test_a_nan_key_reaches_only_tokens_that_attend_to_it():
    """A NaN in a key makes the tokens that attend to it NaN; windows that exclude it stay finite."""
    prompt = Prompt(4, 2, 16)
    prompt.keys[1, 70, 5] = float("nan")
    out, _, _ = prompt.attended(100, (140,), None)
    assert out.view(40, 4, 16)[:, 2:].isnan().all()
    assert not out.view(40, 4, 16)[:, :2].isnan().any()
    assert not prompt.attended(112, (140,), 40)[0].isnan().any()


@pytest.mark.parametrize("rotation", [torch.zeros(3, 16), torch.zeros(2, 8), torch.zeros(16, 2).T])
def test_a_rotation_of_another_shape_is_refused(rotation):
    """A rotation has a contiguous row of a head's size per token; C would read past any other."""
    kv, table = torch.zeros(1, 4, 16).bfloat16(), rotation.bfloat16()
    attention = NativeAttention(1, 1, 16, None, 1.0)
    with pytest.raises(ValueError, match="a rotation of"):
        attention(torch.zeros(2, 48).bfloat16(), (table, table), LayerKV(kv, kv, 0), None)


def test_too_many_heads_per_key_head_are_refused():
    """A task holds at most MOST_SHARING queries of a token."""
    with pytest.raises(ValueError, match="heads of keys"):
        NativeAttention(MOST_SHARING + 1, 1, 16, None, 1.0)


@pytest.mark.parametrize("rows", [1, 40])
def test_small_numbers_of_the_caller_stay(rows):
    """Attention takes numbers below 2^-126 for zero in its own calls alone, whichever thread they run on."""
    prompt = Prompt(6, 2, 48)
    for _ in range(20):
        prompt.attended(100, (100 + rows,), None)
    assert torch.full((100_000,), 1e-40).mul(1).eq(1e-40).all()
