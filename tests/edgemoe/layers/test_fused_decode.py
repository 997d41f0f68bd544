"""A new token's attention in one call, against the equations written out and transformers' way through the module."""

from __future__ import annotations

import pytest
import torch
from attention_equations import by_the_equations
from family_models import SMALL, VOCABULARY, random_model, save

from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.families.table import FAMILIES
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention import NativeAttention
from edgemoe.kernels.native.router import NativeRouter
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.gqa import PlainAttention
from edgemoe.layers.router import SoftmaxRouter
from edgemoe.models.resolve import convert_checkpoint
from edgemoe.policy.settings import RunSettings

pytestmark = pytest.mark.skipif(not native.available(), reason="edgemoe's kernel does not run here")

CONTEXT = 40
PLAIN = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 48), (14, 2, 80), (8, 1, 128)])
@pytest.mark.parametrize("normed", ["not", "each head", "all heads"])
@pytest.mark.parametrize(("past", "first"), [(0, 0), (1, 0), (33, 0), (33, 30), (39, 39)])
def test_it_is_attention(heads, kv_heads, dim, normed, past, first):
    """The equations' sums within bf16's rounding; the KV gets this token and nothing else."""
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
    (out,) = attention(qkv.clone()[None], tables, keys, values, past, past + 1 - first)
    torch.testing.assert_close(out.double(), expected, atol=0.03, rtol=0.03)
    torch.testing.assert_close(keys[:, past].double(), key, atol=0.03, rtol=0.02)
    assert torch.equal(values[:, past].double(), value)
    for tensor, was in zip((keys, values), before, strict=True):
        others = [token for token in range(CONTEXT) if token != past]
        assert torch.equal(tensor[:, others], was[:, others])


def test_a_head_is_the_same_with_others_or_without():
    """Heads that share keys and values go over them together, in fours, twos and alone: not a bit differs."""
    heads, dim, past = 7, 48, 37
    generator = torch.Generator().manual_seed(3)
    qkv, keys, values = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((heads + 2, dim), (1, CONTEXT, dim), (1, CONTEXT, dim))
    )
    rotation = torch.ones(1, dim).bfloat16(), torch.zeros(1, dim).bfloat16()

    def attended(rows):
        attention = NativeAttention(len(rows) - 2, 1, dim, None, dim**-0.5)
        return attention(rows.view(1, -1), rotation, keys, values, past, past - 1).view(-1, dim)

    alone = [attended(qkv[[head, heads, heads + 1]]) for head in range(heads)]
    assert torch.equal(attended(qkv), torch.cat(alone))


def test_scores_that_are_not_numbers_are_seen():
    """NaN in a key that a token sees is NaN in what its head gives."""
    keys, values = (torch.ones(1, CONTEXT, 16).bfloat16() for _ in range(2))
    keys[0, 3, 5] = float("nan")
    rotation = torch.ones(1, 16).bfloat16(), torch.zeros(1, 16).bfloat16()
    out = NativeAttention(1, 1, 16, None, 1.0)(torch.ones(1, 48).bfloat16(), rotation, keys, values, 9, None)
    assert out.isnan().all()


def test_heads_that_the_kernel_cannot_take_are_refused():
    """Vectors are of 8 numbers, in two halves."""
    with pytest.raises(ValueError, match="24"):
        NativeAttention(2, 2, 24, None, 1.0)


@pytest.fixture(scope="module", params=PLAIN)
def store(request, tmp_path_factory):
    """A random model of each family that the quick way is for, converted."""
    place = tmp_path_factory.mktemp(request.param)
    changes = {"clip_qkv": None} if request.param == "olmoe" else {}  # clipped, it goes through the module
    save(random_model(request.param, **changes), place / "source", fused=True)
    convert_checkpoint(place / "source", place / "store", max_level=8, layout="auto", dense_bits=16)
    return place / "store"


def decoded(store, sequences, steps=12):
    """Logits [steps, sequences, vocabulary] of sequences that go on together; and the model that they went through."""
    model = StoreModel.open(store)
    settings = RunSettings.uniform(8)
    plan = model.plan(vram_limit=2_000_000, settings=settings, context=CONTEXT)
    out = []
    with Engine(model, plan, settings) as engine:
        some = [engine.new_sequence() for _ in range(sequences)]
        for length, sequence in zip((5, 9)[:sequences], some, strict=True):
            engine.prefill(sequence, [(7 * i + length) % VOCABULARY for i in range(length)])
        for token in range(steps):
            segments = tuple(Segment(sequence, (token + i,)) for i, sequence in enumerate(some))
            out.append(engine.step(Step(segments)))
        assert engine._source.roomy
        model = engine._model
    return torch.stack(out), model


