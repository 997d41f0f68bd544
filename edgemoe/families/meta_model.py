"""transformers' modules of a config without weights, and what stands in for parts of them while they compute shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from edgemoe.errors import ModelRefused
from edgemoe.families.base import SAME_MODULES
from edgemoe.storage.convert.config import Config, bounded_config
from edgemoe.storage.files.untrusted import CHECK_ORIGIN

LARGEST_BUFFER = 1 << 20
"""Elements of a buffer that a module computes from its config: rotary frequencies have a head's size."""

_LOGITS_ONLY = {
    "return_dict": True,
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_router_logits"), False),
}
"""Keys of a config that are for training and would change what a model returns."""


def meta_model(bounded: Config, *, attention: str, experts: str) -> Any:
    """Makes transformers' model of a config on the meta device. Imports the code of its class, within without_compiler.

    Sizes are bounded twice: in the config as it is, and with transformers' names and defaults.

    Args:
        bounded: the config of a text model, bounded.
        attention, experts: names of the implementations of transformers' interfaces.

    Raises:
        ModelRefused: a size out of bounds.
        Exception: whatever transformers raises.
    """
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_type = SAME_MODULES.get(bounded["model_type"], bounded["model_type"])
    # transformers changes dicts within a config.
    values = deepcopy({key: value for key, value in bounded.items() if key != "quantization_config"})
    kind = CONFIG_MAPPING[model_type]
    # JSON has no infinity: transformers writes an object in its place.
    config = kind.from_dict(kind._decode_special_floats(values) | {"model_type": model_type} | _LOGITS_ONLY)
    bounded_config(config.to_dict())
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    with torch.device("meta"):
        model = (AutoModelForCausalLM if causal else AutoModel).from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention, trust_remote_code=False
        )
        model.set_experts_implementation(experts)
        return model if causal else WithHead(model)


class WithHead(nn.Module):
    """A language model that transformers has only as a part of a multimodal one, and the head over it.

    Args:
        model: the part on the meta device, with a hidden state as its result.
    """

    base_model_prefix = "model"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.model = model.config, model
        size = model.config.hidden_size, model.config.vocab_size
        self.lm_head = nn.Linear(*size, bias=False, dtype=torch.bfloat16)
        self._keep_in_fp32_modules_strict = model._keep_in_fp32_modules_strict
        self._keys_to_ignore_on_load_unexpected = model._keys_to_ignore_on_load_unexpected

    def forward(self, *, logits_to_keep: torch.Tensor | None = None, **inputs: Any) -> SimpleNamespace:
        """Returns the logits of all rows, or of some, as transformers' causal models do."""
        hidden = self.model(**inputs).last_hidden_state
        return SimpleNamespace(
            logits=self.lm_head(hidden if logits_to_keep is None else hidden[:, logits_to_keep])
        )


def buffers_of_config(model: Any) -> dict[str, nn.Module]:
    """Makes each module that computes buffers from its config (rotary frequencies) anew, in RAM.

    That is the model's config, or one of the module's own: some models have an embedding for each base of frequencies.

    Raises:
        ModelRefused: a buffer of more than LARGEST_BUFFER elements.
        Exception: whatever a module raises.
    """
    return {
        name: type(module)(config=getattr(module, "config", model.config))
        for name, module in _with_computed_buffers(model).items()
        if _takes_config(module)
    }


def place_buffers(model: Any, place: torch.device | None) -> None:
    """Computes all buffers that no checkpoint has, which the meta device left empty.

    Args:
        model: transformers' model, with its weights on the meta device.
        place: the device of the buffers; None: RAM.

    Raises:
        Exception: as buffers_of_config.
    """
    for name, module in buffers_of_config(model).items():
        model.set_submodule(name, module.to(place))
    initialiser = next(module for module in model.modules() if hasattr(module, "_init_weights"))
    for module in _with_computed_buffers(model).values():
        for name in module._non_persistent_buffers_set:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=place or "cpu")
        # transformers gives such buffers their values when it initialises weights; on the meta device these have none.
        initialiser._init_weights(module)


def _with_computed_buffers(model: Any) -> dict[str, Any]:
    """The modules with empty buffers that no checkpoint has, by name.

    Raises:
        ModelRefused: a buffer of more than LARGEST_BUFFER elements.
    """
    out = {}
    for name, module in model.named_modules():
        computed = [
            b for b in module.named_buffers(recurse=False) if b[0] in module._non_persistent_buffers_set
        ]
        for buffer, value in computed:
            if value.numel() > LARGEST_BUFFER:
                raise ModelRefused(
                    f"at most {LARGEST_BUFFER} elements in {name}.{buffer}, computed from config.json",
                    str(value.numel()),
                    CHECK_ORIGIN,
                )
        if any(value.is_meta for _, value in computed):
            out[name] = module
    return out


