"""Every family through a store, against transformers' own model of the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_cases import PROMPTS, Case
from family_models import SEPARATE, SMALL, blocks_of, router_of
from pairwise import pairwise
from transformers import DynamicCache

from edgemoe.engine.engine import Engine
from edgemoe.experts.step import Study
from edgemoe.families.traits import TRAITS
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.importance import PromptAttention
from edgemoe.prefetch.step import FetcherStep

pytestmark = pytest.mark.e2e

LEVEL_8_KL = 0.001
DENSE_8_KL = 0.01
DEFINITION_KL = 0.001
KV_KL = {"q8_0": 0.002, "q4_0": 0.3}
ROUNDING = 0.03
"""Largest relative difference of logits, as vectors, that another order of bf16 rounding may make."""


def kl(want: torch.Tensor, logits: torch.Tensor) -> float:
    """Largest divergence of any row of softmax(got) from softmax(want), nats."""
    p, q = want.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).max())


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def a_sequence(engine: Engine) -> SequenceKV:
    """A sequence in addition to the one that the engine's limit includes."""
    return SequenceKV(engine.shape.kv, engine.plan.context)


def prefilled(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary], all tokens in one step."""
    return engine.all_logits(a_sequence(engine), tokens, decode=False)


def decoded(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary], each token in a step of its own."""
    sequence = a_sequence(engine)
    return torch.cat([engine.step(Step((Segment(sequence, (token,)),))) for token in tokens])


def continued(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary], in three steps of several rows."""
    sequence = a_sequence(engine)
    pieces = tokens[:2], tokens[2:7], tokens[7:]
    return torch.cat([engine.all_logits(sequence, piece, decode=False) for piece in pieces])


def distances(case: Case, engine: Engine, run: Callable[[Engine, list[int]], torch.Tensor]) -> list[float]:
    """Each prompt's largest divergence, ascending."""
    return sorted(
        kl(want, run(engine, tokens)) for want, tokens in zip(case.logits, case.prompts, strict=True)
    )


def covering(*values: Any) -> Any:
    """A parameter set whose first value is the family that the test stands for."""
    return pytest.param(*values, marks=pytest.mark.covers(values[0]))


EVERY = [covering(name) for name in SMALL]

DIFFERENT = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
"""Families with grouped-query attention, latents, windows with sinks and biases, and linear states."""

SOME = [covering(name) for name in DIFFERENT]
SOME += [
    pytest.param(name, marks=[pytest.mark.covers(name), pytest.mark.folders])
    for name in SMALL
    if name not in DIFFERENT
]
"""Every family, of which all but DIFFERENT are left to `make test-folders`: test_level_8_is_transformers has them."""


@pytest.mark.parametrize("model_type", EVERY)
def test_level_8_is_transformers(case_of, open_engine, model_type):
    """After every token, prefilled, decoded or continued, the next is distributed as transformers has it."""
    case = case_of(model_type)
    engine = open_engine(case.store(), experts=3)
    for run in (prefilled, decoded, continued):
        assert distances(case, engine, run)[-1] < LEVEL_8_KL, run.__name__


@pytest.mark.parametrize("model_type", [covering(name) for name in SEPARATE])
def test_a_tensor_for_each_experts_matrix_gives_the_same_store(case_of, model_type):
    """The store of either form of a checkpoint has the same records, and equally many dense weights.

    Dense tensors have the names of their form. test_level_8_is_transformers compares what the fused ones give.
    """
    separate, fused = (case_of(model_type).store(form) for form in ("separate", "fused"))
    records, others = (
        {path.name: path.read_bytes() for path in s.glob("experts-*")} for s in (separate, fused)
    )
    assert records == others != {}


