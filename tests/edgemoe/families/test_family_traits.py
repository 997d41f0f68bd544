"""The traits that families declare, each against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from availability import needs_native
from family_models import SMALL, blocks_of, random_model, router_of, router_weight, save, small_config

from edgemoe.engine.engine import StoreModel
from edgemoe.families.table import family_of
from edgemoe.families.traits import TRAITS
from edgemoe.kernels.activation import CUSTOM, GATED, Activation
from edgemoe.layers import attention
from edgemoe.layers.attend import attend_tiles
from edgemoe.layers.dense import DenseNorm
from edgemoe.layers.gating import fused_activation
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.router import CompiledRouter, further_arguments, next_logits
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.lookahead import predict

FUSED = list(TRAITS)
BY_PRODUCT = [name for name in FUSED if TRAITS[name].product_router and TRAITS[name].gate]


def hidden(rows: int, seed: int = 1) -> torch.Tensor:
    """bf16 [rows, 64]."""
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.e2e
@needs_native
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("model_type", BY_PRODUCT)
def test_a_softmax_gate_is_transformers_router(model_type, normalise):
    """Experts, gate weights and their dtype are transformers' router's, for either value of norm_topk_prob.

    A random row decides only where its logits are further apart than rounding.
    """
    changes = {"norm_topk_prob": normalise} if model_type != "mixtral" else {}
    model = random_model(model_type, num_experts_per_tok=3, **changes)
    for block in blocks_of(model):
        theirs = router_of(block)
        router_weight(theirs).mul_(20)
        ours = CompiledRouter.try_from(theirs, TRAITS[model_type], model.config)
        x = hidden(400)
        logits, gates, experts = ours(x)
        _, their_gates, their_experts = theirs(x)
        best = logits.float().topk(4).values
        decided = ((best[:, :3] - best[:, 1:]) > 0.1).all(dim=1)
        assert decided.sum() > 100
        assert gates.dtype == their_gates.dtype
        assert torch.equal(experts[decided], their_experts[decided])
        torch.testing.assert_close(gates[decided], their_gates[decided], rtol=0.03, atol=0.003)


SCORED = {
    "glm4_moe": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "glm4_moe, no groups": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 5},
    "glm4_moe, not normalised": {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
    "deepseek_v3": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4},
    "deepseek_v2": {},  # a softmax, a group by its best expert
    "hy_v3": {},  # a bias that is an argument
    "minimax_m2": {},  # and a product that is rounded
    "lfm2_moe": {},  # scores that are rounded, and a scale
    "gpt_oss": {},  # a bias of the product, and weights that are rounded
    "laguna": {},
    "gemma4_text": {"top_k_experts": 4},  # a norm of its own, and a factor of each expert
    "ernie4_5_moe": {"moe_k": 3},  # a float32 weight, and a bias in a module of its own
    "kolibri1": {"num_experts_per_tok": 3},  # a choice by the product and a bias
    "kolibri1, normalised": {"norm_topk_prob": True},
    "cohere2_moe": {},  # a softmax of the chosen numbers, by a norm of both parts
    "cohere2_moe, sigmoids": {"expert_selection_fn": "sigmoid", "num_experts_per_tok": 3},
    "cohere2_moe, sigmoids as they are": {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    "phimoe": {},  # two softmaxes of numbers close to the largest
    "phimoe, of many": {"router_jitter_noise": 0.3},
}
"""Model -> its config in addition to family_models.SMALL; routers with scores, biases or groups."""

ROUNDED = ("minimax_m2", "gpt_oss", "lfm2_moe", "cohere2_moe", "phimoe", "gemma4_text", "laguna")
"""Models of SCORED whose product is rounded: sums in another order may change a last bit."""


@needs_native
@pytest.mark.parametrize("model", SCORED)
def test_a_router_by_scores_is_transformers_router(model):
    """Experts, as a set, and their gate weights are transformers' router's, the largest weight first."""
    model_type = model.partition(",")[0]
    made = random_model(model_type, **SCORED[model])
    for block in blocks_of(made):
        theirs = router_of(block)
        router_weight(theirs).mul_(20)
        further = [getattr(block, name) for name in further_arguments(block, theirs)]
        ours = CompiledRouter.try_from(theirs, TRAITS[model_type], made.config, further)
        logits, gates, experts = ours(hidden(400), *further)
        their_logits, their_gates, their_experts = theirs(hidden(400), *further)
        near = 2**-7 if model_type in ROUNDED else 1e-4
        if model_type == "gemma4_text":  # its router returns probabilities
            logits = logits.softmax(-1)
        torch.testing.assert_close(logits.float(), their_logits.float(), rtol=near, atol=near)
        assert gates.dtype == their_gates.dtype
        want, got = (
            torch.zeros(logits.shape).scatter(1, chosen, weights.float())
            for chosen, weights in ((their_experts, their_gates), (experts, gates))
        )
        same = torch.isclose(got, want, rtol=1e-4, atol=1e-6).all(1)
        # In a row with two nearly equal numbers either may be first.
        assert same.sum() >= (380 if model_type in ROUNDED else 396)
        assert (gates[:, :-1] >= gates[:, 1:]).all()


def test_a_router_of_another_formula_stays_transformers_own(monkeypatch):
    """A trial on noise refuses a form that is not the module's: here its scores are divided by a temperature."""
    model = random_model("glm4_moe")
    router = router_of(blocks_of(model)[0])
    router.weight.data.mul_(20)
    forward = type(router).forward
    monkeypatch.setattr(type(router), "forward", lambda self, x: forward(self, x / 2))
    assert CompiledRouter.try_from(router, TRAITS["glm4_moe"], model.config) is None


