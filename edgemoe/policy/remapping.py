"""Lets the new tokens of a step agree on fewer experts (Lynx, section 3.2 and appendix A).

A token's experts whose logits differ little are as good as each other to it: they are in one bin, counted from the
likeliest one down. Among these it takes those that the step's other tokens want most, so a step reads fewer experts.
Every token keeps its likeliest expert and its number of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from storage.errors import UserError

MOST_BINS = 8
"""Most bins below the first: whole numbers of 64 bits count the votes of 64 tokens then."""


@dataclass(frozen=True)
class Remapping:
    """How wide the bins are, and how many.

    >>> logits = torch.tensor([[5.0, 2.1, 2.0], [0.0, 1.0, 5.0]])
    >>> logits.topk(2).indices.tolist(), Remapping(alpha=2, bins=4).choose(logits, 2).tolist()
    ([[0, 1], [2, 1]], [[0, 2], [2, 0]])

    Args:
        alpha: bins for each unit of a logit, above 0 (the paper's bin density). The paper gives no default.
        bins: below the first, 1 to MOST_BINS; the last has all lower logits (the paper's number of bins).

    Raises:
        UserError: one is out of its range.
    """

    alpha: float = 2.0
    bins: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.alpha < float("inf"):
            raise UserError("a number above 0 for --lynx-alpha", f"{self.alpha}", "choose 2")
        if not 1 <= self.bins <= MOST_BINS:
            raise UserError(f"1 to {MOST_BINS} bins for --lynx-beta", f"{self.bins}", "choose 4")

    def __str__(self) -> str:
        """As in tables: "lynx 2/4"."""
        return f"lynx {self.alpha:g}/{self.bins}"

    def choose(self, logits: torch.Tensor, top_k: int) -> torch.Tensor:
        """Chooses each token's experts: by bin, then by votes, by logit and by number, its likeliest one always.

        The same choice as edgemoe_remap's of csrc/router.c.

        Args:
            logits: [T, E], any float dtype, of the T new tokens of a step; -inf: no expert of this token.
            top_k: experts of a token.

        Returns:
            int64 [T, top_k], the likeliest first.
        """
        logits = logits.float()
        order = logits.argsort(dim=1, descending=True, stable=True)
        own, likeliest = order[:, :top_k], order[:, :1]
        best = logits.gather(1, likeliest)
        bins = ((logits - best) * self.alpha).ceil().clamp_min(-self.bins)
        # NaN is not above -inf either.
        bins = torch.where(logits > -torch.inf, bins, -self.bins - 1).to(torch.int64)
        finite = best.isfinite()
        powers = torch.tensor([0, *(len(logits) ** i for i in range(self.bins + 1))], device=logits.device)
        votes = (powers[bins.clamp_min(-self.bins - 1) + self.bins + 1] * finite).sum(0)
        bins.scatter_(1, likeliest, 1)
        for key in (votes.expand_as(bins), bins):
            order = order.gather(1, key.gather(1, order).argsort(dim=1, descending=True, stable=True))
        chosen = order[:, :top_k].sort(1).values
        by_logit = logits.gather(1, chosen).argsort(dim=1, descending=True, stable=True)
        return torch.where(finite, chosen.gather(1, by_logit), own)
