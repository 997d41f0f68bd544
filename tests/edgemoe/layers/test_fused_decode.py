"""Fused decode has the bits of transformers' modules under every limit, level rule and look-ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import torch
from availability import needs_native
from family_models import VOCABULARY, blocks_of, random_model, router_of, router_weight, save
from folder_models import folder_model, save_folder_model
from integrity import check_integrity
from pairwise import pairwise

from edgemoe.engine import prices as prices_module
from edgemoe.engine.engine import Engine
from edgemoe.errors import NotFinite, UserError
from edgemoe.experts.layer import ExpertLayer
from edgemoe.experts.use import ExpertUse
from edgemoe.families.table import TEXT_HALVES
from edgemoe.families.traits import TRAITS
from edgemoe.kernels.native.decode_layers import CHOSEN, WANTED, NativeDecodeLayers, Place
from edgemoe.kernels.program import Call
from edgemoe.kernels.registry import kernels_for
from edgemoe.kv.step import Segment, Step
from edgemoe.layers import fused_decode
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.router import CompiledRouter
from edgemoe.models import store_model
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.tier_prices import place_of
from edgemoe.prefetch.step import FetcherStep
from edgemoe.storage.base import ExpertKey
from tools.timing.count_calls import CallCounter

pytestmark = needs_native

MODELS = {
    "mixtral": {},  # a window in every layer
    "olmoe": {},  # norms over all heads together, and clipping
    "qwen2_moe": {},  # shared experts, a dense layer, windows in some layers
    "qwen3_moe, one dense layer": {"mlp_only_layers": [1]},
    "qwen2_moe, 8 bits": {"tie_word_embeddings": True},  # biases, and dense weights at 8 bits per weight
    "qwen3_moe, 8 bits": {"attention_bias": True},
    "qwen3_next": {},  # gated attention, gated delta nets, norms by 1 + weight
    "qwen3_5_moe_text, 8 bits": {},  # delta nets whose projections are separate
    "deepseek_v2": {
        "qk_rope_head_dim": 16,
        "topk_method": "greedy",
    },  # latents, positions that are complex numbers
    "deepseek_v3, 8 bits": {"qk_rope_head_dim": 16},  # queries of low rank, pairs of neighbours
    "glm4_moe_lite": {"qk_rope_head_dim": 16},
    "deepseek_v32": {},  # attention to tokens that an index chooses, which is called
    "axk1": {},  # latents, a norm of the block's result inside of the block
    "axk2, 8 bits": {},  # norms with a gate of low rank
    "glm_moe_dsa": {},  # an index whose choice the next layer takes over
    "mistral4": {},  # queries with a factor of their position, a softmax of rounded numbers in groups
    "kimi_linear": {},  # Kimi Delta Attention, latents that do not rotate
    "bailing_hybrid, 8 bits": {},  # the same, latents with a gate for each head
    "gpt_oss": {},  # sinks, windows in some layers, a router, attention and experts with biases, a clamped gate
    "minimax_m2": {},  # norms over all heads, of which a part is rotated; a router whose bias is an argument
    "hy_v3": {},  # that with a scale and shared experts
    "dots1": {},  # windows in some layers
    "solar_open": {},
    "granitemoe": {},  # multipliers
    "granitemoeshared": {},
    "exaone_moe": {},  # layers that do not rotate
    "mellum": {},  # rotations by kind of layer
    "afmoe": {},  # norms after parts, a gate of its own in attention, scaled embeddings
    "nemotron_h": {},  # layers of one part each, Mamba-2, experts without a gate, no positions
    "granitemoehybrid": {},  # Mamba-2 of one group, multipliers, shared experts next to the block
    "lfm2_moe": {},  # short convolutions, head norms and layers under other names, scores that are rounded
    "mimo_v2_flash": {},  # keys and values by kind of layer, values shorter than keys, with a factor
    "laguna": {},  # heads by layer, a gate for each head, a factor of the experts' sum
    "laguna, 8 bits": {"gating": "per-element"},
    "granitemoe_swa": {},  # rotations by layer
    "flint": {},  # a router with float32 weights, rotation in layers with a window alone
    "beam": {},  # queries scaled by their position, sums weighed by depth, activations and rotation in float32
    "gemma4_text": {
        "top_k_experts": 4
    },  # heads by kind of layer, keys as values, experts parallel to a dense block
    "glm4_moe": {},  # a part of each head rotated, scores with a bias, groups, shared experts, a dense layer
    "ernie4_5_moe": {"moe_k": 4},  # neighbours rotated in float32, a float32 router
    "ernie4_5_moe, 8 bits": {"moe_k": 4, "use_bias": True},
    "hunyuan_v1_moe": {},  # norms of heads after their rotation
    "phimoe": {
        "num_experts_per_tok": 2,
        "router_jitter_noise": 1.0,
    },  # LayerNorm, two experts by two softmaxes, a head with a bias
    "flex_olmo": {},  # norms after parts alone, halves rotated in float32
    "kolibri1": {},  # a choice by the product and a bias
    "cohere2_moe": {},  # one norm for both parts, a mean of shared and chosen experts
    "cohere2_moe, 8 bits": {"expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-6},
    "aria_text": {"moe_topk": 4},
    "qwen3_vl_moe_text": {},
    "glm4v_moe_text": {},
}
"""Model -> its config in addition to family_models.SMALL; most with 4 experts per token."""

WHOLE = {TEXT_HALVES[whole]: whole for whole in ("qwen3_vl_moe", "glm4v_moe", "mistral3")}
"""Language models that checkpoints have as a part of a multimodal one alone -> its model_type."""

LATENT = (
    *("deepseek_v2", "deepseek_v3, 8 bits", "glm4_moe_lite"),
    *("axk1", "axk2, 8 bits", "glm_moe_dsa", "mistral4"),
    *("deepseek_v32", "kimi_linear", "bailing_hybrid, 8 bits"),
)
"""Models of MODELS without grouped-query attention."""

OWN_ATTENTION = (
    *("gpt_oss", "minimax_m2", "afmoe", "mimo_v2_flash", "laguna", "gemma4_text", "glm4_moe", "beam"),
    *("flint", "kolibri1", "exaone_moe", "cohere2_moe", "mellum", "hunyuan_v1_moe", "phimoe", "ernie4_5_moe"),
)
"""Models with heads, norms, rotations or gates of their own."""

INDEXED = ("deepseek_v32", "axk2", "glm_moe_dsa")
"""Families whose attention to tokens that an index chooses is called."""

DECIDED = 24
"""Factor on router weights: at initialisation's 0.02 all gate weights are about equal, and none is negligible."""

