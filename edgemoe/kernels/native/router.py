"""A router with top-k, one call of csrc/router.c."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.structures import Router


@dataclass(frozen=True)
class RouterForm:
    """How a router makes a choice and gate weights of its product with a token's state.

    The choice is the top k of the scores, biased, in the best groups of experts; gate weights are the scores alone.

    Args:
        normalise: scale the chosen experts' gate weights to add up to 1.
        rounded: round them to bf16.
        precise: the product is float32 and has all that follows below; else it is bf16, and scores are a softmax of it.
        rounded_product: a precise product is rounded to bf16, after its bias was added.
        rounded_scores: a precise router's scores are rounded to bf16, and all that is computed of them.
        product_bias: bf16 [E], added to a precise product, so that it changes the scores; None: none.
        norm: applied to states before the product; None: none.
        expert_scale: float32 [E], factors of the experts' gate weights, after all else; None: none.
        raw_choice: a precise router's choice is the top k of its product and the bias, not of scores and the bias.
        mixing: if not 0, the two experts have the largest numbers of a precise product in bf16, and a gate weight is a
            part of a softmax over numbers at most `mixing` times their magnitude below the expert's (SparseMixer).
        sigmoid: an expert's score is the sigmoid of its own number, not its part of a softmax.
        bias: float32 [E], added to the scores for the choice alone; None: none.
        groups: groups of consecutive experts, of which `best_groups` are taken; 1: all experts are one.
        best_groups: number of groups that are taken, at most `groups`.
        group_best: a group's rank goes by the sum of so many of its best numbers, 1 or 2.
        scale: factor of the gate weights.
    """

    normalise: bool
    rounded: bool
    precise: bool = False
    sigmoid: bool = False
    bias: torch.Tensor | None = None
    groups: int = 1
    best_groups: int = 1
    group_best: int = 1
    scale: float = 1.0
    rounded_product: bool = False
    rounded_scores: bool = False
    product_bias: torch.Tensor | None = None
    norm: OwnNorm | None = None
    expert_scale: torch.Tensor | None = None
    raw_choice: bool = False
    mixing: float = 0.0


@dataclass(frozen=True)
class OwnNorm:
    """The norm that a router applies to states before its product, of which each result is rounded to bf16.

    Args:
        epsilon: the number that is added to the mean of squares.
        scale: bf16 [H], is multiplied with normed states.
        factor: is multiplied with them after that.
    """

    epsilon: float
    scale: torch.Tensor
    factor: float


_LEAST_SUM = 1e-20
"""Added to the sum that a precise router's gate weights are divided by."""


class NativeRouter:
    """Chooses tokens' experts.

    Args:
        weight: bf16 [E, H], or float32 of a precise router; contiguous.
        top_k: number of experts of a token, at most E.
        form: how it chooses.
    """

    def __init__(self, weight: torch.Tensor, top_k: int, form: RouterForm) -> None:
        self._weight = weight  # these three keep the addresses below valid
        self._bias = None if form.bias is None else form.bias.float().contiguous()
        self._product_bias = form.product_bias
        self.precise = form.precise
        self._router = Router(
            weight=weight.data_ptr(),
            count=weight.shape[0],
            cols=weight.shape[1],
            k=top_k,
            normalise=form.normalise,
            rounded=form.rounded,
            precise=form.precise,
            sigmoid=form.sigmoid,
            bias=None if self._bias is None else self._bias.data_ptr(),
            groups=form.groups,
            best_groups=form.best_groups,
            group_best=form.group_best,
            scale=form.scale if form.precise else 0,
            least=_LEAST_SUM if form.normalise else 0,
            product_bias=None if form.product_bias is None else form.product_bias.data_ptr(),
            rounded_product=form.rounded_product,
            rounded_scores=form.rounded_scores,
            wide_weight=weight.dtype == torch.float32,
            raw_choice=form.raw_choice,
            mixing=form.mixing,
        )
        self._set_norm(form)
        self.top_k = top_k
        self.scores = torch.empty(3 * weight.shape[0])
        """float32 [3 E], scratch."""

    def _set_norm(self, form: RouterForm) -> None:
        """Sets what a router with a norm of its own, or with factors of experts, has in addition."""
        self._norm, self._expert_scale = form.norm, form.expert_scale  # keep the addresses valid
        if self._expert_scale is not None:
            self._router.expert_scale = self._expert_scale.data_ptr()
        if self._norm:
            self._ones = torch.ones(self._weight.shape[1])
            self._router.state_norm, self._router.state_scale = (
                self._ones.data_ptr(),
                self._norm.scale.data_ptr(),
            )
            self._router.state_epsilon, self._router.state_factor = self._norm.epsilon, self._norm.factor

    @property
    def address(self) -> int:
        """The address of its structure; valid as long as this object."""
        return ctypes.addressof(self._router)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Chooses each token's experts.

        Args:
            x: bf16 [T, H], contiguous.

        Returns:
            logits [T, E], float32 of a precise router, else bf16; experts, int64 [T, k], with the largest gate
            weights first, the first of a tie; their gate weights, float32 [T, k].

        Raises:
            MemoryError: no memory for the tokens' activations.
            ValueError: more experts than there are, or groups that do not divide them.
        """
        tokens = x.shape[0]
        if self._norm:
            own = torch.empty_like(x)
            where = native.threads(), self.address, x.data_ptr(), tokens, own.data_ptr()
            if result := native.library().edgemoe_router_states(*where):
                raise native.failure(result, "a router's states")
            x = own
        logits = torch.empty(tokens, len(self._weight), dtype=torch.float32 if self.precise else x.dtype)
        chosen, gates = torch.empty(tokens, self.top_k, dtype=torch.int64), torch.empty(tokens, self.top_k)
        result = native.library().edgemoe_router_topk(
            *(native.threads(), self.address, x.data_ptr(), *x.shape, logits.data_ptr()),
            *(self.scores.data_ptr(), chosen.data_ptr(), gates.data_ptr()),
        )
        if result:
            raise native.failure(result, "a router's activations")
        return logits, chosen, gates
