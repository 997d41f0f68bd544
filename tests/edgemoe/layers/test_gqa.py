"""One token's attention and routing in single kernel calls, against equations and torch's operators."""

from __future__ import annotations

import pytest
import torch
from attention_equations import by_the_equations
from availability import needs_native
from pairwise import pairwise
from torch.multiprocessing.reductions import StorageWeakRef

from edgemoe.kernels.native.attention import NativeAttention
from edgemoe.kernels.native.attention_rows import LayerKV
from edgemoe.kernels.native.router import NativeRouter, RouterForm
from edgemoe.layers import build
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.load import load_dense

pytestmark = needs_native

CONTEXT = 40


@pairwise(
    shape=[(4, 4, 16), (6, 2, 48), (14, 2, 80), (8, 1, 128)],
    normed=["not", "each head", "all heads"],
    span=[(0, 0), (1, 0), (33, 0), (33, 30), (39, 39)],
)
def test_one_token_is_attended_by_the_equations(shape, normed, span):
    """The result equals the equations to bf16's rounding, and of the KV only the token's place changes."""
    (heads, kv_heads, dim), (past, first) = shape, span
    generator = torch.Generator().manual_seed(heads * 100 + past)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    sizes = {"each head": (dim, dim), "all heads": (heads * dim, kv_heads * dim)}.get(normed)
    norms = tuple((1 + random(size) / 8, 1e-5) for size in sizes) if sizes else None
    angle = torch.rand(dim // 2, generator=generator).mul(6).repeat(2)
    rotation = angle.cos().bfloat16(), angle.sin().bfloat16()
    qkv, keys, values = (
        random((heads + 2 * kv_heads) * dim),
        random(kv_heads, CONTEXT, dim),
        random(kv_heads, CONTEXT, dim),
    )
    before = keys.clone(), values.clone()
    expected, key, value = by_the_equations(qkv, norms, rotation, keys, values, past, first, heads, dim**-0.5)
    attention = NativeAttention(heads, kv_heads, dim, norms, dim**-0.5)
    tables = rotation[0][None], rotation[1][None]
    (out,) = attention(qkv.clone()[None], tables, LayerKV(keys, values, past), past + 1 - first)
    torch.testing.assert_close(out.double(), expected, atol=0.03, rtol=0.03)
    torch.testing.assert_close(keys[:, past].double(), key, atol=0.03, rtol=0.02)
    assert torch.equal(values[:, past].double(), value)
    for tensor, was in zip((keys, values), before, strict=True):
        others = [token for token in range(CONTEXT) if token != past]
        assert torch.equal(tensor[:, others], was[:, others])


def test_a_heads_bits_do_not_depend_on_other_heads():
    """Heads that share keys are computed in fours, twos and alone; no bit of a head depends on that."""
    heads, dim, past = 7, 48, 37
    generator = torch.Generator().manual_seed(3)
    qkv, keys, values = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((heads + 2, dim), (1, CONTEXT, dim), (1, CONTEXT, dim))
    )
    rotation = torch.ones(1, dim).bfloat16(), torch.zeros(1, dim).bfloat16()

    def attended(rows):
        attention = NativeAttention(len(rows) - 2, 1, dim, None, dim**-0.5)
        return attention(rows.view(1, -1), rotation, LayerKV(keys, values, past), past - 1).view(-1, dim)

    alone = [attended(qkv[[head, heads, heads + 1]]) for head in range(heads)]
    assert torch.equal(attended(qkv), torch.cat(alone))


def test_nan_in_a_key_is_nan_in_the_result():
    """A head's result is NaN where a key that the token sees has a NaN."""
    keys, values = (torch.ones(1, CONTEXT, 16).bfloat16() for _ in range(2))
    keys[0, 3, 5] = float("nan")
    rotation = torch.ones(1, 16).bfloat16(), torch.zeros(1, 16).bfloat16()
    out = NativeAttention(1, 1, 16, None, 1.0)(
        torch.ones(1, 48).bfloat16(), rotation, LayerKV(keys, values, 9), None
    )
    assert out.isnan().all()


def test_other_head_sizes_are_refused():
    """A head size must be a multiple of 16: two halves of vectors of 8."""
    with pytest.raises(ValueError, match="24"):
        NativeAttention(2, 2, 24, None, 1.0)