@pytest.mark.parametrize("sequences", [1, 2])
def test_the_quick_way_and_the_modules_agree(store, monkeypatch, sequences):
    """The same logits but for the order of additions, of one sequence and of two of unequal lengths in one step.

    On a processor with bf16 instructions torch's attention rounds more.
    """
    quick, model = decoded(store, sequences)
    layer = model.model.layers[0]
    assert (type(layer.self_attn), type(layer.mlp.gate.forward)) == (PlainAttention, SoftmaxRouter)
    assert model.of_one_token.ready == (sequences == 1)
    monkeypatch.setattr(PlainAttention, "like", lambda module: None)
    monkeypatch.setattr(SoftmaxRouter, "like", lambda router: None)
    plain, model = decoded(store, sequences)
    layer = model.model.layers[0]
    assert not {PlainAttention, SoftmaxRouter} & {type(layer.self_attn), type(layer.mlp.gate.forward)}
    assert model.of_one_token is None
    distance = (quick - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert distance.median() < 0.015  # a router's near-tie may tip now and then


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (60, 4), (128, 8), (8, 8)])
def test_a_router_is_a_softmax_of_which_the_likeliest_count(experts, top_k, normalise):
    """Torch's softmax and top k say the same, also where two experts are equally likely: the first of them."""
    logits = torch.randn(experts, generator=torch.Generator().manual_seed(experts)).mul(4).bfloat16()
    logits[1] = logits[3] = logits.max() + 1
    router = NativeRouter(torch.zeros(experts, 16).bfloat16(), top_k, normalise=normalise, rounded=False)
    chosen, shares = router.of_logits(logits)
    probabilities = logits.double().softmax(0)
    want, order = probabilities.sort(descending=True, stable=True)
    assert chosen[0].tolist() == order[:top_k].tolist()
    want = want[:top_k] / (want[:top_k].sum() if normalise else 1)
    torch.testing.assert_close(shares[0].double(), want, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("rounded", [True, False])
def test_a_router_knows_tokens_logits(rounded, tokens):
    """Torch's product of weight and tokens, its softmax and top k, rounded to bf16 if asked."""
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, 64, generator=generator).bfloat16() for n in (20, tokens))
    router = NativeRouter(weight, 4, normalise=False, rounded=rounded)
    logits, chosen, shares = router(x)
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=0.01, atol=0.02)
    want, best = logits.float().softmax(-1).sort(descending=True, stable=True)
    want, best = want[:, :4], best[:, :4]
    assert torch.equal(chosen, best)
    torch.testing.assert_close(shares, want.bfloat16().float() if rounded else want, rtol=1e-5, atol=0)


def test_what_is_not_a_number_is_not_routed_away():
    """Shares are NaN where a logit is, so that the engine sees it."""
    logits = torch.zeros(8).bfloat16()
    logits[5] = float("nan")
    router = NativeRouter(torch.zeros(8, 16).bfloat16(), 2, normalise=True, rounded=False)
    assert router.of_logits(logits)[1].isnan().all()


class OtherRouter(torch.nn.Module):
    """Sigmoids instead of a softmax, in the same interface."""

    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 16).bfloat16())

    def forward(self, hidden):
        logits = hidden @ self.weight.T
        weights, experts = logits.float().sigmoid().topk(2)
        return logits, weights.bfloat16(), experts


def test_another_router_keeps_its_way():
    """What is not a softmax is noticed by what it says."""
    assert SoftmaxRouter.like(OtherRouter()) is None
    assert SoftmaxRouter.like(None) is None


def test_joined_weights_take_no_memory_of_their_own():
    """The parts give what they gave, out of the whole's memory."""
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


def test_every_plain_family_is_known():
    """A family said to be plain is one of those compared here."""
    assert sorted(name for name, family in FAMILIES.items() if family.plain_attention) == sorted(PLAIN)
    assert set(PLAIN) <= set(SMALL)
