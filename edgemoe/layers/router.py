"""Routers in one kernel call, and the logits that look-ahead predicts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import nn

from edgemoe.errors import ModelRefused
from edgemoe.families.base import Gate, Traits
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.router import NativeRouter, OwnNorm, RouterForm
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.rows_alike import RowsAlike

_LEAST_GATE = 1e-30


class CompiledRouter(nn.Module):
    """Chooses tokens' experts by the compiled kernel.

    Args:
        router: transformers' module, with `weight` [E, H] in RAM and `top_k`.
        form: how it chooses.
        dtype: the element type in which it returns gate weights.
    """

    def __init__(self, router: Any, form: RouterForm, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self._dtype, self.form = weight_of(router), dtype, form
        self.e_score_correction_bias, self.num_group = form.bias, form.groups
        self.native = NativeRouter(self.weight.data, top_k_of(router), form)

    @classmethod
    def try_from(
        cls, router: Any, traits: Traits, config: Any, further: Sequence[torch.Tensor] = ()
    ) -> CompiledRouter | None:
        """A router with the weight of transformers' own, where the kernel runs and chooses as it does; None elsewhere.

        Args:
            router: the router of a MoE block; None: the block has none.
            traits: the traits of its family.
            config: transformers' config of the model.
            further: the router's arguments after the states; the first is a bias of its scores for the choice.
        """
        weight, gate = weight_of(router), traits.gate
        if not native.available() or weight is None or weight.dtype not in (torch.bfloat16, torch.float32):
            return None
        if weight.device.type != "cpu" or not weight.is_contiguous():
            return None
        if gate and traits.product_router and weight.dtype == torch.bfloat16:
            dtype = torch.bfloat16 if gate.rounded else torch.float32
            return cls(router, RouterForm(bool(gate.normalise(config)), gate.rounded), dtype)
        made = [
            cls(router, form, torch.bfloat16 if form.rounded else torch.float32)
            for form in forms_of(router, gate, config, further)
            if weight.dtype != torch.float32 or form.precise
        ]
        return closest(made, router, further)

    def forward(
        self, hidden: torch.Tensor, *further: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """bf16 [..., H] -> logits [T, E], gate weights [T, k], experts int64 [T, k]: transformers' router interface.

        `further` is what transformers' router takes as well, and this one has already.
        """
        logits, chosen, gates = self.native(hidden.reshape(-1, hidden.shape[-1]).contiguous())
        return logits, gates.to(self._dtype), chosen


_SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
"""Names of the factor of a router's gate weights."""

_LINEARS = ("gate", "wg", "proj")
"""Names of the linear layer of a router that has no weight of its own."""


def top_k_of(router: Any) -> int:
    """Experts of a token, of a router that has their number itself or in its config."""
    top_k: int = router.top_k if hasattr(router, "top_k") else router.config.top_k_experts
    return top_k


def _norm_of(router: Any) -> OwnNorm | None:
    """The norm that a router applies to states itself; None: it has none."""
    scale = getattr(router, "scale", None)
    if not hasattr(router, "norm") or not isinstance(scale, torch.Tensor):
        return None
    return OwnNorm(router.norm.eps, scale.detach().bfloat16().contiguous(), router.scalar_root_size)


def weight_of(router: Any) -> Any:
    """The weight of a router; None: it has none under a known name."""
    holders = (router, *(getattr(router, name, None) for name in _LINEARS))
    found = (getattr(each, "weight", None) for each in holders)
    return next((weight for weight in found if weight is not None), None)


def forms_of(
    router: Any, gate: Gate | None, config: Any, further: Sequence[torch.Tensor]
) -> list[RouterForm]:
    """The forms that a router may have, from the attributes that transformers gives its module.

    Those with a gate choose by scores and a bias, others by their product.
    """
    jitter = getattr(router, "router_jitter_noise", None)
    if gate is None and jitter is not None:
        mixing = float(torch.tensor(2 * jitter, dtype=torch.bfloat16))
        return [RouterForm(False, rounded=True, precise=True, rounded_product=True, mixing=mixing)]
    normalise = bool(getattr(router, "norm_topk_prob", True) if gate is None else gate.normalise(config))
    form = _scored_form(router, gate or Gate(function="sigmoid"), further, normalise=normalise)
    scored = [
        replace(form, rounded_product=product, rounded=rounded, rounded_scores=scores, raw_choice=not gate)
        for product, rounded, scores in _ROUNDED
    ]
    return scored if gate else [*scored, RouterForm(True, rounded=True)]


