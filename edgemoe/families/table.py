"""The table of supported model families: properties that cannot be derived, and why other families are refused."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgemoe.errors import ModelRefused
from edgemoe.families.base import OTHER_PROGRAM, SAME_MODULES, Family, FusedGQA, Gate, QuantizedForm, Traits
from edgemoe.storage.convert.config import WRAPPED_IN, Config
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, read_json


def _all_tokens(config: Any) -> list[int]:
    """Attention without a window in every layer."""
    return [0] * config.num_hidden_layers


def _one_window(config: Any) -> list[int]:
    """Returns one window for all layers, where the config has one."""
    return [config.sliding_window or 0] * config.num_hidden_layers


def _window_by_layer(config: Any) -> list[int]:
    """A window in the layers that layer_types calls sliding_attention."""
    return [config.sliding_window if kind == "sliding_attention" else 0 for kind in config.layer_types]


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
_SCALED_TO_1, _SIGMOID_TO_1 = Gate(_always, rounded=False), Gate(_always, function="sigmoid")


def _like_glm(models: str) -> Traits:
    """Traits of families whose routers choose by sigmoids, and whose blocks have shared experts."""
    return Traits(models, rms_norm=True, gate=_SIGMOID, fused_gqa=_WITH_SHARED)


TRAITS = {
    "qwen2_moe": Traits(
        "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        product_router=True,
        rms_norm=True,
        gate=_SOFTMAX,
        fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False),
    ),
    "qwen3_moe": Traits(
        "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder-30B-A3B",
        product_router=True,
        rms_norm=True,
        gate=_SOFTMAX,
        fused_gqa=FusedGQA(_one_window),
    ),
    "qwen3_next": Traits(
        "Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
        product_router=True,
        rms_norm=True,
        gate=_SOFTMAX,
        fused_gqa=_WITH_SHARED,
    ),
    "olmoe": Traits(
        "OLMoE-1B-7B",
        product_router=True,
        rms_norm=True,
        gate=_SOFTMAX,
        fused_gqa=FusedGQA(_all_tokens),
    ),
    "deepseek_v2": Traits(
        "DeepSeek-V2, DeepSeek-V2-Lite, DeepSeek-V2.5",
        rms_norm=True,
        gate=Gate(_never),
        fused_gqa=_WITH_SHARED,
    ),
    "deepseek_v3": _like_glm("DeepSeek-V3, DeepSeek-R1, DeepSeek-V3.1, Kimi-K2, Kimi-K2.5 without images"),
    "glm4_moe": _like_glm("GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7"),
    "ernie4_5_moe": Traits("ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B", rms_norm=True, gate=Gate(_always)),
    "mixtral": Traits(
        "Mixtral-8x7B, Mixtral-8x22B",
        product_router=True,
        rms_norm=True,
        gate=_SCALED_TO_1,
        fused_gqa=FusedGQA(_one_window),
    ),
    "phimoe": Traits("Phi-3.5-MoE, Phi-mini-MoE", product_router=True),
    "granitemoe": Traits(
        "PowerMoE-3B, Granite-3.0-1B-A400M, Granite-3.1-3B-A800M",
        expert_names=_GRANITE_NAMES,
        quantized_as=QuantizedForm("mixtral", _MIXTRAL_NAMES, _SPARSE + "gate.weight"),
        product_router=True,
        rms_norm=True,
        gate=_SCALED_TO_1,
    ),
    "gpt_oss": Traits(
        "gpt-oss-20b, gpt-oss-120b",
        rms_norm=True,
        gate=_SCALED_TO_1,
        fused_gqa=FusedGQA(_window_by_layer),
    ),
    "qwen3_5_moe_text": Traits(
        "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B, Qwen3.5-397B-A17B, without images",
        product_router=True,
        rms_norm=True,
        gate=Gate(_always),
        fused_gqa=_WITH_SHARED,
    ),
    "glm4_moe_lite": _like_glm("GLM-4.7-Flash"),
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
    "hunyuan_v1_moe": Traits("Hunyuan-A13B"),
    "dots1": Traits(
        "dots.llm1",
        rms_norm=True,
        gate=_SIGMOID,
        fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False),
    ),
    "exaone_moe": Traits("K-EXAONE-236B-A23B"),
    "laguna": Traits("Laguna-XS.2"),
    "solar_open": _like_glm("Solar-Open-100B"),
    "mellum": Traits("Mellum2-12B-A2.5B"),
    "flex_olmo": Traits("FlexOlmo-7x7B-1T"),
    "kolibri1": Traits("Kolibri-1"),
    "granitemoeshared": Traits(
        "Granite models with shared experts, without Mamba layers", expert_names=_GRANITE_NAMES
    ),
    "aria_text": Traits("Aria's language model"),
    "axk1": Traits("A.X-K1"),
    "cohere2_moe": Traits("Command A+"),
    "lfm2_moe": Traits(
        "LFM2-8B-A1B, LFM2-24B-A2B",
        rms_norm=True,
        gate=_SIGMOID,
        fused_gqa=FusedGQA(_all_tokens),
    ),
    "qwen3_vl_moe_text": Traits("Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B, without images"),
    "glm4v_moe_text": Traits("GLM-4.5V, GLM-4.6V, without images"),
    "afmoe": Traits("Trinity-Nano, Trinity-Mini, Trinity-Large"),
    "granitemoe_swa": Traits("Granite-Swash-3B-A600M"),
    "flint": Traits("Flint"),
    "mimo_v2_flash": Traits("MiMo-V2-Flash"),
    "gemma4_text": Traits(
        "Gemma-4-26B-A4B, without images",
        expert_names=(
            "model.layers.{layer}.experts.{expert}.gate_proj.weight",
            "model.layers.{layer}.experts.{expert}.up_proj.weight",
            "model.layers.{layer}.experts.{expert}.down_proj.weight",
        ),
    ),
    "granitemoehybrid": Traits("Granite-4.0-H-Tiny, Granite-4.0-H-Small", expert_names=_GRANITE_NAMES),
    "kimi_linear": Traits("Kimi-Linear-48B-A3B"),
    "deepseek_v32": Traits("DeepSeek-V3.2"),
    "glm_moe_dsa": Traits("GLM-5"),
    "axk2": Traits("A.X-K2"),
    "beam": Traits("Beam-1.0"),
    "mistral4": Traits("Mistral-Small-4-119B, without images"),
    "nemotron_h": Traits("Nemotron-3-Nano-30B-A3B, Nemotron-3-Super-120B-A12B"),
    "bailing_hybrid": Traits("Ling-3.0-Flash"),
}
"""model_type -> what cannot be derived of it."""

TEXT_HALVES = {
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "glm4v_moe": "glm4v_moe_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral4",
    "kimi_k25": "deepseek_v3",
    "aria": "aria_text",
}
"""model_type of a multimodal model -> the one of TRAITS that its language model has. Images are not supported."""

_DENSE_PRODUCT = "its experts are one product over all of them, which edgemoe cannot compute expert by expert"
_INDEX = "its attention chooses tokens by an index, which edgemoe does not compute yet"
_STATE = "some of its layers keep a state of a kind that edgemoe does not keep yet"
_OWN_CACHE = "its layers keep what they have seen in a cache of their own, which edgemoe does not have"
_NO_TEXT = "it does not continue text, or only with another model of its own"
_NOT_PROVEN = "no test has shown yet that edgemoe computes what transformers computes"

REFUSED = {
    **dict.fromkeys(("llama4", "llama4_text"), _DENSE_PRODUCT),
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), _INDEX),
    **dict.fromkeys(("jamba", "zaya"), _STATE),
    **dict.fromkeys(("deepseek_v4", "hy_v4", "minimax"), _OWN_CACHE),
    **dict.fromkeys(("inkling_mm_model", "inkling_text", "inkling2", "inkling2_text"), _OWN_CACHE),
    **dict.fromkeys(("glm5_next", "glm5_next_text", "qwen4_exp", "qwen4_exp_text"), _OWN_CACHE),
    **dict.fromkeys(("diffusion_gemma", "openai_privacy_filter"), _NO_TEXT),
    **dict.fromkeys(("deepseek_ocr2", "unlimited_ocr", "qwen3_omni_moe", "ernie4_5_vl_moe"), _NO_TEXT),
    **dict.fromkeys(("mistral_large4", "dots3_note", "muse_spark"), _NOT_PROVEN),
}
"""model_type -> the reason why the table lacks it."""


def traits_of(model_type: str, config: Config = MappingProxyType({})) -> Traits:
    """Returns what is declared of a model_type.

    Args:
        model_type: the value of `model_type` in config.json, such as qwen3_moe.
        config: config.json, which says whether a model without a row is dense.

    Raises:
        ModelRefused: the table has none; the message has the reason, or lists the model types of the table.
    """
    traits = TRAITS.get(SAME_MODULES.get(model_type, model_type))
    if traits is not None:
        return traits
    if model_type not in REFUSED and _is_dense(config):
        raise ModelRefused(
            "a mixture of experts",
            f"model_type {model_type!r}, a dense model, whose weights are all needed for every token",
            OTHER_PROGRAM,
        )
    reason = f"; {REFUSED[model_type]}" if model_type in REFUSED else ""
    raise ModelRefused(
        "a supported model family",
        f"model_type {model_type!r}{reason}",
        f"choose a model of one of the families {', '.join(sorted({*TRAITS, *SAME_MODULES, *TEXT_HALVES}))}",
    )


def _is_dense(config: Config) -> bool:
    """Whether a config has layers, and no key that speaks of experts."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    keys = {key for part in parts for key in part}
    return "num_hidden_layers" in keys and not any("expert" in key or "moe" in key for key in keys)