@needs_native
@pytest.mark.parametrize("model_type", BY_PRODUCT)
def test_a_softmax_gate_rounds_where_transformers_rounds(model_type):
    """On rows whose logits are exact, gate weights are transformers' own, to the last bits of exp in float32."""
    model = random_model(model_type, num_experts_per_tok=3)
    theirs = router_of(blocks_of(model)[0])
    ours = CompiledRouter.try_from(theirs, TRAITS[model_type], model.config)
    x = torch.eye(64).mul(16).bfloat16()  # a logit is a power of two times a weight
    (logits, gates, experts), (_, their_gates, their_experts) = ours(x), theirs(x)
    assert torch.equal(logits, (router_weight(theirs).float() * 16).bfloat16().T)
    distinct = torch.tensor([len(row.unique()) == len(row) for row in logits])
    assert distinct.sum() > 30
    assert torch.equal(experts[distinct], their_experts[distinct])
    exact = 1e-5 if gates.dtype == torch.float32 else 0
    differing = (gates[distinct].float() - their_gates[distinct].float()).abs() > exact * their_gates[
        distinct
    ].float()
    assert differing.float().mean() < 0.02  # a probability next to a rounding boundary


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", SMALL)
def test_look_ahead_predicts_the_routers_own_choice(model_type):
    """For an equal state the predicted experts are the choice of transformers' router, the likeliest first.

    That is by the product where the family declares that it decides, on rows where products are further apart than
    rounding; elsewhere by gate weight, and the product alone chooses other experts on some row.
    """
    traits = TRAITS[model_type]
    # The best two experts of a row are always in its best two groups; the third need not be.
    changes = {"num_experts_per_tok": 3} if model_type == "deepseek_v2" else {}
    for block in blocks_of(random_model(model_type, **changes)):
        router, x = router_of(block), hidden(300)
        router.weight.data.mul_(5)
        with torch.no_grad():
            _, gates, experts = router(x)
            logits = next_logits(block, traits)(x)
            product = x.float() @ router.weight.float().T
        k = experts.shape[1]
        got = torch.tensor(predict(logits, k, decode=True))
        by_product = product.topk(k).indices
        if traits.product_router:
            best = product.sort(descending=True).values
            decided = ((best[:, :k] - best[:, 1 : k + 1]) > 0.05).all(1)
            assert torch.equal(by_product[decided].sort().values, experts[decided].sort().values)
            want = by_product
        else:
            assert (by_product.sort().values != experts.sort().values).any()
            ranked = gates.float().sort(descending=True)
            decided = (ranked.values[:, :-1] > ranked.values[:, 1:]).all(1)
            want = experts.gather(1, ranked.indices)
        assert decided.sum() > 20
        assert torch.equal(got[decided], want[decided])


