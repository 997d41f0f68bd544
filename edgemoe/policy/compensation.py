"""The choice of a token's experts that are computed with their low-rank compensators: the most important ones.

Router-guided low-rank compensation restores the top n experts of each token by gate weight; the others stay as they
are quantized. A compensator belongs to one level: an expert that is computed at another one does without.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgemoe.errors import UserError


@dataclass(frozen=True)
class Compensation:
    """So many experts of each token, the likeliest first.

    >>> gates = torch.tensor([[0.2, 0.5, 0.3]])
    >>> Compensation(1).of_tokens(gates).tolist(), Compensation(1, first=1).of_tokens(gates).tolist()
    ([[False, True, False]], [[False, False, True]])

    Args:
        count: experts of a token, 1 or more.
        first: likelier experts that are left out before them, for a study.

    Raises:
        UserError: no expert.
    """

    count: int
    first: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(
                "1 or more experts of a token for --compensate", f"{self.count}", "choose 1, or leave it out"
            )

    def __str__(self) -> str:
        """The text in tables: "compensate 2", or "compensate only 2" where likelier ones are left out."""
        if not self.first:
            return f"compensate {self.count}"
        last = f" to {self.first + self.count}" if self.count > 1 else ""
        return f"compensate only {self.first + 1}{last}"

    @property
    def option(self) -> str:
        """The option on a command line."""
        return f"--compensate {self.count}"

    @property
    def end(self) -> int:
        """The first place, from 0, after the compensated ones."""
        return self.first + self.count

    def of_tokens(self, gates: torch.Tensor) -> torch.Tensor:
        """Chooses by gate weight, token by token; the first of equals is the likelier.

        Args:
            gates: [T, k], any float dtype.

        Returns:
            bool [T, k].
        """
        place = gates.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return (place >= self.first) & (place < self.end)

    def of_experts(self, importance: torch.Tensor, slots: int) -> torch.Tensor:
        """Chooses by importance to a whole prompt: the share of its experts that `count` is of a token's, rounded up.

        Args:
            importance: float [M], of the experts that the prompt's tokens chose.
            slots: experts of a token.

        Returns:
            bool [M].
        """
        most = len(importance)
        first, end = (-(-most * min(n, slots) // slots) for n in (self.first, self.end))
        chosen = torch.zeros(most, dtype=torch.bool)
        chosen[importance.argsort(descending=True, stable=True)[first:end]] = True
        return chosen
