"""Functions of Calls in lists of operations: parts of decoder layers that no other operation computes.

Each takes the context of a step, and rows [1, rows, N].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgemoe.layers.decoder_parts import ParallelExperts
from edgemoe.layers.router import router_of


def call_block(module: nn.Module, shared: nn.Module | None, step: Any, x: torch.Tensor) -> torch.Tensor:
    """A block, and the experts that every token has, where they are next to it."""
    found = module(x)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out if shared is None else out + shared(x)


def call_parallel(parallel: ParallelExperts, step: Any, x: torch.Tensor) -> torch.Tensor:
    """Experts parallel to a dense block, of the state before their norm."""
    rows = x.flatten(0, 1)
    _, gates, chosen = router_of(parallel.block)(rows)
    out: torch.Tensor = parallel.block.experts(parallel.norm(rows), chosen, gates)
    return out.view_as(x)


def call_states(module: nn.Module, step: Any, x: torch.Tensor) -> torch.Tensor:
    """A module with a state for each sequence."""
    out: torch.Tensor = module(x, cache_params=step.kv)
    return out


def call_indexed(module: nn.Module, positions: Any, step: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention to tokens that an index chooses (layers.indexed), of new tokens and guesses at the ones after them.

    Layers without an index of their own take over the choice of the last one before them (GLM-5).
    """
    at = torch.tensor([[each.length + i for each, _, own in step.kv.spans for i in range(own)]])
    before = {"prev_topk_indices": step.kv.indices} if hasattr(module, "skip_topk") else {}
    out: torch.Tensor
    out, _, *chosen = module(
        hidden_states=x,
        position_embeddings=positions(x, position_ids=at),
        attention_mask=torch.zeros(1, 1, 1, 1, dtype=torch.int64),
        position_ids=at,
        past_key_values=step.kv,
        kv=step.kv,
        **before,
    )
    step.kv.indices = next(iter(chosen), None)
    return out