@pytest.mark.parametrize("model_type", [each for each in SOME if each.values != ("phimoe",)])
def test_prompts_in_one_step_have_the_bits_of_each_alone(case_of, open_engine, model_type):
    """Three prompts of different lengths in one step leave the logits and the next tokens' logits of each alone.

    A phimoe with longrope positions runs one sequence at a time.
    """
    case = case_of(model_type)
    engine = open_engine(case.store(), experts=3, parallel=PROMPTS)
    parts = [tokens[i:] for i, tokens in enumerate(case.prompts)]
    sequences = [a_sequence(engine) for _ in parts]
    segments = [
        Segment(sequence, tuple(tokens), PromptAttention())
        for sequence, tokens in zip(sequences, parts, strict=True)
    ]
    together = engine.step(Step(tuple(segments)))
    for logits, sequence, tokens in zip(together, sequences, parts, strict=True):
        alone = a_sequence(engine)
        assert torch.equal(logits, engine.prefill(alone, tokens))
        after = [engine.step(Step((Segment(each, (3,)),))) for each in (sequence, alone)]
        assert torch.equal(*after)


@pytest.mark.parametrize("model_type", SOME)
def test_dense_weights_at_8_bits_are_close(case_of, open_engine, model_type):
    """Prefilled, decoded and continued logits with dense weights at 8 bits meet their wider bound.

    Their error, and the error of 8-bit activations, is larger than the noise that prompts were chosen by, so two of the
    three may be routed elsewhere.
    """
    case = case_of(model_type)
    engine = open_engine(case.store(dense_bits=8))
    for run in (prefilled, decoded, continued):
        assert distances(case, engine, run)[0] < DENSE_8_KL, run.__name__


@pytest.mark.parametrize("kv", ["q8_0", "q4_0"])
@pytest.mark.parametrize("model_type", SOME)
def test_quantized_keys_and_values_are_close(case_of, open_engine, model_type, kv):
    """Every family's attention reads them, whatever its heads, windows, sinks or latents: decoded and continued.

    Their error can exceed the noise that prompts were chosen by, so one of the three may be routed elsewhere, at 4 bits
    two.
    """
    case = case_of(model_type)
    engine = open_engine(case.store(), kv=kv)
    for run in (prefilled, decoded, continued):
        found = distances(case, engine, run)
        assert found[kv == "q8_0"] < KV_KL[kv], run.__name__
        assert found[-1] > 0


def quantized_by_hand(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers that rows stand for (decision 0035), of blocks of 32, a block at a time, in float64."""
    found = x.double().clone()
    for start in range(0, x.shape[-1], 32):
        block = found[..., start : start + 32]
        high, low = block.amax(-1, keepdim=True), block.amin(-1, keepdim=True)
        if bits == 8:
            exact, codes = torch.maximum(high, -low) / 127, (-127, 127)
        else:  # the number of the largest magnitude has code -8
            exact, codes = torch.where(-low > high, low, high) / -8, (-8, 7)
        scale = exact.bfloat16().double()
        wider = exact.sign() * exact.abs() * (1 + 2**-7)
        scale = torch.where(scale.abs() < exact.abs(), wider.bfloat16().double(), scale)  # away from zero
        block.copy_((block / scale.where(scale != 0, 1)).round().clamp(*codes) * scale)
    return found.to(x.dtype)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Runs of the largest power of two that divides the last dimension, by Sylvester's matrix over its root."""
    size = x.shape[-1] & -x.shape[-1]
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64), matrix)
    return (x.double().unflatten(-1, (-1, size)) @ (matrix / size**0.5)).flatten(-2)


