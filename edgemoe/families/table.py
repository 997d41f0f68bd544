"""The table of supported model families. transformers has the code of their modules."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from edgemoe.errors import ModelRefused
from edgemoe.families.base import Family, FusedGQA, Gate
from edgemoe.kv.shape import hybrid, latents, sized
from edgemoe.storage.convert.checkpoint import Config
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, read_json, shortened


def _every_layer(config: Config) -> tuple[int, ...]:
    return tuple(range(config["num_hidden_layers"]))


def _every_sparse_step(config: Config) -> tuple[int, ...]:
    """Every decoder_sparse_step-th layer, without the layers of mlp_only_layers."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelRefused(
            "a list of layers for mlp_only_layers in config.json", f"a {type(dense).__name__}", CHECK_ORIGIN
        )
    step = config.get("decoder_sparse_step") or 1
    return tuple(i for i in _every_layer(config) if (i + 1) % step == 0 and i not in dense)


def _after_dense(config: Config, *, default: int) -> tuple[int, ...]:
    """Every layer from first_k_dense_replace on; from `default` on where the config lacks the key."""
    first = config.get("first_k_dense_replace", default)
    if type(first) is not int or first < 0:
        raise ModelRefused(
            "a whole number of dense layers for first_k_dense_replace in config.json",
            shortened(first),
            CHECK_ORIGIN,
        )
    return _every_layer(config)[first:]


def _from_start_to_end(config: Config) -> tuple[int, ...]:
    """Every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index, both included."""
    interval = sized({"moe_layer_interval": 1} | dict(config), "moe_layer_interval")
    start, end = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    if type(start) is not int or type(end) is not int:
        raise ModelRefused(
            "whole numbers for moe_layer_start_index and moe_layer_end_index in config.json",
            f"{shortened(start)} and {shortened(end)}",
            "choose a model for text only",
        )
    last = config["num_hidden_layers"] - 1 if end == -1 else end
    return tuple(i for i in _every_layer(config) if (i + 1) % interval == 0 and start <= i <= last)


def _all_tokens(config: Any) -> list[int]:
    """Attention without a window in every layer."""
    return [0] * config.num_hidden_layers


def _one_window(config: Any) -> list[int]:
    """The same window in every layer, where the config has one."""
    return [config.sliding_window or 0] * config.num_hidden_layers


def _window_by_layer(config: Any) -> list[int]:
    """A window in the layers that layer_types calls sliding_attention."""
    return [config.sliding_window if kind == "sliding_attention" else 0 for kind in config.layer_types]


def _always(config: Any) -> bool:
    return True


def _never(config: Any) -> bool:
    return False


_MLP = "model.layers.{layer}.mlp."
_SPARSE = "model.layers.{layer}.block_sparse_moe."
_FUSED = (_MLP + "experts.gate_up_proj", _MLP + "experts.down_proj")

_qwen = partial(
    Family,
    experts_keys=("num_experts", "num_local_experts"),
    intermediate_key="moe_intermediate_size",
    moe_layers=_every_sparse_step,
    expert_names=(
        _MLP + "experts.{expert}.gate_proj.weight",
        _MLP + "experts.{expert}.up_proj.weight",
        _MLP + "experts.{expert}.down_proj.weight",
    ),
    fused_names=(_FUSED,),
    router_names=(_MLP + "gate.weight",),
)
"""The names that most families share."""

_deepseek = partial(
    _qwen, experts_keys=("n_routed_experts", "num_experts", "num_local_experts"), product_router=False
)
"""Routers that may choose groups of experts first."""

_deepseek_v3 = partial(
    _deepseek,
    gate=Gate(function="sigmoid"),
    precise=(_MLP + "gate.e_score_correction_bias",),
    predicts_ahead=True,
)
"""Routers with a correction bias, and layers for multi-token prediction."""

_mixtral = partial(
    Family,
    gate=Gate(_always, rounded=False),
    experts_keys=("num_local_experts", "num_experts"),
    intermediate_key="intermediate_size",
    moe_layers=_every_layer,
    expert_names=(
        _SPARSE + "experts.{expert}.w1.weight",
        _SPARSE + "experts.{expert}.w3.weight",
        _SPARSE + "experts.{expert}.w2.weight",
    ),
    fused_names=(_FUSED,),
)

_MIXTRAL = _mixtral(
    model_type="mixtral",
    fused_gqa=FusedGQA(_one_window),
    router_names=(_SPARSE + "gate.weight", _MLP + "gate.weight"),
    renames=((".block_sparse_moe.", ".mlp."),),
)

