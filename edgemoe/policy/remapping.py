"""Lets the new tokens of a step agree on fewer experts (Lynx, section 3.2 and appendix A).

A token's experts whose logits differ little are as good as each other to it: they are in one bin, counted from the
likeliest one down. Among these it takes the ones that the step's other tokens want most, so a step reads fewer experts.
Every token keeps its likeliest expert and its number of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgemoe.errors import UserError

MOST_BINS = 8
"""Most bins below the first: whole numbers of 64 bits count the votes of 64 tokens then."""

_UNBOUNDED = 1 << 30
"""Bins below the first where no expert is to share the last one for want of bins."""


@dataclass(frozen=True)
class Remapping:
    """The width and the number of bins.

    >>> logits = torch.tensor([[5.0, 2.1, 2.0], [0.0, 1.0, 5.0]])
    >>> logits.topk(2).indices.tolist(), Remapping(alpha=2, bins=4).choose(logits, 2).tolist()
    ([[0, 1], [2, 1]], [[0, 2], [2, 0]])

    Args:
        alpha: bins for each unit of a logit, above 0 (the paper's bin density). The paper gives no default.
        bins: number of bins below the first, 1 to MOST_BINS; the last has all lower logits (the paper's number of
            bins).

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
        """The text in tables: "lynx 2/4"."""
        return f"lynx {self.alpha:g}/{self.bins}"

    def choose(self, logits: torch.Tensor, top_k: int, only: Movable | None = None) -> torch.Tensor:
        """Chooses each token's experts: by bin, then by votes, by logit and by number, its likeliest one always.

        Without `only` the same choice as edgemoe_remap's of csrc/remapping.c.

        Args:
            logits: [T, E], any float dtype, of the T new tokens of a step; -inf: no expert of this token.
            top_k: experts of a token.
            only: experts that may change, of a study; None: all but the likeliest.

        Returns:
            int64 [T, top_k], the likeliest first.
        """
        logits = logits.float()
        bins = bins_of(logits, self.alpha, self.bins)
        powers = torch.tensor([0, *(len(logits) ** i for i in range(self.bins + 1))], device=logits.device)
        finite = logits.amax(1, keepdim=True).isfinite()
        votes = (powers[bins + self.bins + 1] * finite).sum(0).expand_as(bins)
        if only and only.bins is not None:
            votes = votes * torch.isin(-bins, torch.tensor(only.bins, device=logits.device))
        fixed = (
            [0] if only is None or only.ranks is None else [i for i in range(top_k) if i not in only.ranks]
        )
        return take(logits, bins, votes, top_k, fixed)


@dataclass(frozen=True)
class Movable:
    """The part of a token's experts that may change (Lynx's figures 5 to 7). Without a field all but the likeliest may.

    Args:
        bins: bins, counted from the likeliest expert's, 0, down: votes order these alone.
        ranks: the ranks of the token's own experts, 0 the likeliest; the others stay.
    """

    bins: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None


def changed_pairs(before: torch.Tensor, after: torch.Tensor) -> int:
    """How many experts of `after` [T, k] are not in the same row of `before`."""
    return int((after.unsqueeze(2) != before.unsqueeze(1)).all(2).sum())


def prefer_resident(logits: torch.Tensor, top_k: int, alpha: float, resident: torch.Tensor) -> torch.Tensor:
    """Chooses each token's experts by bin, resident ones of a bin first; its likeliest one always.

    Args:
        logits: [T, E], any float dtype.
        top_k: experts of a token.
        alpha: bins for each unit of a logit; there are as many as it takes.
        resident: bool [E].

    Returns:
        int64 [T, top_k], the likeliest first.
    """
    logits = logits.float()
    bins = bins_of(logits, alpha, _UNBOUNDED)
    return take(logits, bins, resident.to(torch.int64).expand_as(bins), top_k, [0])


def bins_of(logits: torch.Tensor, alpha: float, count: int) -> torch.Tensor:
    """The bin of each of a token's experts: 0 near the best logit, down to -count; one less for -inf and NaN.

    Args:
        logits: float32 [T, E].
        alpha: bins for each unit of a logit.
        count: bins below the first.

    Returns:
        int64 [T, E].
    """
    bins = ((logits - logits.amax(1, keepdim=True)) * alpha).ceil().clamp_min(-count)
    return torch.where(logits > -torch.inf, bins, -count - 1).nan_to_num(-count - 1).to(torch.int64)


def take(
    logits: torch.Tensor, bins: torch.Tensor, votes: torch.Tensor, top_k: int, fixed: Sequence[int]
) -> torch.Tensor:
    """Takes each token's experts by bin, votes, logit and number, and orders them by logit.

    Args:
        logits: float32 [T, E]; a row without a finite maximum keeps its own order.
        bins, votes: int64 [T, E].
        top_k: experts of a token.
        fixed: ranks of the token's own experts, by logit, that are taken always.

    Returns:
        int64 [T, top_k].
    """
    order = logits.argsort(dim=1, descending=True, stable=True)
    own = order[:, :top_k]
    bins = bins.scatter(1, own[:, list(fixed)], 1)
    for key in (votes, bins):
        order = order.gather(1, key.gather(1, order).argsort(dim=1, descending=True, stable=True))
    chosen = order[:, :top_k].sort(1).values
    by_logit = logits.gather(1, chosen).argsort(dim=1, descending=True, stable=True)
    return torch.where(logits.amax(1, keepdim=True).isfinite(), chosen.gather(1, by_logit), own)
