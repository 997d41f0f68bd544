"""Properties of each supported model family that cannot be derived from transformers' modules."""

from __future__ import annotations

from typing import Any

from edgemoe.families.base import FusedGQA, Gate, QuantizedForm, Traits


def _all_tokens(config: Any) -> list[int]:
    """Attention without a window in every layer."""
    return [0] * config.num_hidden_layers


def _one_window(config: Any) -> list[int]:
    """Returns one window for all layers, where the config has one."""
    return [config.sliding_window or 0] * config.num_hidden_layers


def _window_by_layer(config: Any) -> list[int]:
    """A window in the layers that layer_types calls sliding_attention."""
    return [config.sliding_window if kind == "sliding_attention" else 0 for kind in config.layer_types]


def _windowed_rotate(config: Any) -> list[bool]:
    """Layers with a window alone rotate, where there are such layers."""
    every = config.sliding_window is None
    return [every or kind == "sliding_attention" for kind in config.layer_types]


def _in_windows(config: Any) -> list[bool]:
    """Layers with a window alone rotate."""
    return [bool(window) for window in _window_by_layer(config)]


def _windowed_or_first_rotate(config: Any) -> list[bool]:
    """Layers with a window rotate, and layers without experts where no window pattern of their own is declared."""
    dense = config.prefix_dense_sliding_window_pattern == 1
    kinds = zip(config.layer_types, config.mlp_layer_types, strict=True)
    windowed = config.sliding_window is not None
    return [
        (windowed and attention == "sliding_attention") or (dense and block == "dense")
        for attention, block in kinds
    ]


def _always(config: Any) -> bool:
    return True


def _never(config: Any) -> bool:
    return False


_SPARSE = "model.layers.{layer}.block_sparse_moe."
_MIXTRAL_NAMES = (
    _SPARSE + "experts.{expert}.w1.weight",
    _SPARSE + "experts.{expert}.w3.weight",
    _SPARSE + "experts.{expert}.w2.weight",
)

_GRANITE_NAMES = (
    _SPARSE + "experts.{expert}.gate_proj.weight",
    _SPARSE + "experts.{expert}.up_proj.weight",
    _SPARSE + "experts.{expert}.down_proj.weight",
)

_SOFTMAX, _SIGMOID = Gate(), Gate(function="sigmoid")
_WITH_SHARED = FusedGQA(_all_tokens, block_is_experts=False)
_SIGMOID_ALWAYS = Gate(_always, function="sigmoid")
_SCALED_TO_1, _SIGMOID_TO_1 = Gate(_always, rounded=False), Gate(_always, function="sigmoid")


def _like_glm(models: str, head: str = "") -> Traits:
    """Traits of families whose routers choose by sigmoids, and whose blocks have shared experts."""
    return Traits(models, rms_norm=True, gate=_SIGMOID, fused_gqa=_WITH_SHARED, head=head)


def _by_softmax(models: str, layers: FusedGQA, gate: Gate = _SOFTMAX, head: str = "") -> Traits:
    """Traits of families whose routers choose by a softmax of their product."""
    return Traits(models, product_router=True, rms_norm=True, gate=gate, fused_gqa=layers, head=head)


def _normalised(models: str, layers: FusedGQA, head: str = "") -> Traits:
    """Traits of the ones whose gate weights add up to 1, whatever their config says."""
    return _by_softmax(models, layers, Gate(_always), head)