def _scored_form(router: Any, gate: Gate, further: Sequence[torch.Tensor], *, normalise: bool) -> RouterForm:
    """The form of a router with a float32 product, from the attributes that transformers gives its module."""
    holder = getattr(router, "moe_statics", router)
    bias = further[0] if further else getattr(holder, "e_score_correction_bias", None)
    product_bias, by_expert = (getattr(router, name, None) for name in ("bias", "per_expert_scale"))
    scale = next((factor for name in _SCALES if (factor := getattr(router, name, None))), 1)
    groups = getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1
    method = getattr(router, "topk_method", None)  # DeepSeek-V2 has one
    groups = 1 if method == "greedy" else groups
    return RouterForm(
        normalise,
        rounded=False,
        precise=True,
        sigmoid=gate.function == "sigmoid",
        bias=None if bias is None else bias.detach().float().flatten(),
        product_bias=None if product_bias is None else product_bias.detach().bfloat16().contiguous(),
        groups=groups,
        best_groups=getattr(router, "topk_group", None) or groups,
        group_best=2 if gate.function == "sigmoid" or method is None else 1,
        scale=float(scale),
        norm=_norm_of(router),
        expert_scale=None if by_expert is None else by_expert.detach().float().contiguous(),
    )


_ROUNDED = (
    *((False, False, False), (False, True, False)),
    *((True, False, False), (True, True, False), (True, True, True)),
)
"""Values that transformers' routers round to bf16: rounded_product, rounded and rounded_scores of RouterForm."""

_TRIED, _AGREE = 16, 13
"""Rows of a trial, and how many of them must agree: in others two numbers may be nearly equal, and either be first."""


Choose = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""From states bf16 [T, H] to logits [T, E], gate weights [T, k] and experts int64 [T, k]."""

Own = TypeVar("Own", bound=Choose)


def closest(routers: Sequence[Own], router: Any, further: Sequence[torch.Tensor]) -> Own | None:
    """The router that differs least from transformers' own; None: they all choose something else.

    Args:
        routers: candidates, each with the weight of the router.
        router: transformers' router.
        further: its arguments after the states.
    """
    distances = [(_distance(each, router, further), each) for each in routers]
    agreeing = [(distance, each) for distance, each in distances if distance is not None]
    return min(agreeing, key=itemgetter(0))[1] if agreeing else None


def _distance(own: Choose, router: Any, further: Sequence[torch.Tensor]) -> tuple[float, float] | None:
    """The median differences of logits and of gate weights of states that are noise.

    None: they choose other experts or weights.
    """
    weight = weight_of(router)
    noise = torch.randn(_TRIED, weight.shape[1], generator=torch.Generator().manual_seed(0))
    noise = noise.bfloat16().to(weight.device)
    try:
        with torch.inference_mode():
            their_logits, theirs, experts = choice_of(router, noise, further)
            logits, gates, choice = own(noise)
    except (TypeError, ValueError):  # a router with other arguments or another result
        return None
    empty = torch.zeros(len(noise), len(weight), device=weight.device)
    want, result = empty.scatter(1, experts, theirs.float()), empty.scatter(1, choice, gates.float())
    agree = torch.isclose(result, want, rtol=1e-3, atol=1e-6).all(1)
    if int(agree.sum()) < _AGREE:
        return None
    apart = (logits.float() - their_logits.float().view_as(logits)).abs().amax(1).median()
    return float(apart), float((result - want).abs().amax(1).median())


def choice_of(router: Any, hidden: torch.Tensor, further: Sequence[Any]) -> Any:
    """The choice of transformers' router, without its hooks, for states [T, H]; some routers take [1, T, H] alone."""
    try:
        return router.forward(hidden, *further)
    except ValueError:
        return router.forward(hidden[None], *further)


def router_name(block: Any) -> str:
    """The name of the router in a MoE block."""
    return "gate" if hasattr(block, "gate") else "router"


def router_of(block: Any) -> Any:
    """The router of a MoE block, transformers' module or this program's."""
    return getattr(block, router_name(block))


def choose_by_row(router: Any) -> None:
    """Makes transformers' router give a row the same bits among any number of rows, where the kernel runs in RAM."""
    theirs = not isinstance(router, CompiledRouter)
    if theirs and native.available() and next(router.parameters()).device.type == "cpu":
        router.forward = partial(_forward_by_row, router.forward)


def _forward_by_row(forward: Callable[..., Any], *arguments: torch.Tensor) -> Any:
    with RowsAlike():
        return forward(*arguments)


def next_logits(block: Any, traits: Traits) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function from hidden states [T, H] to logits [T, E], of which the top k are the router's own choice.

    The product of weight and state where the family's routers choose by it. Elsewhere the router runs, with its biases,
    corrections and groups, and the logits are its gate weights': -inf for experts that it does not choose.

    Args:
        block: the MoE block of a later layer, transformers' module with its router.
        traits: the traits of its family.

    Raises:
        ModelRefused: the router needs an argument that the block does not have under its name.
    """
    router = router_of(block)
    if traits.product_router:
        return DenseLinear(weight_of(router).detach().to(torch.bfloat16), None, None)
    return partial(_chosen_logits, block, router, further_arguments(block, router))


def further_arguments(block: Any, router: Any) -> list[str]:
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
    own, gates, chosen = choice_of(router, hidden, arguments)
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

    def gates(logits: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
        taken = scores.gather(1, choice)
        return taken / taken.sum(1, keepdim=True) if normalise else taken

    return gates