def test_a_chosen_expert_of_no_weight_is_still_predicted():
    """Where a gate weight rounds to 0, the expert is predicted after the others, before any that is not chosen."""

    class Router(torch.nn.Module):
        def forward(self, x):
            return x.new_zeros(1, 4), torch.tensor([[0.0, 1.0]]).bfloat16(), torch.tensor([[3, 1]])

    block = torch.nn.Module()
    block.router = Router()
    logits = next_logits(block, TRAITS["gpt_oss"])(torch.zeros(1, 2))
    assert predict(logits, 2, decode=True) == [[1, 3]]


def visible(model: Any, tokens: int) -> list[int]:
    """The keys that the last of some tokens sees in each layer of transformers' own model, by its masks."""
    model.model.set_attn_implementation("eager")
    seen: list[int] = []

    def look(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        seen.append(int((keywords["attention_mask"][0, 0, -1] == 0).sum()))

    hooks = [
        layer.self_attn.register_forward_pre_hook(look, with_kwargs=True) for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.arange(3, 3 + tokens)[None])
    for hook in hooks:
        hook.remove()
    return seen


WINDOWS = [
    ("qwen2_moe", {}),
    ("qwen2_moe", {"use_sliding_window": False}),
    ("qwen2_moe", {"max_window_layers": 1}),
    ("qwen2_moe", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6}),
    ("mixtral", {}),
    ("mixtral", {"sliding_window": None}),
    ("olmoe", {}),
    ("glm4_moe", {}),
    *((name, {}) for name in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite")),
    ("gpt_oss", {}),
    ("minimax_m2", {}),
    ("hy_v3", {}),
    ("dots1", {}),
    ("solar_open", {}),
    *((name, {}) for name in ("granitemoe", "granitemoeshared")),
    *((name, {}) for name in ("exaone_moe", "mellum", "afmoe", "gemma4_text")),
    *((name, {}) for name in ("mimo_v2_flash", "laguna", "granitemoe_swa", "flint", "beam")),
    *((name, {}) for name in ("ernie4_5_moe", "phimoe", "hunyuan_v1_moe", "flex_olmo", "aria_text")),
    *((name, {}) for name in ("axk1", "axk2", "glm_moe_dsa", "mistral4")),
    *((name, {}) for name in ("kolibri1", "cohere2_moe", "qwen3_vl_moe_text", "glm4v_moe_text")),
]


@pytest.mark.e2e
@pytest.mark.parametrize(("model_type", "changes"), WINDOWS, ids=str)
def test_windows_are_those_of_transformers_masks(model_type, changes):
    """Each layer's window is the number of keys that transformers' mask leaves visible; 0 where it leaves all.

    Compared are windows that fused decode attends to, and windows that a sequence keeps.
    """
    model = random_model(model_type, **changes)
    want, fused = visible(model, 12), TRAITS[model_type].fused_gqa
    kept = {
        layer: part.window for part in family_of(model.config.to_dict()).kv.parts for layer in part.layers
    }
    assert [min(kept[layer] or 12, 12) for layer in sorted(kept)] == want
    assert [min(window or 12, 12) for window in fused.windows(model.config)] == want


def test_windows_of_every_fused_family_are_compared():
    """A family that declares windows, and has attention in every layer, is one of the families above."""
    linear = {name for name in FUSED if family_of(small_config(name).to_dict()).kv.linear}
    assert {model_type for model_type, _ in WINDOWS} == set(FUSED) - linear


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", [name for name in FUSED if name != "gemma4_text"])
def test_block_is_experts_where_the_block_adds_nothing(model_type):
    """transformers' MoE block returns its experts' result alone exactly where block_is_experts says so.

    Gemma 4 has no such block: a layer has the router, the experts and a dense block.
    """
    outputs: list[torch.Tensor] = []
    for block in blocks_of(random_model(model_type)):
        handle = block.experts.register_forward_hook(lambda module, given, output: outputs.append(output))
        with torch.no_grad():
            found = block(hidden(5)[None])
        handle.remove()
        whole = found[0] if isinstance(found, tuple) else found
        alone = torch.equal(whole.reshape(5, -1), outputs.pop().reshape(5, -1))
        assert alone == TRAITS[model_type].fused_gqa.block_is_experts


@needs_native
@pytest.mark.parametrize("model_type", SMALL)
def test_rms_norm_is_transformers_norm(model_type):
    """DenseNorm equals every module named *Norm bit for bit, exactly in families whose trait says so.

    Squares are added up in another order, which may change the rounding of single numbers.
    """
    generator = torch.Generator().manual_seed(3)
    norms = [m for m in random_model(model_type).modules() if type(m).__name__.endswith("Norm")]
    differing, numbers = 0, 0
    for norm in norms:
        norm.weight.data.normal_(1, 0.2, generator=generator)
        dense = DenseNorm.try_from(norm)
        if dense is None:
            continue
        x = (torch.randn(50, norm.weight.numel(), generator=generator) * 5).bfloat16()
        with torch.no_grad():
            differing += int((dense(x) != norm(x)).sum())
        numbers += x.numel()
    if TRAITS[model_type].rms_norm:
        assert numbers
        assert differing <= numbers // 2000
    else:
        assert differing > numbers // 50 or not numbers


@pytest.mark.parametrize("model_type", SMALL)
def test_a_fused_activation_is_transformers_own(model_type):
    """The name under which an experts module is fused names the function that it computes, bit for bit."""
    assert_fused(random_model(model_type), CUSTOM if model_type == "gpt_oss" else "silu")


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_python", "gelu_pytorch_tanh", "relu"])
def test_another_activation_follows_the_config(name):
    """Every activation that a config can name is fused as what it computes, or by torch's operators."""
    fused = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu": CUSTOM, "gelu_python": CUSTOM}
    assert_fused(random_model("mixtral", hidden_act=name), fused.get(name, name))


def assert_fused(model: Any, name: str) -> None:
    """Asserts the name of the activation of a model's experts, and that no other one computes their bits."""
    both = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)).mul(4).bfloat16()
    for block in blocks_of(model):
        assert fused_activation(block.experts) == name
        with torch.no_grad():
            want = block.experts._apply_gate(both)
        alike = [gated for gated in GATED if torch.equal(Activation.gated(gated).apply(both), want)]
        assert alike == ([] if name == CUSTOM else [name])


