"""A router: a softmax of which the likeliest count, a call of csrc/router.c."""

from __future__ import annotations

import ctypes

import torch

from edgemoe.kernels.native import library as native


class _Router(ctypes.Structure):
    """`router` in csrc/router.c."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "cols", "k")),
        *((name, ctypes.c_int32) for name in ("normalise", "rounded")),
    )


class NativeRouter:
    """Chooses tokens' experts.

    Args:
        weight: bf16 [E, H], contiguous.
        top_k: at most E.
        normalise: the chosen experts' shares of the softmax are scaled to add up to 1.
        rounded: they are rounded to bf16.
    """

    def __init__(self, weight: torch.Tensor, top_k: int, *, normalise: bool, rounded: bool) -> None:
        self._kept = weight  # the structure below has its bare address
        self._router = _Router(weight.data_ptr(), *weight.shape, top_k, normalise, rounded)
        self.logits = weight.new_empty(1, weight.shape[0])
        """bf16 [1, E], of the last token."""
        self.chosen, self.shares = torch.empty(1, top_k, dtype=torch.int64), torch.empty(1, top_k)
        """What the last call returned."""
        self.top_k, self._probabilities = top_k, torch.empty(weight.shape[0])
        self._results = tuple(t.data_ptr() for t in (self._probabilities, self.chosen, self.shares))

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of its structure, and of where logits, probabilities, experts and their shares go. Valid as long as this."""
        return ctypes.addressof(self._router), self.logits.data_ptr(), *self._results

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens' logits, experts and their shares. A single token's are this one's own, valid until the next.

        Args:
            x: bf16 [T, H], contiguous.

        Returns:
            bf16 [T, E]; int64 [T, k], the likeliest first, of a tie the first; float32 [T, k].

        Raises:
            MemoryError: no memory for the tokens' numbers.
        """
        tokens, own = x.shape[0], (self.logits, self.chosen, self.shares)
        logits, chosen, shares = own if tokens == 1 else (t.new_empty(tokens, t.shape[1]) for t in own)
        if native.library().edgemoe_choose(
            *(native.threads(), ctypes.byref(self._router), x.data_ptr(), tokens, logits.data_ptr()),
            *(self._probabilities.data_ptr(), chosen.data_ptr(), shares.data_ptr()),
        ):
            raise MemoryError("no memory for a router's activations")
        return logits, chosen, shares

    def of_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for a token whose logits are known, bf16, E in all, contiguous."""
        native.library().edgemoe_route(ctypes.byref(self._router), logits.data_ptr(), *self._results)
        return self.chosen, self.shares
