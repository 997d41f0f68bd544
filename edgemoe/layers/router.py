"""A layer's router: which experts a token gets, and their gate weights, in one call of edgemoe's kernel."""

from __future__ import annotations

from typing import Any

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.router import NativeRouter


class SoftmaxRouter:
    """Stands in the place of a router's `forward`.

    Args:
        router: a softmax over `weight`'s product, of which the top k count.
        normalise: whether theirs are scaled to add up to 1.
    """

    def __init__(self, router: Any, *, normalise: bool) -> None:
        weight = router.weight.data
        self._dtype = router(weight[:1])[1].dtype
        self.choose = NativeRouter(
            weight, router.top_k, normalise=normalise, rounded=self._dtype == torch.bfloat16
        )

    @classmethod
    def like(cls, router: Any) -> SoftmaxRouter | None:
        """The same as a router with bf16 weights in RAM, if it is such a one: it is asked, about a few rows."""
        weight = getattr(router, "weight", None)
        if not native.available() or weight is None or not hasattr(router, "top_k"):
            return None
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not weight.is_contiguous():
            return None
        rows = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
        said = [router.forward(row) for row in rows.split(1)]
        for normalise in (True, False):
            route = NativeRouter(weight.data, router.top_k, normalise=normalise, rounded=False)
            if all(_is_softmax(one, route) for one in said):
                return cls(router, normalise=normalise)
        return None

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """transformers' interface of a router: bf16 [.., H] -> logits [T, E], weights [T, k], experts int64 [T, k].

        A single row's are valid until the next.
        """
        logits, chosen, shares = self.choose(hidden.reshape(-1, hidden.shape[-1]).contiguous())
        return logits, shares.to(self._dtype), chosen


def _is_softmax(said: tuple[torch.Tensor, torch.Tensor, torch.Tensor], route: NativeRouter) -> bool:
    """Whether a router's weights [1, k] of experts [1, k] are what `route` makes of its logits [1, E]."""
    logits, weights, experts = said
    if logits.dtype != torch.bfloat16 or experts.dtype != torch.int64 or weights.shape != experts.shape:
        return False
    _, shares = route.of_logits(logits.contiguous())
    # Of two experts that are equally likely a router may take either: what they get is the same.
    return torch.allclose(weights.float(), shares, rtol=0.01)
