"""Linear attention over the sequences of a step: transformers' module runs once for each sequence."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import nn

from edgemoe.kernels import threads
from edgemoe.kv.step import StepKV


class PerSequence(nn.Module):
    """Runs a linear-attention module for each sequence of a step.

    Args:
        module: transformers' module.
        layer: its number.
    """

    def __init__(self, module: nn.Module, layer: int) -> None:
        super().__init__()
        self.module, self.layer = module, layer

    def forward(self, hidden_states: torch.Tensor, cache_params: StepKV, **kwargs: Any) -> torch.Tensor:
        """Maps bf16 [1, rows, H] of all sequences to bf16 [1, rows, H], and updates each sequence's state."""
        if cache_params.signal:
            _warn_of_load()
        cache_params.ranks = None
        out = []
        for (sequence, row, rows), place in zip(cache_params.spans, cache_params.places, strict=True):
            assert sequence.states is not None
            continued = place.part.start > 0
            state = sequence.states.of(self.layer, fresh=sequence.length == 0, continued=continued)
            with threads.for_product(64 * rows * hidden_states.shape[2]):
                out.append(self.module(hidden_states=hidden_states[:, row : row + rows], cache_params=state))
        return torch.cat(out, dim=1)


@cache
def _warn_of_load() -> None:
    """Warns once per process that load ranks the experts."""
    logging.getLogger("edgemoe").warning(
        "linear-attention layers have no attention scores: there the experts of a prompt are ranked by load"
    )