def require_known(directory: Path) -> None:
    """Raises ModelRefused where a checkpoint's config.json names a family that is not in the table.

    It must run before the rest of a checkpoint is read or downloaded: a config of another family may lack the keys that
    all families of the table have.
    """
    if not (directory / "config.json").exists():
        return
    config = read_json(directory, "config.json")
    found = config.get("model_type")
    if not isinstance(found, str):
        return
    if found not in TEXT_HALVES:
        traits_of(found, config)
    text = config.get("text_config")
    if found in TEXT_HALVES and isinstance(text, dict) and isinstance(text.get("model_type"), str):
        traits_of(text["model_type"], text)


def family_of(config: Config, directory: Path = Path()) -> Family:
    """Returns the family of a bounded config.

    Args:
        config: the config.
        directory: where its config.json lies, for messages.

    Raises:
        ModelRefused: the model type is not in the table, or families.derive refuses the config.
    """
    outer, own = config.get(WRAPPED_IN), SAME_MODULES.get(config["model_type"], config["model_type"])
    if outer is not None and TEXT_HALVES.get(outer) != own:
        traits_of(config["model_type"], config)
        raise ModelRefused(
            f"a language model of the kind that {outer} has", f"{config['model_type']}", CHECK_ORIGIN
        )
    traits = traits_of(config["model_type"])
    from edgemoe.families.kept import kept_family

    try:
        return kept_family(config, traits)
    except ModelRefused as error:
        error.reword(lambda text: text.replace("config.json", str(directory / "config.json")))
        raise
