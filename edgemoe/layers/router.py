"""A softmax router in one kernel call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgemoe.families.base import SoftmaxGate
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.router import NativeRouter


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
    def try_from(cls, router: Any, gate: SoftmaxGate, config: Any) -> SoftmaxRouter | None:
        """A router with the weight of transformers' own, where the kernel runs; None elsewhere.

        Args:
            router: of a MoE block; None: the block has none.
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