def routed(logits: torch.Tensor, top_k: int, *, normalise: bool) -> tuple[torch.Tensor, ...]:
    """The native router's result for a token with exactly these logits, bf16 [E]."""
    weight = torch.zeros(len(logits), 16).bfloat16()
    weight[:, 0] = logits
    token = torch.eye(16).bfloat16()[:1]
    return NativeRouter(weight, top_k, RouterForm(normalise=normalise, rounded=False))(token)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (60, 4), (128, 8), (8, 8)])
def test_a_router_is_a_softmax_of_which_the_top_k_count(experts, top_k, normalise):
    """Experts and gate weights are torch's softmax and top k; of equal logits the first expert comes first."""
    logits = torch.randn(experts, generator=torch.Generator().manual_seed(experts)).mul(4).bfloat16()
    logits[1] = logits[3] = logits.max() + 1
    found, chosen, gates = routed(logits, top_k, normalise=normalise)
    assert torch.equal(found[0], logits)
    probabilities = logits.double().softmax(0)
    want, order = probabilities.sort(descending=True, stable=True)
    assert chosen[0].tolist() == order[:top_k].tolist()
    want = want[:top_k] / (want[:top_k].sum() if normalise else 1)
    torch.testing.assert_close(gates[0].double(), want, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("rounded", [True, False])
def test_a_router_has_each_tokens_logits(rounded, tokens):
    """Logits, experts and gate weights are torch's, the weights rounded to bf16 where the family rounds."""
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, 64, generator=generator).bfloat16() for n in (20, tokens))
    router = NativeRouter(weight, 4, RouterForm(normalise=False, rounded=rounded))
    logits, chosen, gates = router(x)
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=0.01, atol=0.02)
    want, best = logits.float().softmax(-1).sort(descending=True, stable=True)
    want, best = want[:, :4], best[:, :4]
    assert torch.equal(chosen, best)
    torch.testing.assert_close(gates, want.bfloat16().float() if rounded else want, rtol=1e-5, atol=0)


def test_nan_logits_are_nan_gate_weights():
    """Gate weights are NaN where a logit is NaN, so that the engine sees it."""
    logits = torch.zeros(8).bfloat16()
    logits[5] = float("nan")
    assert routed(logits, 2, normalise=True)[2].isnan().all()


def test_joined_weights_take_no_memory_of_their_own():
    """Parts of a joined layer keep their results, and their weights are views of the joined weight."""
    generator = torch.Generator().manual_seed(1)
    parts = [
        DenseLinear(
            torch.randint(-127, 128, (n, 32), dtype=torch.int8, generator=generator),
            torch.rand(n, generator=generator).bfloat16(),
            torch.rand(n, generator=generator).bfloat16(),
        )
        for n in (16, 8, 8)
    ]
    x = torch.randn(3, 32, generator=generator).bfloat16()
    before = [part(x) for part in parts]
    whole = DenseLinear.joined(parts)
    assert torch.equal(whole(x), torch.cat(before, dim=-1))
    for part, was in zip(parts, before, strict=True):
        assert torch.equal(part(x), was)
        assert part.weight.untyped_storage().data_ptr() == whole.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("bad", ["all", "one"])
def test_a_router_without_finite_logits_chooses_distinct_experts(bad):
    """NaN in all logits, or in one expert's: no expert is chosen twice, so no buffer holds too many rows."""
    weight, token = torch.randn(8, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    (weight if bad == "all" else weight[0]).fill_(float("nan"))
    _, chosen, _ = NativeRouter(weight, 4, RouterForm(normalise=True, rounded=False))(token)
    assert all(len(set(row)) == 4 and {*row} <= {*range(8)} for row in chosen.tolist())


def test_weights_of_which_a_copy_is_made_are_freed(tiny_store, open_engine, monkeypatch):
    """Joined projections replace q, k and v: their storages are gone before the model is complete, not after it."""
    storages, seen = {}, []

    def load(*args):
        tensors = load_dense(*args)
        names = [
            name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        ]
        storages.update({name: StorageWeakRef(tensors[name].untyped_storage()) for name in names})
        return tensors

    monkeypatch.setattr(build, "load_dense", load)
    monkeypatch.setattr(
        build, "in_huge_pages", lambda tensors: seen.extend(s.expired() for s in storages.values())
    )
    open_engine(tiny_store)
    assert len(seen) > 3
    assert all(seen)
