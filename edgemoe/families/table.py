"""The table of supported model families: properties that cannot be derived, and why other families are refused."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from edgemoe.errors import ModelRefused
from edgemoe.families.base import OTHER_PROGRAM, SAME_MODULES, Family, Traits
from edgemoe.families.traits import TRAITS
from edgemoe.storage.convert.config import WRAPPED_IN, Config
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, read_json

TEXT_HALVES = {
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "glm4v_moe": "glm4v_moe_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral4",
    "kimi_k25": "deepseek_v3",
    "aria": "aria_text",
}
"""model_type of a multimodal model -> the one of TRAITS that its language model has. Pictures: edgemoe/vision."""

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
