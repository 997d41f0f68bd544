"""A softmax router with top-k, one call of csrc/router.c."""

from __future__ import annotations

import ctypes

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.structures import Router


class NativeRouter:
    """Chooses tokens' experts.

    Args:
        weight: bf16 [E, H], contiguous.
        top_k: at most E.
        normalise: scale the chosen experts' gate weights to add up to 1.
        rounded: round them to bf16.
    """

    def __init__(self, weight: torch.Tensor, top_k: int, *, normalise: bool, rounded: bool) -> None:
        self._weight = weight  # keeps the address below valid
        self._router = Router(
            weight=weight.data_ptr(),
            count=weight.shape[0],
            cols=weight.shape[1],
            k=top_k,
            normalise=normalise,
            rounded=rounded,
        )
        self.top_k = top_k
        self.logits = weight.new_empty(weight.shape[0])
        """bf16 [E], scratch of a single token."""
        self.probabilities = torch.empty(weight.shape[0])
        """float32 [E], scratch."""

    @property
    def address(self) -> int:
        """The address of its structure; valid as long as this object."""
        return ctypes.addressof(self._router)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Chooses each token's experts.

        Args:
            x: bf16 [T, H], contiguous.

        Returns:
            logits, bf16 [T, E]; experts, int64 [T, k], the likeliest first, the first of a tie; their gate weights,
            float32 [T, k].

        Raises:
            MemoryError: no memory for the tokens' activations.
        """
        tokens = x.shape[0]
        logits = x.new_empty(tokens, len(self.logits))
        chosen, gates = torch.empty(tokens, self.top_k, dtype=torch.int64), torch.empty(tokens, self.top_k)
        result = native.library().edgemoe_router_topk(
            *(native.threads(), self.address, x.data_ptr(), *x.shape, logits.data_ptr()),
            *(self.probabilities.data_ptr(), chosen.data_ptr(), gates.data_ptr()),
        )
        if result:
            raise native.failure(result, "a router's activations")
        return logits, chosen, gates