def test_a_plan_counts_the_heads_of_the_widest_layer(tmp_path):
    """Laguna's layers have different numbers of heads; memory is planned for the most."""
    source = save(random_model("laguna"), tmp_path / "source", fused=False)
    convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    assert StoreModel.open(tmp_path / "store").shape.heads == 8


ODD = [
    ("olmoe", {"clip_qkv": None}),
    ("qwen3_moe", {"head_dim": 24}),
    ("qwen3_moe", {"head_dim": 1040}),
    ("qwen3_moe", {"num_attention_heads": 258, "num_key_value_heads": 2}),
]
"""Configs in addition to SMALL: no clipping, a head of no multiple of 16, too large a one, many that share a key."""


@pytest.mark.e2e
@needs_native
@pytest.mark.parametrize(("model_type", "changes"), [(name, {}) for name in SMALL] + ODD)
def test_a_plan_knows_whose_attention_is_compiled(open_engine, tmp_path, monkeypatch, model_type, changes):
    """A store's shape says so exactly where no layer attends by torch's operators."""
    source = save(random_model(model_type, **changes), tmp_path / "source", fused=False)
    convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    engine, calls = open_engine(tmp_path / "store"), []

    def noted(*args, **kwargs):
        calls.append(args)
        return attend_tiles(*args, **kwargs)

    monkeypatch.setattr(attention, "attend_tiles", noted)
    engine.prefill(engine.sequences.new(), [3, 4, 5])
    assert engine.shape.compiled_attention == (not calls)
    latents = model_type.startswith("deepseek")  # keys of 40 numbers in SMALL
    assert engine.shape.compiled_attention == (not latents and set(changes) <= {"clip_qkv"})
    modules = [m for name, m in engine.model.named_modules() if name.endswith(".self_attn.module")]
    joined = {isinstance(module, GroupedQueryAttention) for module in modules}
    assert joined == {engine.shape.compiled_attention and model_type in FUSED}
