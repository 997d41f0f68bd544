"""Rotary embeddings for a given number of tokens, where transformers takes the largest position of a step.

A step may have some of a prompt's tokens only. Its keys must have the factors of the whole prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RotaryLength:
    """Gives a model's rotary modules the number of tokens that their factors are for.

    Args:
        model: a model whose factors depend on the length (kv.rotary_lengths).

    Attributes:
        tokens: the number of tokens; at least the sequence's number at the end of the next step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tokens = 1
        for module in model.modules():
            if hasattr(module, "original_max_seq_len") and hasattr(module, "rope_type"):
                module.register_forward_pre_hook(self._add_position, with_kwargs=True)
                module.register_forward_hook(self._drop_position)

    def _add_position(
        self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Adds the last position, after a module's memory of a longer sequence is reset."""
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            prefix = name.removesuffix("max_seq_len_cached")
            if getattr(module, name) > module.original_max_seq_len:
                setattr(module, name, module.original_max_seq_len)
                setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
        hidden, *rest = arguments
        positions = keywords["position_ids"] if "position_ids" in keywords else rest.pop(0)
        last = positions.new_full((len(positions), 1), self.tokens - 1)
        positions = torch.cat((positions, last), 1)
        return (hidden, positions, *rest), {k: v for k, v in keywords.items() if k != "position_ids"}

    @staticmethod
    def _drop_position(module: Any, arguments: Any, output: Any) -> Any:
        """Removes the added position's cosines and sines."""
        if isinstance(output, torch.Tensor):
            return output[:, :-1]
        return tuple(part[:, :-1] for part in output)