FAMILIES = {
    family.model_type: family
    for family in (
        _qwen(model_type="qwen2_moe", fused_gqa=FusedGQA(_window_by_layer, block_is_experts=False)),
        _qwen(model_type="qwen3_moe", fused_gqa=FusedGQA(_one_window)),
        _qwen(model_type="qwen3_next", unused=(r"mtp\..*",), kv=hybrid, rms_norm=False),
        _qwen(
            model_type="olmoe",
            intermediate_key="intermediate_size",
            moe_layers=_every_layer,
            fused_gqa=FusedGQA(_all_tokens),
        ),
        _deepseek(
            model_type="deepseek_v2",
            gate=Gate(_never),
            moe_layers=partial(_after_dense, default=0),
            kv=latents,
        ),
        _deepseek_v3(model_type="deepseek_v3", moe_layers=partial(_after_dense, default=3), kv=latents),
        _deepseek_v3(model_type="glm4_moe", moe_layers=partial(_after_dense, default=1)),
        _qwen(
            model_type="ernie4_5_moe",
            experts_keys=("moe_num_experts", "num_experts", "num_local_experts"),
            top_k_key="moe_k",
            gate=Gate(_always),
            product_router=False,
            moe_layers=_from_start_to_end,
            renames=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
            precise=(
                _MLP + "gate.weight",
                _MLP + "moe_statics.e_score_correction_bias",
                _MLP + "gate.moe_statics.e_score_correction_bias",
            ),
            unused=(r"(model\.)?mtp.*",),
        ),
        _MIXTRAL,
        _mixtral(
            model_type="phimoe",
            gate=None,
            rms_norm=False,
            router_names=(_SPARSE + "gate.weight", _MLP + "router.weight"),
            renames=((".block_sparse_moe.", ".mlp."), (".mlp.gate.", ".mlp.router.")),
        ),
        _mixtral(
            model_type="granitemoe",
            expert_names=(
                _SPARSE + "experts.{expert}.gate_proj.weight",
                _SPARSE + "experts.{expert}.up_proj.weight",
                _SPARSE + "experts.{expert}.down_proj.weight",
            ),
            fused_names=(
                (_SPARSE + "input_linear.weight", _SPARSE + "output_linear.weight"),
                (_SPARSE + "experts.gate_up_proj", _SPARSE + "experts.down_proj"),
            ),
            fused_checkpoints=True,
            quantized_as=_MIXTRAL,
            router_names=(_SPARSE + "router.layer.weight", _SPARSE + "router.weight"),
            renames=((".router.layer.", ".router."),),
        ),
        _mixtral(
            model_type="gpt_oss",
            product_router=False,
            rms_norm=False,
            expert_names=None,
            fused_checkpoints=True,
            transposed=True,
            router_names=(_MLP + "router.weight",),
        ),
    )
}

_DENSE_PRODUCT = "its experts are one product over all of them, which edgemoe cannot compute expert by expert"

REFUSED = {"llama4": _DENSE_PRODUCT, "llama4_text": _DENSE_PRODUCT}
"""model_type -> the reason why the table lacks it."""


def known_family(model_type: str) -> Family:
    """Returns the family of a model_type.

    Raises:
        ModelRefused: the table has none; the message lists the model types of the table.
    """
    family = FAMILIES.get(model_type)
    if family is None:
        reason = f"; {REFUSED[model_type]}" if model_type in REFUSED else ""
        raise ModelRefused(
            "a supported model family",
            f"model_type {model_type!r}{reason}",
            f"choose a model of one of the families {', '.join(sorted(FAMILIES))}",
        )
    return family


def require_known(directory: Path) -> None:
    """Raises ModelRefused where a checkpoint's config.json names a family that is not in the table.

    It must run before the rest of a checkpoint is read or downloaded: a config of another family may lack the keys that
    all families of the table have.
    """
    if not (directory / "config.json").exists():
        return
    found = read_json(directory, "config.json").get("model_type")
    if isinstance(found, str):
        known_family(found)


def family_of(config: Config) -> Family:
    """Returns the family of a bounded config.

    Raises:
        ModelRefused: the model type is not in the table, or the config lacks a key that the family needs.
    """
    family = known_family(config["model_type"])
    family.experts(config)
    for key in (family.top_k_key, family.intermediate_key):
        if config.get(key) is None:
            raise ModelRefused(
                f"{key} in config.json for model_type {family.model_type}",
                "none",
                "check that config.json belongs to this checkpoint",
            )
    return family