PROMPT = [(7 * i + 5) % VOCABULARY for i in range(9)]
DECODED = [(11 * i + 3) % VOCABULARY for i in range(10)]

RULES = {
    "8": {"levels": (8,)},
    "4/2": {"levels": (4, 2), "retention": 0.6},
    "4/0": {"levels": (4, 0), "retention": 0.6},
    "4/0, renormalised": {"levels": (4, 0), "retention": 0.6, "renormalise": True},
    "8/4/2/0": {"levels": (8, 4, 2, 0), "bits": 3.0},
    "8/4/2/0, renormalised": {"levels": (8, 4, 2, 0), "bits": 2.5, "renormalise": True},
    "8/4/2/0 by the paper": {"levels": (8, 4, 2, 0), "rule": "paper", "retention": 0.75},
}

LIMITS = {
    "all resident": {},
    "misses": {"experts": 5},
    "misses, DRAM, look-ahead": {"experts": 6, "dram_experts": 6, "speculate": "full"},
    "look-ahead": {"speculate": "full"},
}


ALIKE = (
    *("qwen2_moe", "qwen3_moe, 8 bits", "axk2, 8 bits", "glm4_moe_lite", "bailing_hybrid, 8 bits"),
    *("dots1", "solar_open", "granitemoeshared", "granitemoe_swa", "laguna, 8 bits"),
    *("ernie4_5_moe", "hunyuan_v1_moe", "aria_text", "qwen3_vl_moe_text", "glm4v_moe_text"),
    *("hy_v3", "cohere2_moe, 8 bits", "glm_moe_dsa"),
)
"""Models of MODELS whose kinds of layers others have too, for `make test-folders` alone."""