def _takes_config(module: nn.Module) -> bool:
    """Whether a module is made of a config alone."""
    return "config" in signature(type(module)).parameters


class Rotary(nn.Module):
    """Computes rotary embeddings in RAM, of the first and of the last positions, and returns their shapes.

    Args:
        real: the module that computes them.
        positions: int64 [R], what stands for positions on the meta device.
    """

    def __init__(self, real: Any, positions: torch.Tensor) -> None:
        super().__init__()
        self.real, self.positions = real, positions

    def __getattr__(self, name: str) -> Any:
        """The module's own attributes: layers may read its config."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("real"), name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the module in RAM with its own arguments."""
        arguments = tuple(map(self._in_ram, arguments))
        keywords = {name: self._in_ram(value) for name, value in keywords.items()}
        self.real(
            *(_first(value) for value in arguments), **{name: _first(v) for name, v in keywords.items()}
        )
        computed = self.real(*arguments, **keywords)
        parts = (computed,) if isinstance(computed, torch.Tensor) else computed
        if not all(bool(part.isfinite().all()) for part in parts):
            raise ValueError("rope_parameters give rotary embeddings that are not finite")
        shapes = tuple(part.to("meta") for part in parts)
        return shapes[0] if isinstance(computed, torch.Tensor) else shapes

    def _in_ram(self, value: Any) -> Any:
        """Positions for whole numbers on the meta device, and one 0 for numbers, of which the type counts alone."""
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        return (
            torch.zeros(1, dtype=value.dtype)
            if value.is_floating_point()
            else self.positions.expand(value.shape)
        )


def _first(value: Any) -> Any:
    """Position 0 for every position."""
    return value * 0 if isinstance(value, torch.Tensor) else value


class Passes(nn.Module):
    """Stands in for a decoder layer, and returns its input.

    Args:
        layer: the layer, whose own attributes models read.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer

    def __getattr__(self, name: str) -> Any:
        """The layer's own attributes."""
        return getattr(self.__dict__["layer"], name)

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Returns the hidden states unchanged, with the layer's own arguments and results."""
        carried = carried_by(self.__dict__["layer"])
        return (hidden_states, keywords[carried]) if carried else hidden_states


def passing(model: Any, numbers: Iterable[int]) -> dict[str, nn.Module]:
    """Modules that stand in for some decoder layers, by name."""
    names = [f"model.layers.{number}" for number in numbers]
    return {name: Passes(model.get_submodule(name)) for name in names}


def carried_by(layer: nn.Module) -> str | None:
    """The argument of a decoder layer that is the second result of the layer before it, such as an index's choice.

    Such a layer returns a state and this result; None: it returns a state alone.
    """
    return next(
        (name for name in signature(type(layer).forward).parameters if name.startswith("prev_")), None
    )


def repeated_layers(model: Any) -> dict[int, int]:
    """The layers that differ from an earlier one in their number only: number -> number of the first such layer."""
    first, out = dict[object, int](), dict[int, int]()
    types = dict(enumerate(getattr(model.config, "layer_types", None) or ()))
    for number, layer in model.get_submodule("model.layers").named_children():
        modules = (_described(name, module) for name, module in layer.named_modules())
        kind = types.get(int(number)), *modules  # a model may give a window by the type alone
        if first.setdefault(kind, int(number)) != int(number):
            out[int(number)] = first[kind]
    return out


def _described(name: str, module: nn.Module) -> tuple[object, ...]:
    """Class, sizes and plain values of a module."""
    plain = {
        key: value
        for key, value in vars(module).items()
        if value is None or isinstance(value, bool | int | float | str)
    }
    sizes = [(key, tuple(value.shape)) for key, value in module.named_parameters(recurse=False)]
    return name, type(module), *sizes, *((k, v) for k, v in sorted(plain.items()) if k != "layer_idx")


@contextmanager
def replaced(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """Puts other modules in the places of some, within the block."""
    own = {name: model.get_submodule(name) for name in others}
    for name, other in others.items():
        model.set_submodule(name, other)
    try:
        yield
    finally:
        for name, module in own.items():
            model.set_submodule(name, module)