@pairwise(alone=["model_type"], model_type=["qwen3_moe", "mixtral", "gpt_oss", "olmoe"], kv=["q8_0", "q4_0"])
def test_quantized_keys_and_values_are_those_of_the_definition(
    case_of, open_engine, monkeypatch, model_type, kv
):
    """transformers' model, whose cache stores codes and scales by hand: fused decode, windows, sinks, prompts.

    Keys that are a tenth too large, or not turned, are beyond the bound.
    """
    case, bits = case_of(model_type), int(kv[1])
    engine = open_engine(case.store(), kv=kv)
    original = DynamicCache.update

    def reference(scale: float, turns: bool) -> torch.Tensor:
        def update(self, keys, values, layer, *args, **kwargs):
            if turns and bits == 4:
                keys = turned(scale * quantized_by_hand(turned(keys), bits)).to(keys.dtype)
            else:
                keys = scale * quantized_by_hand(keys, bits)
            return original(self, keys, quantized_by_hand(values, bits), layer, *args, **kwargs)

        with monkeypatch.context() as patched, torch.no_grad():
            patched.setattr(DynamicCache, "update", update)
            return case.model(torch.tensor(case.prompts), use_cache=True).logits.float()

    def distance(want: torch.Tensor, run: Callable[[Engine, list[int]], torch.Tensor]) -> float:
        pairs = zip(want, case.prompts, strict=True)
        return sorted(kl(logits, run(engine, tokens)) for logits, tokens in pairs)[1]

    want = reference(1, turns=True)
    for run in (prefilled, decoded, continued):
        assert distance(want, run) < DEFINITION_KL, run.__name__
    if model_type in ("qwen3_moe", "olmoe"):  # normalised keys make sharp attention
        assert distance(reference(1.1, turns=True), decoded) > 1.5 * DEFINITION_KL
        if bits == 4:
            assert distance(reference(1, turns=False), decoded) > 4 * DEFINITION_KL


@pairwise(
    alone=["model_type"],
    model_type=["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"],
    kv=["bf16", "q8_0", "q4_0"],
)
def test_limits_change_no_bit_in_any_format(case_of, open_engine, model_type, kv):
    """Fused decode, latents, windows with sinks, linear states: prompts, new tokens, and two sequences in a step."""
    case = case_of(model_type)
    found = []
    for experts in (2, 5, None):
        engine = open_engine(case.store(), kv=kv, experts=experts, parallel=2)
        rows = [run(engine, case.prompts[0]) for run in (prefilled, decoded, continued)]
        sequences = a_sequence(engine), a_sequence(engine)
        for sequence, tokens in zip(sequences, case.prompts, strict=False):
            engine.all_logits(sequence, tokens[:6], decode=False)
        step = Step(
            tuple(Segment(each, (tokens[6],)) for each, tokens in zip(sequences, case.prompts, strict=False))
        )
        found.append(torch.cat([*rows, engine.step(step)]))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("model_type", SOME)
def test_the_bound_would_see_a_wrong_expert(case_of, open_engine, model_type, monkeypatch):
    """Zeroed experts move transformers' own logits far beyond the bounds; experts at 2 bits do so to edgemoe's."""
    case = case_of(model_type)
    own = case.logits  # before the experts change
    for block in blocks_of(case.model):
        monkeypatch.setattr(block.experts, "forward", lambda hidden, *_: torch.zeros_like(hidden))
    with torch.no_grad():
        without = case.model(torch.tensor(case.prompts)).logits.float()
    for want, got in zip(own, without, strict=True):
        assert kl(want, got) > 5 * DENSE_8_KL
    assert distances(case, open_engine(case.store(), level=2), prefilled)[0] > 10 * LEVEL_8_KL


@pytest.mark.parametrize("model_type", SOME)
def test_sequences_of_one_step_do_not_see_each_other(case_of, open_engine, model_type):
    """Two sequences of unequal lengths and rows have the same logits in one step as alone, to rounding."""
    case = case_of(model_type)
    engine = open_engine(case.store())
    first, second, _ = case.prompts
    sequences = a_sequence(engine), a_sequence(engine)
    engine.step(Step((Segment(sequences[0], tuple(first[:5])), Segment(sequences[1], tuple(second[:1])))))
    engine.step(Step((Segment(sequences[1], tuple(second[1:6])), Segment(sequences[0], (first[5],)))))
    pairs = zip(sequences, (first, second), strict=True)
    got = engine.step(Step(tuple(Segment(sequence, (tokens[6],)) for sequence, tokens in pairs)))
    want = torch.stack([decoded(engine, tokens[:7])[-1] for tokens in (first, second)])
    assert apart(want[0], want[1]) > 5 * ROUNDING
    assert max(apart(*pair) for pair in zip(got, want, strict=True)) < ROUNDING