DIFFERENT = ("mixtral", "qwen2_moe, 8 bits", "qwen3_moe, one dense layer")
"""Models that have every kind of layer between them, for what does not depend on a family's attention."""

on_different_models = pytest.mark.parametrize("store", DIFFERENT, indirect=True)
on_a_model = pytest.mark.parametrize("store", DIFFERENT[-1:], indirect=True)


@pytest.fixture(scope="module")
def store_of(tmp_path_factory) -> Callable[[str], Path]:
    """Converts a random model of a family, at the first call for each of MODELS."""

    @cache
    def converted(name: str) -> Path:
        place, bits = tmp_path_factory.mktemp("fused"), 8 if "8 bits" in name else 16
        model_type = name.partition(",")[0]
        if model_type in WHOLE:
            save_folder_model(folder_model(WHOLE[model_type]), place / "source")
        else:
            model = random_model(model_type, **{"num_experts_per_tok": 4} | MODELS[name])
            for block in blocks_of(model):
                router_weight(router_of(block)).mul_(DECIDED)
            for path, tensor in model.named_parameters():
                if (
                    "attn." in path and "norm." in path
                ):  # weights of 1 do not show whether they are before a rotation
                    tensor.data.mul_(1 + 0.5 * torch.rand_like(tensor))
            save(model, place / "source", fused=model_type not in ("laguna", "axk1"))
        convert_checkpoint(place / "source", place / "store", max_level=8, layout="auto", dense_bits=bits)
        return place / "store"

    return converted


@pytest.fixture
def store(request, store_of) -> Path:
    """The store of one of MODELS."""
    return store_of(request.param)


def decoded(engine: Engine, tokens: list[int] = DECODED) -> tuple[torch.Tensor, ExpertUse]:
    """Logits [tokens, vocabulary] of single steps after the prompt, and the levels that these steps used."""
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPT)
    engine.take_use()
    engine.take_counts()
    rows = [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in tokens]
    engine.sequences.end(sequence)
    return torch.stack(rows), engine.take_use()


def by_modules(engine: Engine) -> Engine:
    """Leaves every step of an engine to transformers' modules."""
    assert engine.runner.fused is not None
    return engine.by_modules()


@pytest.fixture
def fused_calls(monkeypatch) -> list[bool]:
    """Collects an entry for every call of the fused layers: whether it went through all layers."""
    calls, run = [], NativeDecodeLayers.run

    def counted(self, *how):
        place = run(self, *how)
        calls.append(place == (len(self.trace), 0))
        return place

    monkeypatch.setattr(NativeDecodeLayers, "run", counted)
    return calls


@pytest.fixture(scope="module")
def opposed(tmp_path_factory) -> Path:
    """A store in which half of the experts are the other half's negatives, and a token has all of them."""
    place, model = tmp_path_factory.mktemp("opposed"), random_model("mixtral", num_experts_per_tok=8)
    for block in blocks_of(model):
        block.experts.gate_up_proj.data[4:] = block.experts.gate_up_proj.data[:4]
        block.experts.down_proj.data[4:] = -block.experts.down_proj.data[:4].mul_(64)
    save(model, place / "source", fused=True)
    convert_checkpoint(place / "source", place / "store", max_level=8, layout="auto", dense_bits=16)
    return place / "store"


def test_new_tokens_add_experts_in_the_order_of_prompts(opposed, open_engine):
    """Sums of rows that nearly cancel each other, whose bits show their order, are one prompt's sums."""
    engine = open_engine(opposed)
    found, _ = decoded(engine)
    whole = engine.all_logits(engine.sequences.new(), PROMPT + DECODED, decode=False)
    assert torch.equal(found, whole[len(PROMPT) :])


