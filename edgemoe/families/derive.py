"""Sizes and names of a model's tensors, from transformers' modules on the meta device and its own conversions."""

from __future__ import annotations

import re
from typing import Any

from transformers.core_model_loading import Transpose

from edgemoe.errors import ModelRefused
from edgemoe.families.base import OTHER_PROGRAM, Family, Traits
from edgemoe.families.meta_model import meta_model
from edgemoe.families.names import Conversions, one_template
from edgemoe.families.recorded import NAME, StepShapes, kv_shape, shapes_of
from edgemoe.storage.convert.config import WRAPPED_IN, Config
from edgemoe.storage.files.untrusted import foreign_code

_ACTION = "choose a model of another family"


def derive(config: Config, traits: Traits) -> Family:
    """Makes the family of a config. Imports the code of its class; takes half a second for a large model.

    Args:
        config: the config of a text model, bounded.
        traits: the declared properties of its model_type.

    Raises:
        ModelRefused: transformers does not accept a value of the config, its modules cannot compute with it, or the
            model has a part that edgemoe does not run; the message names it.
    """
    model, shapes = _step_of(config)
    experts, conversions = _experts_of(model), Conversions.of(model, config.get(WRAPPED_IN))
    one, places = next(iter(experts.values())), _names_of(model, experts).values()
    path = one_template(f"{name}." for name in places)
    names, fused, turned = _expert_names(conversions, *(path + part for part in _parts(one)))
    hidden, inner = _sides(one)
    return Family(
        *(model.config.model_type, traits),
        moe_layers=tuple(experts),
        experts=len(one.down_proj),
        hidden=hidden,
        intermediate=inner,
        top_k=max(shapes.choices.values()),
        kv=kv_shape(shapes),
        expert_names=names or traits.expert_names,
        fused_names=fused,
        fused_checkpoints=names is None,
        transposed=one.is_transposed != (turned is not None),
        either_way=turned is not None and turned.check_dims,
        router_name=one_template(_router_name(model, name) for name in places),
        gated=one.has_gate,
        renames=conversions.renames,
        restores=conversions.restores,
        precise=tuple(sorted(map(re.escape, model._keep_in_fp32_modules_strict or ()))),
        unused=tuple(sorted(p for p in model._keys_to_ignore_on_load_unexpected or () if "layers" not in p)),
        joins=conversions.joins(),
        ahead=_ahead(model),
        dense=_dense_names(model, experts, path),
    )


def _step_of(config: Config) -> tuple[Any, StepShapes]:
    """Makes the model of a config without weights, and runs a step of it; raises as derive."""
    with foreign_code("values in config.json that transformers accepts", values=config):
        model = meta_model(config, attention=NAME, experts=NAME)
    with foreign_code("values in config.json that transformers' modules compute with", values=config):
        return model, shapes_of(model)


def _experts_of(model: Any) -> dict[int, Any]:
    """Layer -> its experts module, ascending.

    Raises:
        ModelRefused: there is none, experts differ, or they have a norm after them, or biases without a gate.
    """
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "_apply_gate"):
            found[int(name.split(".layers.")[1].split(".")[0])] = module
    if not found:
        raise ModelRefused(f"experts in {type(model).__name__}", "none: the model is dense", OTHER_PROGRAM)
    kinds = {_kind(module) for module in found.values()}
    if len(kinds) != 1:
        raise ModelRefused("experts of one size in all layers", f"{len(kinds)} kinds", _ACTION)
    one = next(iter(found.values()))
    if one.has_post_expert_norm or (one.has_bias and not one.has_gate):
        other = "experts with a norm after them, or with biases and no gate"
        raise ModelRefused(f"experts of two matrices in {type(model).__name__}", other, _ACTION)
    return dict(sorted(found.items()))


def _kind(module: Any) -> tuple[object, ...]:
    """Flags and sizes of an experts module."""
    sizes = [(name, tuple(value.shape)) for name, value in module.named_parameters(recurse=False)]
    return module.has_gate, module.has_bias, module.is_transposed, module.has_post_expert_norm, *sizes


def _parts(experts: Any) -> tuple[str, str]:
    """Names of the two matrices in an experts module."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _sides(experts: Any) -> tuple[int, int]:
    """The size H of a state and the inner size I of an experts module."""
    down = experts.down_proj.shape
    return (down[2], down[1]) if experts.is_transposed else (down[1], down[2])


def _names_of(model: Any, experts: dict[int, Any]) -> dict[int, str]:
    """Layer -> the name of its experts module."""
    names = {id(module): name for name, module in model.named_modules()}
    return {layer: names[id(module)] for layer, module in experts.items()}


def _dense_names(model: Any, experts: dict[int, Any], path: str) -> frozenset[str]:
    """Names of all parameters and buffers but the experts' matrices; experts' biases are dense."""
    parts = _parts(next(iter(experts.values())))
    matrices = {path.format(layer=layer) + part for layer in experts for part in parts}
    return frozenset(model.state_dict()) - matrices


def _expert_names(
    conversions: Conversions, gate_up: str, down: str
) -> tuple[tuple[str, ...] | None, tuple[tuple[str, str], ...], Transpose | None]:
    """Templates of one expert's tensors, of all experts' tensors by naming, and what transposes these.

    Args:
        conversions: the conversions of the model's class.
        gate_up, down: names of both matrices in modules; the first is the one of up alone where there is no gate.

    Raises:
        ModelRefused: experts are neither in a tensor for each of gate, up and down, nor in two for all.
    """
    (first, turned), (second, also) = conversions.expert_names(gate_up), conversions.expert_names(down)
    own, parts = (gate_up, down), 2 if gate_up.endswith("gate_up_proj") else 1
    if not first and not second:
        there = conversions.restored(gate_up), conversions.restored(down)
        return None, (own,) if there == own else (there, own), None
    if turned and also and turned.check_dims == also.check_dims:
        return None, ((first[0], second[0]),), turned
    if turned or also or (len(first), len(second)) != (parts, 1):
        raise ModelRefused(
            "a gate, an up and a down matrix of each expert", f"{', '.join([*first, *second])}", _ACTION
        )
    return (*first, *second), (own,), None


def _router_name(model: Any, experts: str) -> str:
    """The name of the router's weight [E, H] in the block that has the experts module of a name.

    Raises:
        ModelRefused: the block's gate or router has no such weight.
    """
    block, count = experts.rpartition(".")[0], len(model.get_submodule(experts).down_proj)
    for name in ("gate", "router"):
        router = getattr(model.get_submodule(block), name, None)
        for weight, value in router.named_parameters() if router is not None else ():
            if value.ndim == 2 and len(value) == count:
                return f"{block}.{name}.{weight}"
    raise ModelRefused(f"a router with a weight for each expert in {block}", "none", _ACTION)


def _ahead(model: Any) -> tuple[int, int]:
    """The layers for multi-token prediction, which transformers does not load: first and last + 1."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    announced, first = getattr(model.config, "num_nextn_predict_layers", None), model.config.num_hidden_layers
    if not announced and not any("layers" in pattern for pattern in patterns):
        return 0, 0
    return first, first + (announced or 1)
