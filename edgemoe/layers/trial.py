"""A step of a model without weights: values of a config that transformers' modules cannot compute with fail here.

It runs on the meta device, where shapes are computed and nothing else. Rotary embeddings alone compute: their code
depends on positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from edgemoe.errors import ModelRefused
from edgemoe.families.base import Family
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step, StepKV
from edgemoe.layers.linear_attention import PerSequence
from edgemoe.policy.importance import PromptAttention
from edgemoe.storage.convert.checkpoint import Config
from edgemoe.storage.files.untrusted import CHECK_ORIGIN

ROWS = 2
"""Tokens of the step: the first, and one at the far end of the context."""

LARGEST_BUFFER = 1 << 20
"""Elements of a buffer that a module computes from its config: rotary frequencies have a head's size."""


def try_step(model: Any, family: Family, config: Config) -> None:
    """Runs a step of ROWS tokens through all modules but the experts' products, through equal layers once.

    The model is afterwards as it was before.

    Args:
        model: on the meta device, with this program's attention and experts.
        family: the family of the config.
        config: the config of the model, bounded.

    Raises:
        ModelRefused: a buffer of more than LARGEST_BUFFER elements, or a feature that is not supported.
        Exception: whatever a module raises.
    """
    rotary: dict[str, nn.Module] = {name: _Rotary(real) for name, real in buffers_of_config(model).items()}
    linear = {
        name: PerSequence(module, module.layer_idx)
        for name, module in model.named_modules()
        if name.endswith(".linear_attn")
    }
    repeated = _repeated(model)
    sequence = SequenceKV(family.kv(config), ROWS, "meta")
    step = Step((Segment(sequence, (0,) * ROWS, PromptAttention()),))
    furthest = config.get("max_position_embeddings") or ROWS
    with (
        torch.inference_mode(),
        _replaced(model, rotary | linear),
        _replaced(model, repeated),
        _without_experts(model, family.intermediate(config)),
    ):
        kv = StepKV(step)
        output = model(
            input_ids=torch.zeros(1, ROWS, dtype=torch.int64, device="meta"),
            position_ids=torch.tensor([[0, furthest - 1]]),
            past_key_values=kv,
            use_cache=True,
            kv=kv,
        )
        if output.logits.shape[:2] != (1, ROWS):
            raise ValueError(f"logits of {list(output.logits.shape)} for {ROWS} tokens")


def buffers_of_config(model: Any) -> dict[str, nn.Module]:
    """Makes each module that computes buffers from its config (rotary frequencies) anew, in RAM.

    Raises:
        ModelRefused: a buffer of more than LARGEST_BUFFER elements.
        Exception: whatever a module raises.
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
            out[name] = type(module)(config=model.config)
    return out


class _Passes(nn.Module):
    """Stands in for a decoder layer, and returns its input."""

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        """As the layer's own."""
        return hidden_states


def _repeated(model: Any) -> dict[str, nn.Module]:
    """A stand-in for each decoder layer that differs from an earlier one in its number only."""
    seen, out = set(), dict[str, nn.Module]()
    for number, layer in model.get_submodule("model.layers").named_children():
        kind = tuple(_described(name, module) for name, module in layer.named_modules())
        if kind in seen:
            out[f"model.layers.{number}"] = _Passes()
        seen.add(kind)
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


class _Rotary(nn.Module):
    """Computes rotary embeddings in RAM, of the first and of the last positions, and returns their shapes."""

    def __init__(self, real: Any) -> None:
        super().__init__()
        self.real = real

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """As the module's own."""
        arguments = tuple(map(_in_ram, arguments))
        named = {name: _in_ram(value) for name, value in named.items()}
        self.real(*(_first(value) for value in arguments), **{name: _first(v) for name, v in named.items()})
        computed = self.real(*arguments, **named)
        parts = (computed,) if isinstance(computed, torch.Tensor) else computed
        if not all(bool(part.isfinite().all()) for part in parts):
            raise ValueError("rope_parameters give rotary embeddings that are not finite")
        shapes = tuple(part.to("meta") for part in parts)
        return shapes[0] if isinstance(computed, torch.Tensor) else shapes


def _in_ram(value: Any) -> Any:
    """A tensor of the same type in RAM for one on the meta device: the module reads its type and device only."""
    return torch.zeros(1, dtype=value.dtype) if isinstance(value, torch.Tensor) and value.is_meta else value


def _first(value: Any) -> Any:
    """Position 0 for every position."""
    return value * 0 if isinstance(value, torch.Tensor) else value


class _NoExperts:
    """Stands in for an ExpertLayer: checks the router's choice and the activation's shape, computes nothing."""

    def __init__(self, module: Any, intermediate: int) -> None:
        self._module, self._inner = module, intermediate

    def routed(self, hidden: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """As ExpertLayer.routed."""
        inner = self._module._apply_gate(hidden.new_empty(len(hidden), 2 * self._inner))
        if inner.shape[1] != self._inner or chosen.shape != gates.shape or len(chosen) != len(hidden):
            raise ValueError(
                f"experts {list(chosen.shape)} and gate weights {list(gates.shape)} of {len(hidden)} tokens"
            )
        return torch.empty_like(hidden)


@contextmanager
def _without_experts(model: nn.Module, intermediate: int) -> Iterator[None]:
    found: list[Any] = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    for module in found:
        module.edgemoe = _NoExperts(module, intermediate)
    try:
        yield
    finally:
        for module in found:
            del module.edgemoe


@contextmanager
def _replaced(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """Puts other modules in the places of some, within the block."""
    own = {name: model.get_submodule(name) for name in others}
    for name, other in others.items():
        model.set_submodule(name, other)
    try:
        yield
    finally:
        for name, module in own.items():
            model.set_submodule(name, module)