TRAITS = {
    "qwen2_moe": _by_softmax(
        "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B", FusedGQA(_window_by_layer, block_is_experts=False)
    ),
    "qwen3_moe": _by_softmax("Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B", FusedGQA(_one_window)),
    "qwen3_next": _by_softmax("Qwen3-Next-80B-A3B, Qwen3-Coder-Next", _WITH_SHARED, head="mtp"),
    "olmoe": _by_softmax("OLMoE-1B-7B", FusedGQA(_all_tokens)),
    "deepseek_v2": Traits(
        "DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-V2.5",
        rms_norm=True,
        gate=Gate(_never),
        fused_gqa=_WITH_SHARED,
    ),
    "deepseek_v3": _like_glm(
        "DeepSeek-V3, DeepSeek-R1, DeepSeek-V3.1, Kimi-K2, Kimi-K2.5 without images", head="layer"
    ),
    "glm4_moe": _like_glm("GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7", head="layer"),
    "ernie4_5_moe": Traits(
        "ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B", rms_norm=True, gate=Gate(_always), fused_gqa=_WITH_SHARED
    ),
    "mixtral": Traits(
        "Mixtral-8x7B, Mixtral-8x22B",
        product_router=True,
        rms_norm=True,
        gate=_SCALED_TO_1,
        fused_gqa=FusedGQA(_one_window),
    ),
    "phimoe": Traits(
        "Phi-3.5-MoE, Phi-mini-MoE", product_router=True, rms_norm=True, fused_gqa=FusedGQA(_one_window)
    ),
    "granitemoe": Traits(
        "PowerMoE-3B, Granite-3.0-1B-A400M, Granite-3.1-3B-A800M",
        expert_names=_GRANITE_NAMES,
        quantized_as=QuantizedForm("mixtral", _MIXTRAL_NAMES, _SPARSE + "gate.weight"),
        product_router=True,
        rms_norm=True,
        gate=Gate(_always),
        fused_gqa=FusedGQA(_all_tokens),
    ),
    "gpt_oss": Traits(
        "gpt-oss-20b, gpt-oss-120b",
        rms_norm=True,
        gate=_SCALED_TO_1,
        fused_gqa=FusedGQA(_window_by_layer),
    ),
    "qwen3_5_moe_text": _normalised(
        "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B, Qwen3.5-397B-A17B", _WITH_SHARED, head="mtp"
    ),
    "glm4_moe_lite": _like_glm("GLM-4.7-Flash", head="layer"),
    "minimax_m2": Traits(
        "MiniMax-M2, MiniMax-M2.1, MiniMax-M2.5",
        rms_norm=True,
        gate=_SIGMOID_TO_1,
        fused_gqa=FusedGQA(_all_tokens),
    ),
    "hy_v3": Traits(
        "Hy3-preview",
        rms_norm=True,
        gate=_SIGMOID_TO_1,
        fused_gqa=_WITH_SHARED,
    ),
    "hunyuan_v1_moe": _normalised("Hunyuan-A13B", _WITH_SHARED),
    "dots1": Traits(
        "dots.llm1",
        rms_norm=True,
        gate=_SIGMOID,
        fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False),
    ),
    "exaone_moe": Traits(
        "K-EXAONE-236B-A23B",
        rms_norm=True,
        gate=_SIGMOID,
        fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False, rotates=_windowed_rotate),
    ),
    "laguna": Traits(
        "Laguna-XS.2",
        rms_norm=True,
        gate=_SIGMOID_ALWAYS,
        fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False),
    ),
    "solar_open": _like_glm("Solar-Open-100B"),
    "mellum": _by_softmax("Mellum2-12B-A2.5B", FusedGQA(_window_by_layer), head="mtp"),
    "flex_olmo": _by_softmax("FlexOlmo-7x7B-1T", FusedGQA(_all_tokens)),
    "kolibri1": Traits(
        "Kolibri-1",
        rms_norm=True,
        fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False, rotates=_windowed_rotate),
    ),
    "granitemoeshared": Traits(
        "Granite models with shared experts, without Mamba layers",
        expert_names=_GRANITE_NAMES,
        product_router=True,
        rms_norm=True,
        gate=Gate(_always),
        fused_gqa=FusedGQA(_all_tokens),
    ),
    "aria_text": _normalised("Aria's language model", _WITH_SHARED),
    "axk1": _like_glm("A.X-K1"),
    "cohere2_moe": Traits(
        "Command A+",
        rms_norm=True,
        fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False, rotates=_windowed_or_first_rotate),
    ),
    "lfm2_moe": Traits(
        "LFM2-8B-A1B, LFM2-24B-A2B",
        rms_norm=True,
        gate=_SIGMOID,
        fused_gqa=FusedGQA(_all_tokens),
    ),
    "qwen3_vl_moe_text": _normalised("Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B", FusedGQA(_all_tokens)),
    "glm4v_moe_text": _like_glm("GLM-4.5V, GLM-4.6V"),
    "afmoe": Traits(
        "Trinity-Nano, Trinity-Mini, Trinity-Large",
        rms_norm=True,
        gate=_SIGMOID_TO_1,
        fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False, rotates=_windowed_rotate),
    ),
    "granitemoe_swa": Traits(
        "Granite-Swash-3B-A600M",
        product_router=True,
        rms_norm=True,
        gate=Gate(_always),
        fused_gqa=FusedGQA(_window_by_layer),
    ),
    "flint": Traits(
        "Flint",
        rms_norm=True,
        gate=_SIGMOID,
        fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False, rotates=_in_windows),
    ),
    "mimo_v2_flash": Traits(
        "MiMo-V2-Flash",
        rms_norm=True,
        gate=_SIGMOID,
        fused_gqa=FusedGQA(_window_by_layer),
    ),
    "gemma4_text": Traits(
        "Gemma-4-26B-A4B",
        expert_names=(
            "model.layers.{layer}.experts.{expert}.gate_proj.weight",
            "model.layers.{layer}.experts.{expert}.up_proj.weight",
            "model.layers.{layer}.experts.{expert}.down_proj.weight",
        ),
        rms_norm=True,
        gate=Gate(_always, rounded=False, remaps=False),
        fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False),
    ),
    "granitemoehybrid": Traits(
        "Granite-4.0-H-Tiny, Granite-4.0-H-Small",
        expert_names=_GRANITE_NAMES,
        product_router=True,
        rms_norm=True,
        gate=Gate(_always),
        fused_gqa=FusedGQA(_all_tokens),
    ),
    "kimi_linear": _like_glm("Kimi-Linear-48B-A3B"),
    "deepseek_v32": _like_glm("DeepSeek-V3.2"),
    "glm_moe_dsa": _like_glm("GLM-5"),
    "axk2": _like_glm("A.X-K2"),
    "beam": Traits(
        "Beam-1.0",
        rms_norm=True,
        gate=_SIGMOID,
        fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False),
    ),
    "mistral4": Traits(
        "Mistral-Small-4-119B, without images", rms_norm=True, gate=_SOFTMAX, fused_gqa=_WITH_SHARED
    ),
    "nemotron_h": Traits(
        "Nemotron-3-Nano-30B-A3B, Nemotron-3-Super-120B-A12B",
        rms_norm=True,
        gate=_SIGMOID,
        fused_gqa=_WITH_SHARED,
    ),
    "bailing_hybrid": _like_glm("Ling-3.0-Flash"),
}
"""model_type -> what cannot be derived of it."""
