"""Linear attention and other layers with a state of fixed size, over the sequences of a step: each has its own."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import nn

from edgemoe.kernels import torch_rules
from edgemoe.kv.step import StepKV


def stateful_modules(model: nn.Module) -> dict[str, Any]:
    """Modules of decoder layers with a state of fixed size, by name; they have a convolution over tokens."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx") and any(isinstance(part, nn.Conv1d) for part in module.children())
    }


class PerSequence(nn.Module):
    """Runs a module that keeps a state of fixed size for each sequence of a step.

    Args:
        module: transformers' module, or a recurrence of layers.recurrences.
        layer: its number.
    """

    def __init__(self, module: nn.Module, layer: int) -> None:
        super().__init__()
        self.module, self.layer = module, layer

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache_params: StepKV | None = None,
        past_key_values: StepKV | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Maps bf16 [1, rows, H] of all sequences to bf16 [1, rows, H], and updates each sequence's state.

        Guesses that were right in the step before come into the state first.

        The step's state has one of two names, by family.
        """
        name, kv = "past_key_values", past_key_values
        if kv is None:
            name, kv = "cache_params", cache_params
        assert kv is not None
        if kv.signal:
            _warn_of_load()
        kv.ranks = None
        out = []
        for (sequence, row, rows), place in zip(kv.spans, kv.places, strict=True):
            assert sequence.states is not None
            continued = place.part.start > 0
            state = sequence.states.of(self.layer, fresh=sequence.length == 0, continued=continued)
            with torch_rules.threads_for(64 * rows * hidden_states.shape[2]):
                own = hidden_states[:, row : row + rows]
                out.append(self.module(hidden_states=own, **{name: state}))
        return torch.cat(out, dim=1)


@cache
def _warn_of_load() -> None:
    """Warns once per process that load ranks the experts."""
    logging.getLogger("edgemoe").warning(
        "linear-attention layers have no attention scores: there the experts of a prompt are ranked by load"
    )