@pytest.mark.parametrize("model_type", EVERY)
def test_look_ahead_has_every_next_router(case_of, open_engine, model_type):
    """Each layer's experts predict what transformers' next router chooses on the same state; the last layer's do not.

    A router that is one product is compared by its weight, to the bit; its choice is tested in test_family_traits.
    """
    case = case_of(model_type)
    blocks, theirs = blocks_of(open_engine(case.store()).model), blocks_of(case.model)
    bound = [block.experts.edgemoe for block in blocks]
    assert bound[-1].next_router is None
    state = torch.randn(50, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    for here, after, block in zip(bound, bound[1:], theirs[1:], strict=False):
        layer, scored = here.next_router
        assert layer == after.layer
        if TRAITS[model_type].product_router:
            assert torch.equal(scored.weight, router_of(block).weight.to(torch.bfloat16))
            continue
        with torch.no_grad():
            _, _, experts = router_of(block)(state)
            assert torch.equal(
                scored(state).isfinite().nonzero()[:, 1].view_as(experts), experts.sort().values
            )


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss", "mixtral"])
def test_look_ahead_makes_no_choice(case_of, open_engine, model_type):
    """A rule in the routers' place is called once for each layer and step, though routers predict between layers."""
    case = case_of(model_type)
    if not TRAITS[model_type].gate:
        pytest.skip("a rule cannot choose in this family's routers' place")
    engine, layers = open_engine(case.store(), experts=4, speculate="full"), []

    def reroute(layer, logits, top_k):
        layers.append(layer)
        return logits.float().topk(top_k).indices

    with engine.studied(Study(reroute=reroute)):
        sequence = a_sequence(engine)
        engine.prefill(sequence, case.prompts[0])
        engine.step(Step((Segment(sequence, (5,)),)))
    bound = [block.experts.edgemoe.layer for block in blocks_of(engine.model)]
    assert layers == 2 * bound


@pytest.mark.parametrize("model_type", SOME)
def test_a_scheduled_prompt_runs_with_importance_and_look_ahead(case_of, open_engine, model_type):
    """Levels by attention received, skipping and look-ahead work in every family, at the scheduled levels."""
    case = case_of(model_type)
    engine = open_engine(
        case.store(), experts=4, levels=(4, 0), exact=False, importance="heavy-hitters", retention=0.5
    )
    sequence = a_sequence(engine)
    for tokens in (case.prompts[0], case.prompts[1], [5]):
        assert torch.isfinite(engine.prefill(sequence, tokens)).all()
    used = engine.take_use()
    assert set(used.scheduled) == {4, 0}


@pytest.mark.parametrize("model_type", ["qwen3_next", "deepseek_v3", "mixtral"])
def test_a_step_that_fails_leaves_the_sequence_as_it_was(case_of, open_engine, model_type, monkeypatch):
    """After an error in the last layer's experts, the same tokens have an undisturbed run's logits, bit for bit."""
    case = case_of(model_type)
    engine, tokens = open_engine(case.store(), experts=4), case.prompts[0]
    want = continued(engine, tokens)
    sequence = a_sequence(engine)
    got = [engine.all_logits(sequence, tokens[:2], decode=False)]
    request, last = FetcherStep.request, engine.shape.layers - 1

    def fails(step, levels, **how):
        return request(step, levels, **how) if min(levels).layer < last else 1 / 0

    for piece in (tokens[2:7], tokens[7:]):
        with monkeypatch.context() as broken:
            broken.setattr(FetcherStep, "request", fails)
            with pytest.raises(ZeroDivisionError):
                engine.all_logits(sequence, piece, decode=False)
        got.append(engine.all_logits(sequence, piece, decode=False))
    assert torch.equal(torch.cat(got), want)
