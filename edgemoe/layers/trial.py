"""A step of a model without weights: values of a config that transformers' modules cannot compute with fail here.

It runs on the meta device, where shapes are computed and nothing else. Rotary embeddings alone compute: their code
depends on positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from edgemoe.families.base import Family
from edgemoe.families.meta_model import Rotary, buffers_of_config, passing, repeated_layers, replaced
from edgemoe.kernels.activation import between
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step, StepKV
from edgemoe.layers.indexed import IndexBySequence, indexers
from edgemoe.layers.linear_attention import PerSequence, stateful_modules
from edgemoe.policy.importance import PromptAttention
from edgemoe.storage.convert.config import Config

ROWS = 2
"""Tokens of the step: the first, and one at the far end of the context."""


def try_step(model: Any, family: Family, config: Config) -> None:
    """Runs a step of ROWS tokens through all modules but the experts' products, through equal layers once.

    The model is afterwards as it was before.

    Args:
        model: the model on the meta device, with this program's attention and experts.
        family: the family of the config.
        config: the config of the model, bounded.

    Raises:
        ModelRefused: a buffer of more than LARGEST_BUFFER elements, or a feature that is not supported.
        Exception: whatever a module raises.
    """
    furthest = config.get("max_position_embeddings") or ROWS
    positions, found = torch.tensor([0, furthest - 1]), buffers_of_config(model)
    rotary: dict[str, nn.Module] = {name: Rotary(real, positions) for name, real in found.items()}
    own: dict[str, nn.Module] = {name: IndexBySequence(module) for name, module in indexers(model).items()}
    own |= {name: PerSequence(module, module.layer_idx) for name, module in stateful_modules(model).items()}
    repeated = passing(model, repeated_layers(model))
    sequence = SequenceKV(family.kv, ROWS, "meta")
    step = Step((Segment(sequence, (0,) * ROWS, PromptAttention()),))
    with (
        torch.inference_mode(),
        replaced(model, rotary | own),
        replaced(model, repeated),
        _without_experts(model, family.intermediate),
    ):
        kv = StepKV(step)
        output = model(
            input_ids=torch.zeros(1, ROWS, dtype=torch.int64, device="meta"),
            position_ids=positions[None].to("meta"),
            past_key_values=kv,
            use_cache=True,
            kv=kv,
        )
        if output.logits.shape[:2] != (1, ROWS):
            raise ValueError(f"logits of {list(output.logits.shape)} for {ROWS} tokens")


class _NoExperts:
    """Stands in for an ExpertLayer: checks the router's choice and the activation's shape, computes nothing."""

    def __init__(self, module: Any, intermediate: int) -> None:
        self._module, self._inner = module, intermediate

    def routed(self, hidden: torch.Tensor, choice: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """See ExpertLayer.routed."""
        gated = self._module.has_gate
        inner = between(self._module)(hidden.new_empty(len(hidden), (1 + gated) * self._inner))
        if inner.shape[1] != self._inner or choice.shape != gates.shape or len(choice) != len(hidden):
            raise ValueError(
                f"experts {list(choice.shape)} and gate weights {list(gates.shape)} of {len(hidden)} tokens"
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
