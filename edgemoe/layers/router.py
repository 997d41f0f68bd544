"""A softmax router in one kernel call, and the logits that look-ahead predicts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from edgemoe.errors import ModelRefused
from edgemoe.families.base import Gate, Traits
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.router import NativeRouter
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.rows_alike import RowsAlike

_LEAST_GATE = 1e-30


class SoftmaxRouter(nn.Module):
    """Chooses tokens' experts: a softmax of which the top k count.

    Args:
        router: transformers' module, with `weight` bf16 [E, H] in RAM and `top_k`.
        normalise: whether the chosen experts' gate weights are scaled to add up to 1.
        rounded: whether gate weights are rounded to bf16.
    """

    def __init__(self, router: Any, *, normalise: bool, rounded: bool) -> None:
        super().__init__()
        self.weight = router.weight
        self._dtype = torch.bfloat16 if rounded else torch.float32
        self.native = NativeRouter(router.weight.data, router.top_k, normalise=normalise, rounded=rounded)

    @classmethod
    def try_from(cls, router: Any, gate: Gate, config: Any) -> SoftmaxRouter | None:
        """A router with the weight of transformers' own, where the kernel runs; None elsewhere.

        Args:
            router: the router of a MoE block; None: the block has none.
            gate: the family's.
            config: transformers' config of the model.
        """
        weight = getattr(router, "weight", None)
        if not native.available() or weight is None or weight.dtype != torch.bfloat16:
            return None
        if weight.device.type != "cpu" or not weight.is_contiguous():
            return None
        return cls(router, normalise=bool(gate.normalise(config)), rounded=gate.rounded)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """bf16 [..., H] -> logits [T, E], gate weights [T, k], experts int64 [T, k]: transformers' router interface."""
        logits, chosen, gates = self.native(hidden.reshape(-1, hidden.shape[-1]).contiguous())
        return logits, gates.to(self._dtype), chosen


def router_of(block: Any) -> Any:
    """The router of a MoE block, transformers' module or this program's."""
    return block.gate if hasattr(block, "gate") else block.router


def choose_by_row(router: Any) -> None:
    """Makes transformers' router give a row the same bits among any number of rows, where the kernel runs in RAM."""
    theirs = not isinstance(router, SoftmaxRouter)
    if theirs and native.available() and next(router.parameters()).device.type == "cpu":
        router.forward = partial(_forward_by_row, router.forward)


def _forward_by_row(forward: Callable[..., Any], *arguments: torch.Tensor) -> Any:
    with RowsAlike():
        return forward(*arguments)


def next_logits(block: Any, traits: Traits) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function from hidden states [T, H] to logits [T, E], of which the top k are the router's own choice.

    The product of weight and state where the family's routers choose by it. Elsewhere the router runs, with its biases,
    corrections and groups, and the logits are those of its gate weights: -inf for experts that it does not choose.

    Args:
        block: the MoE block of a later layer, transformers' module with its router.
        traits: the traits of its family.

    Raises:
        ModelRefused: the router needs an argument that the block does not have under its name.
    """
    router = router_of(block)
    if traits.product_router:
        return DenseLinear(router.weight.detach().to(torch.bfloat16), None, None)
    return partial(_chosen_logits, block, router, _further_arguments(block, router))


def _further_arguments(block: Any, router: Any) -> list[str]:
    """Names of what a router takes after the hidden states: attributes of its block, such as a bias for the choice."""
    further = list(signature(type(router).forward).parameters.values())[2:]
    for each in further:
        if each.default is each.empty and not hasattr(block, each.name):
            raise ModelRefused(
                f"{each.name} in {type(block).__name__}, for its router {type(router).__name__}",
                "no such attribute",
                "choose a model of another family",
            )
    return [each.name for each in further if hasattr(block, each.name)]


def _chosen_logits(block: Any, router: Any, further: Sequence[str], hidden: torch.Tensor) -> torch.Tensor:
    gates: torch.Tensor
    # Without the router's hooks: a prediction is no choice, and remapped_router.py would count it as one.
    arguments = [getattr(block, name) for name in further]
    try:
        own, gates, chosen = router.forward(hidden, *arguments)
    except ValueError:
        # Some routers take [1, T, H] alone, as their block has it.
        own, gates, chosen = router.forward(hidden[None], *arguments)
    logits = gates.new_full((len(gates), own.shape[-1]), -torch.inf, dtype=torch.float32)
    # A gate weight that has rounded to 0 is still one of a chosen expert.
    return logits.scatter_(1, chosen, gates.float().clamp_min(_LEAST_GATE).log())


def next_gates(traits: Traits, config: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Returns a function from logits [T, E] of `next_logits` and experts int64 [T, k] to their gate weights [T, k].

    None where the family's gate weights are no function of such logits.

    Args:
        traits: the traits of its family.
        config: transformers' config of the model.
    """
    if not traits.product_router:
        return lambda logits, chosen: logits.gather(1, chosen).exp()
    if traits.gate is None:
        return None
    sigmoid, normalise = traits.gate.function == "sigmoid", bool(traits.gate.normalise(config))

    def gates(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
        taken = scores.gather(1, chosen)
        return taken / taken.sum(1, keepdim=True) if normalise else taken

    return gates