@pairwise(
    indirect=["store"],
    alone=["store"],
    slow=ALIKE,
    store=MODELS,
    rule=RULES,
    limit=LIMITS,
    e2e=lambda case: case["store"] != DIFFERENT[-1],
)
def test_fused_decode_equals_the_modules(store, open_engine, fused_calls, rule, limit):
    """Logits and levels equal transformers' modules bit for bit, under every limit and look-ahead."""
    want, use = decoded(by_modules(open_engine(store, exact=True, **RULES[rule])))
    assert fused_calls == []
    levels = set(RULES[rule]["levels"])
    least = {8, 0} if "rule" in RULES[rule] else levels - {8}  # two experts have room for two thresholds
    assert least <= set(use.scheduled) <= levels if len(levels) > 1 else set(use.scheduled) == levels
    engine = open_engine(store, exact=True, **RULES[rule], **LIMITS[limit])
    logits, found = decoded(engine)
    assert torch.equal(logits, want)
    for program in engine.runner.fused._native.programs:
        called = sum(isinstance(operation, Call) for operation in program.operations)
        assert called == (engine.model.config.model_type in INDEXED)
    assert (found.experts, found.scheduled) == (use.experts, use.scheduled)
    assert found.damage == pytest.approx(use.damage, rel=1e-5)
    assert (use.damage > 0) == bool(RULES[rule].get("bits"))
    assert len(fused_calls) >= len(DECODED)
    for tier in (engine.vram, engine.dram):
        if tier is not None:
            check_integrity(tier)


@on_a_model
@pytest.mark.parametrize("rule", ["4/0, renormalised", "8/4/2/0, renormalised"])
def test_renormalised_gate_weights_change_the_logits(store, open_engine, rule):
    """The rules with renormalisation are not met by ignoring it: the logits without it are others."""
    scaled, _ = decoded(open_engine(store, exact=True, **RULES[rule]))
    plain, _ = decoded(open_engine(store, exact=True, **RULES[rule] | {"renormalise": False}))
    assert not torch.equal(scaled, plain)


@on_different_models
def test_better_planes_are_used_alike(store, open_engine):
    """With level 8 resident and level 4 scheduled, an engine that is not exact computes at 8 on either path."""
    engine = open_engine(store, exact=False)
    best, _ = decoded(engine)
    engine.configure(engine.settings.with_(levels=(4,)))
    logits, use = decoded(engine)
    assert torch.equal(logits, best)
    modules, of_modules = decoded(by_modules(engine))
    assert torch.equal(modules, best)
    assert use == of_modules
    assert use.reused == use.experts[8] > 0


@pytest.mark.e2e
@pairwise(
    indirect=["store"],
    alone=["store"],
    store=DIFFERENT,
    tiers=[{"experts": 9}, {"experts": 7, "dram_experts": 5}],
)
def test_levels_by_place_are_those_of_the_policy(store, open_engine, monkeypatch, tiers):
    """In every call, of one sequence and of two, levels are the policy's for what the tiers have at that moment."""
    monkeypatch.setattr(prices_module, "read_speed", lambda *_: 1.0)
    monkeypatch.setattr(prices_module, "copy_speed", lambda *_: 10.0)
    engine = open_engine(store, exact=False, levels=(8, 4, 2, 0), bits=3.0, parallel=2, **tiers)
    policy, run, seen = engine.rules.policy, NativeDecodeLayers.run, set()
    assert policy.tiers.dram == (0.1 if "dram_experts" in tiers else 1.0)

    def checked(self, rows_of_step, start, *how):
        place, rows = run(self, rows_of_step, start, *how), rows_of_step.rows
        for layer in chain(*engine.runner.fused._computed(start, place)):
            chosen, wanted = self.trace[layer, CHOSEN, :rows], self.trace[layer, WANTED, :rows]
            want = policy.levels(layer, chosen, self.gates[layer, :rows], None, decode=True)
            assert torch.equal(wanted, want)
            seen.update((rows, int(level)) for level in want.flatten())
        for key in engine._keys:
            slower = engine.dram.level_of(key) if engine.dram else 0
            assert engine.held.places[key] == place_of(engine.vram.level_of(key), slower)
        return place

    monkeypatch.setattr(NativeDecodeLayers, "run", checked)
    decoded(engine)
    pair = [engine.sequences.new() for _ in range(2)]
    for sequence in pair:
        engine.prefill(sequence, PROMPT)
    for token in DECODED:
        engine.step(Step(tuple(Segment(each, (token + i,)) for i, each in enumerate(pair))))
    if any(program.router for program in engine.runner.fused._native.programs):
        assert {(rows, level) for rows in (1, 2) for level in (2, 4)} <= seen


