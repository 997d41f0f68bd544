"""The rotations of new tokens' positions, as lists of operations take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from edgemoe.layers.decoder_parts import outer_parts, rotated_numbers
from edgemoe.layers.gqa import of_both_halves

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token's position, [1, rows, rotated] each."""


class Rotations:
    """Makes the rotations of a model's steps.

    Args:
        model: transformers' model; one without a rotary embedding has rotations of no numbers.
    """

    def __init__(self, model: Any) -> None:
        self._rotary, self._cols = outer_parts(model).positions, rotated_numbers(model)

    def of(self, hidden: torch.Tensor, positions: Sequence[int]) -> list[Rotation]:
        """The rotations of a step's tokens.

        Args:
            hidden: bf16 [1, rows, H], for its type.
            positions: the position of each token.
        """
        if self._rotary is None:
            return [(hidden[..., :0].contiguous(), hidden[..., :0].contiguous())]
        found = self._rotary(hidden, torch.tensor([positions]))
        return [found if found[0].shape[-1] == self._cols else of_both_halves(found, self._cols)]
