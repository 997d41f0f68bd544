"""Logits to perplexity, KL and top-1 agreement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

BLOCK_ROWS = 64
"""Rows of float32 log-probabilities in memory at once."""


@dataclass(frozen=True)
class Quality:
    """Quality over the predicted tokens of some windows.

    Args:
        tokens: predicted tokens: all of a window but its first.
        perplexity: exp of the mean negative log-likelihood of `tokens`.
        kl: mean KL(reference || setting) per token, in nats; None without a reference.
        kl_stderr: standard error of `kl`, tokens taken as independent; None without a reference or for one token.
        top1_agreement: fraction of tokens with the same most likely token in both; None without a reference.
    """

    tokens: int
    perplexity: float
    kl: float | None
    kl_stderr: float | None
    top1_agreement: float | None


def kl_of(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """KL of the reference's next-token distributions from ours, in nats, float64 [n].

    Args:
        ours, theirs: log probabilities, float32 [n, vocab].
    """
    return (theirs.exp() * (theirs - ours)).sum(-1).double()


class QualityMeter:
    """Sums over windows. Either every window comes with the reference's logits, or none does."""

    def __init__(self) -> None:
        self._tokens = self._compared = self._agreed = 0
        self._nll = self._kl = self._kl_squared = 0.0

    def add(self, logits: torch.Tensor, tokens: Sequence[int], reference: torch.Tensor | None = None) -> None:
        """Adds one window.

        Args:
            logits: float [n, vocab]; row i predicts token i + 1, so the last row is not used.
            tokens: the window's n token ids.
            reference: float or bf16 [n, vocab], the reference's logits of the same window.
        """
        predicted = len(tokens) - 1
        for start in range(0, predicted, BLOCK_ROWS):
            rows = slice(start, min(start + BLOCK_ROWS, predicted))
            ours = logits[rows].float().log_softmax(-1)
            following = torch.tensor(tokens[rows.start + 1 : rows.stop + 1]).unsqueeze(1)
            self._nll -= float(ours.gather(1, following).double().sum())
            if reference is not None:
                self._compare(ours, reference[rows].float().log_softmax(-1))
        self._tokens += predicted

    def _compare(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        kl = kl_of(ours, theirs)
        self._kl += float(kl.sum())
        self._kl_squared += float(kl.square().sum())
        self._agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self._compared += len(ours)

    def quality(self) -> Quality:
        """Returns the quality over all windows added: at least one predicted token."""
        perplexity, count = math.exp(self._nll / self._tokens), self._compared
        if not count:
            return Quality(self._tokens, perplexity, None, None, None)
        kl, agreement, stderr = self._kl / count, self._agreed / count, None
        if count > 1:
            variance = max(self._kl_squared - self._kl**2 / count, 0.0) / (count - 1)
            stderr = math.sqrt(variance / count)
        return Quality(self._tokens, perplexity, kl, stderr, agreement)