@pytest.mark.e2e
@pairwise(indirect=["store"], alone=["store"], store=DIFFERENT, limit=LIMITS)
def test_counts_are_those_of_the_modules(store, open_engine, limit):
    """The fused path counts as many requests, by level, as the modules do; a resident model has hits alone."""
    counts = []
    for leave in (by_modules, lambda engine: engine):
        engine = leave(open_engine(store, levels=(4, 2), exact=True, **LIMITS[limit]))
        decoded(engine)
        sequence = engine.sequences.new()
        engine.prefill(sequence, PROMPT)
        engine.take_counts()
        for token in DECODED:
            engine.step(Step((Segment(sequence, (token,)),)))
        counts.append(engine.take_counts())
    modules, fused = counts
    assert (fused.requests, fused.levels) == (modules.requests, modules.levels)
    predictions = [
        {layer: (of.predicted, of.wanted, of.right) for layer, of in each.lookahead.items()}
        for each in counts
    ]
    assert predictions[0] == predictions[1]
    assert bool(predictions[1]) == ("look-ahead" in limit)
    if limit == "misses, DRAM, look-ahead":
        assert fused.speculated_used > 0
    if "experts" not in LIMITS[limit]:
        assert fused.vram_hits == fused.requests == modules.vram_hits
        assert fused.ssd_bytes == modules.ssd_bytes == 0


@on_different_models
def test_watching_sees_the_same_experts(store, open_engine):
    """Engine.watch is called with every layer's choice on either path."""
    seen: list[list[tuple[int, list[list[int]]]]] = []
    for leave in (by_modules, lambda engine: engine):
        notes: list[tuple[int, list[list[int]]]] = []
        engine = leave(open_engine(store, experts=6, exact=True))
        engine.watch(lambda layer, chosen, notes=notes: notes.append((layer, chosen.tolist())))
        decoded(engine)
        seen.append(notes)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 2 * len(DECODED)


def test_a_resident_model_takes_one_call(tmp_path, open_engine, fused_calls, monkeypatch):
    """A token of a qwen3_moe model without dense layers, all of it resident, is one call of the fused layers."""
    save(random_model("qwen3_moe"), tmp_path / "source", fused=True)
    convert_checkpoint(tmp_path / "source", tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    engine = open_engine(tmp_path / "store")
    engine.fill()
    decoded(engine)
    fused_calls.clear()
    sequence = engine.sequences.new()
    monkeypatch.setattr(ExpertLayer, "forward", lambda *_: pytest.fail("a layer's experts were requested"))
    for token in DECODED:
        engine.step(Step((Segment(sequence, (token,)),)))
    assert fused_calls == [True] * len(DECODED)


MODES = {name: RULES[name] for name in RULES if "renormalised" in name or name in ("8", "4/2")} | {
    "8, keys and values at 8 bits": {"levels": (8,), "kv": "q8_0"},
    "8, keys and values at 4 bits": {"levels": (8,), "kv": "q4_0"},
}
"""Settings of a step of several sequences."""


@pairwise(
    indirect=["store"],
    alone=["store", "mode"],
    store=[
        *(*DIFFERENT, "olmoe", "qwen3_next", "lfm2_moe", "nemotron_h", "gemma4_text"),
        *("ernie4_5_moe", "cohere2_moe"),
    ],
    mode=MODES,
    limit=LIMITS,
    e2e=lambda case: case["store"] != DIFFERENT[-1],
)
def test_rows_of_several_sequences_are_those_of_each_alone(store, open_engine, fused_calls, mode, limit):
    """Five sequences of different lengths in one fused step have the bits and levels of single-token steps."""
    single = open_engine(store, exact=True, **MODES[mode])
    numbers = range(5)
    want, used = [], ExpertUse()
    for i in numbers:
        sequence = single.sequences.new()
        single.prefill(sequence, PROMPT[: 3 + i])
        single.take_use()
        want.append([single.step(Step((Segment(sequence, (token + i,)),)))[0] for token in DECODED[:4]])
        single.sequences.end(sequence)
        used += single.take_use()
    engine = open_engine(store, exact=True, parallel=5, **MODES[mode], **LIMITS[limit])
    sequences = [engine.sequences.new() for _ in numbers]
    for i, sequence in enumerate(sequences):
        engine.prefill(sequence, PROMPT[: 3 + i])
    engine.take_use()
    before = len(fused_calls)
    for at, token in enumerate(DECODED[:4]):
        got = engine.step(Step(tuple(Segment(each, (token + i,)) for i, each in enumerate(sequences))))
        assert all(torch.equal(got[i], want[i][at]) for i in numbers)
    assert len(fused_calls) > before
    assert engine.take_use().scheduled == used.scheduled


@pytest.mark.e2e
@pytest.mark.parametrize("store", ["qwen3_next"], indirect=True)
def test_the_most_rows_of_a_step_are_those_of_sequences_alone(store, open_engine):
    """64 sequences of four kinds in one step have the bits of single-token steps, whatever their place."""
    single, prompts, want = open_engine(store, exact=True), [PROMPT[: 2 + i] for i in range(4)], []
    for prompt in prompts:
        sequence = single.sequences.new()
        single.prefill(sequence, prompt)
        want.append(single.step(Step((Segment(sequence, (DECODED[len(prompt)],)),)))[0])
        single.sequences.end(sequence)
    engine = open_engine(store, exact=True, parallel=64)
    assert engine.runner.fused.most_rows == 64
    sequences = [engine.sequences.new() for _ in range(64)]
    for i, sequence in enumerate(sequences):
        engine.prefill(sequence, prompts[i % 4])
    segments = [Segment(sequence, (DECODED[len(prompts[i % 4])],)) for i, sequence in enumerate(sequences)]
    got = engine.step(Step(tuple(segments)))
    assert torch.equal(got, torch.stack(want * 16))


def python_calls(engine: Engine) -> int:
    """Median number of Python calls of a token, all experts resident."""
    engine.fill()
    sequence, counter, counts = engine.sequences.new(), CallCounter(), []
    engine.prefill(sequence, PROMPT)
    for token in DECODED[:5]:
        step = Step((Segment(sequence, (token,)),))
        counter.start()
        engine.step(step)
        counts.append(sum(counter.stop().values()))
    threading.setprofile(None)
    return sorted(counts)[2]


@pytest.mark.e2e
def test_a_token_takes_as_many_python_calls_as_of_qwen3_moe(store_of, open_engine):
    """At most 1.3 times as many, for lists without a Call."""
    names = (
        "qwen3_moe, one dense layer",
        "gpt_oss",
        "qwen3_next",
        "deepseek_v2",
        "nemotron_h",
        "gemma4_text",
    )
    first, *others = (python_calls(open_engine(store_of(name))) for name in names)
    assert first > 0
    assert max(others) <= 1.3 * first


@on_a_model
def test_a_batch_that_touches_most_experts_is_a_scan(store, open_engine, monkeypatch):
    """A request of more than half of a layer's experts for several sequences is a scan; for one sequence none is."""
    engine, scans = open_engine(store, experts=5, parallel=5), []
    request = FetcherStep.request

    def noted(
        step: FetcherStep, levels: dict[ExpertKey, int], *, scan: bool = False, **how: object
    ) -> object:
        scans.append((len(levels), scan))
        return request(step, levels, scan=scan, **how)

    monkeypatch.setattr(FetcherStep, "request", noted)
    sequences = [engine.sequences.new() for _ in range(5)]
    for i, sequence in enumerate(sequences):
        engine.prefill(sequence, PROMPT[: 3 + i])
    scans.clear()
    engine.step(Step(tuple(Segment(sequence, (7 * i + 3,)) for i, sequence in enumerate(sequences))))
    experts = engine.shape.experts_per_layer
    assert scans
    assert all(scan == (wanted > experts / 2) for wanted, scan in scans)
    assert any(scan for _, scan in scans)
    scans.clear()
    engine.step(Step((Segment(sequences[0], (5,)),)))
    assert not any(scan for _, scan in scans)


@pytest.mark.e2e
@pairwise(
    indirect=["store"],
    alone=["store"],
    slow=[name for name in MODELS if name not in (*DIFFERENT, *OWN_ATTENTION)],
    store=[name for name in MODELS if name not in LATENT],
    sequences=[1, 2],
)
def test_native_attention_agrees_with_the_modules(store, open_engine, monkeypatch, sequences):
    """Logits with transformers' own attention and routers differ by the order of additions alone.

    On a processor with bf16 instructions torch's attention rounds more.
    """

    def together() -> tuple[torch.Tensor, type]:
        engine = open_engine(store)
        some = [engine.sequences.new()]
        if sequences == 2:
            some.append(type(some[0])(engine.shape.kv, engine.plan.context))
        for length, sequence in zip((5, 9)[:sequences], some, strict=True):
            engine.prefill(sequence, [(7 * i + length) % VOCABULARY for i in range(length)])
        rows = [
            engine.step(Step(tuple(Segment(one, (token + i,)) for i, one in enumerate(some))))
            for token in range(12)
        ]
        assert (engine.runner.fused is None) == (native_parts is False)
        mixers = (
            getattr(layer, name, None)
            for layer in engine.model.model.layers
            for name in ("self_attn", "mixer")
        )
        attention = next(each for each in mixers if hasattr(each, "qkv") or hasattr(each, "k_proj"))
        return torch.stack(rows), type(attention.module)

    native_parts = True
    fast, kind = together()
    assert kind is GroupedQueryAttention
    native_parts = False
    monkeypatch.setattr(GroupedQueryAttention, "try_from", lambda *_: None)
    monkeypatch.setattr(CompiledRouter, "try_from", lambda *_: None)
    plain, kind = together()
    assert kind is not GroupedQueryAttention
    distance = (fast - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert distance.median() < 0.025  # a router's near-tie may tip now and then


def test_every_family_is_compared():
    """The models above cover all families."""
    assert {model.partition(",")[0] for model in MODELS} == {*TRAITS}


@pytest.mark.parametrize("store", ["deepseek_v32", "glm_moe_dsa"], indirect=True)
def test_guesses_that_an_index_chooses_tokens_for_have_the_bits_of_single_tokens(store, open_engine):
    """Rows of one sequence that share a step, before and after the index leaves tokens out, in all sizes."""
    engine = open_engine(store, drafts="ngram")
    for before in (2, len(PROMPT)):  # the index of the model takes 6 tokens
        sequence = engine.sequences.new()
        engine.prefill(sequence, PROMPT[:before])
        want = torch.cat([engine.step(Step((Segment(sequence, (token,)),))) for token in DECODED])
        for rows in range(1, 9):
            sequence.crop(0)
            engine.prefill(sequence, PROMPT[:before])
            wrong = Segment(sequence, (DECODED[0], *([77] * 7)), drafts=7)
            assert torch.equal(engine.step(Step((wrong,)), all_rows=True)[0], want[0])
            checked = Segment(sequence, tuple(DECODED[1 : 1 + rows]), drafts=rows - 1)
            got = engine.step(Step((checked,)), all_rows=True)
            assert torch.equal(got, want[1 : 1 + rows])
            assert sequence.length == before + 2
        engine.sequences.end(sequence)


HYBRIDS = ("qwen3_next", "lfm2_moe", "nemotron_h", "bailing_hybrid, 8 bits")
"""Models with each kind of state: gated delta nets, short convolutions, Mamba-2, Kimi Delta Attention."""


@pytest.mark.parametrize("store", HYBRIDS, indirect=True)
def test_guesses_leave_the_state_after_the_last_right_one(store, open_engine):
    """Rows of one sequence have the bits of single tokens whatever number of guesses was right in the steps before.

    So have single tokens, a prompt's chunk and a copy of the sequence that come after right guesses.
    """
    engine = open_engine(store, drafts="ngram", parallel=2, level=4)
    tokens = [(11 * i + 3) % VOCABULARY for i in range(30)]
    sequence, other = engine.sequences.new(), engine.sequences.new()
    engine.prefill(sequence, PROMPT)
    want = torch.cat([engine.step(Step((Segment(sequence, (token,)),))) for token in tokens])
    sequence.crop(0)
    engine.prefill(sequence, PROMPT)
    at = 0
    for right, wrong in ((2, 1), (0, 7), (7, 0), (3, 4), (0, 0), (5, 1)):
        guesses = (*tokens[at : at + 1 + right], *([77] * wrong))
        got = engine.step(Step((Segment(sequence, guesses, drafts=right + wrong),)), all_rows=True)
        assert torch.equal(got[: 1 + right], want[at : at + 1 + right])
        sequence.commit(right, guesses=True)
        at += 1 + right
    assert sequence.length == len(PROMPT) + at
    assert sequence.states.accepted == 5
    other.copy_prefix(sequence, sequence.length)
    chunk = engine.all_logits(other, tokens[at : at + 3], decode=False)
    assert torch.equal(chunk, want[at : at + 3])
    both = (
        Segment(sequence, tuple(tokens[at : at + 2]), drafts=1),
        Segment(other, (tokens[at + 3], 77), drafts=1),
    )
    got = engine.step(Step(both), all_rows=True)
    assert torch.equal(got[:3], want[[at, at + 1, at + 3]])


@pytest.mark.parametrize("store", HYBRIDS[:1], indirect=True)
def test_guesses_without_space_for_their_rows_are_refused(store, open_engine):
    """Of an engine without guesses, in the kernel too, which would write beyond the rows; so are rows out of order."""
    engine = open_engine(store, parallel=2)
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPT)
    step = Step((Segment(sequence, (1, 2), drafts=1),))
    with pytest.raises(ValueError, match="rows in a step"):
        engine.begin(step)
    native = engine.runner.fused._native
    hidden = native.embed((1, 2))
    for places in ((0, 1), (1, 2)):
        at = [(sequence, sequence.length + place) for place in places]
        rotations = engine.runner.fused._rotations.of(hidden, [place for _, place in at])
        with pytest.raises(ValueError, match="equal sizes"):
            native.run(native.begin(hidden, rotations, at), Place(0, 0), 1, 0)


@pytest.mark.parametrize("store", HYBRIDS[:1], indirect=True)
def test_a_failed_step_with_guesses_leaves_right_ones_before_it(store, open_engine, monkeypatch):
    """The step runs again without guesses, from the state and the guesses that were accepted before."""
    engine = open_engine(store, drafts="ngram")
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPT)
    want = [engine.step(Step((Segment(sequence, (token,)),))) for token in DECODED[:4]]
    sequence.crop(0)
    engine.prefill(sequence, PROMPT)
    engine.step(Step((Segment(sequence, tuple(DECODED[:3]), drafts=2),)))
    sequence.commit(2, guesses=True)
    with monkeypatch.context() as broken:
        broken.setattr(NativeDecodeLayers, "head", lambda *_: torch.full((3, VOCABULARY), torch.nan))
        with pytest.raises(NotFinite):
            engine.step(Step((Segment(sequence, (DECODED[3], 77, 78), drafts=2),)), all_rows=True)
    assert torch.equal(engine.step(Step((Segment(sequence, (DECODED[3],)),))), want[3])


@on_a_model
def test_guesses_are_refused_where_modules_run_new_tokens(store, open_engine, monkeypatch):
    """A family without a list of operations, one whose states are a module's, and the kernel that torch runs."""
    with monkeypatch.context() as called:
        called.setattr(fused_decode, "calls_states", lambda model: True)
        with pytest.raises(UserError, match="for --draft, got model_type qwen3_moe"):
            open_engine(store, drafts="ngram")
    with monkeypatch.context() as without_list:
        without_list.setattr(fused_decode, "has_program", lambda model: False)
        with pytest.raises(
            UserError, match=r"for --draft, got model_type qwen3_moe with kernel .*: leave it out"
        ):
            open_engine(store, drafts="ngram")
        assert open_engine(store).most_drafts == 0
    monkeypatch.setattr(store_model, "compute", lambda place: kernels_for(place)[-1])
    with pytest.raises(UserError, match=r"for --draft, got model_type qwen3_moe with kernel torch"):
        open_engine(store, drafts="ngram")
