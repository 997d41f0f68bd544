"""The rotations of new tokens' positions, as lists of operations take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from edgemoe.families.base import FusedGQA
from edgemoe.layers.decoder_parts import outer_parts
from edgemoe.layers.gqa import of_both_halves

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each token's position, [1, rows, rotated] each."""


class LayerRotation(NamedTuple):
    """How a layer rotates queries and keys.

    Attributes:
        number: index of its rotation in the list of the step's rotations.
        rotated: leading numbers of each head that are rotated.
    """

    number: int
    rotated: int


class Rotations:
    """Makes the rotations of a model's steps: one for each kind of its layers, and one of no numbers.

    Args:
        model: transformers' model.
        traits: the traits of its family.
    """

    def __init__(self, model: Any, traits: FusedGQA) -> None:
        self._rotary, config = outer_parts(model).positions, model.config
        self._kinds: list[str] = sorted(getattr(self._rotary, "layer_types", ()))
        names = [f"{kind}_inv_freq" for kind in self._kinds] or ["inv_freq"]
        frequencies = [] if self._rotary is None else [getattr(self._rotary, name) for name in names]
        self._numbers = [2 * each.numel() for each in frequencies]
        """Numbers of a head that each rotation but the last one rotates."""
        layers = range(config.num_hidden_layers)
        of_layer = [self._kinds.index(config.layer_types[i]) if self._kinds else 0 for i in layers]
        rotates = traits.rotates(config) if traits.rotates else [True for _ in layers]
        self.layers = [
            LayerRotation(index, self._numbers[index])
            if rotates[i] and self._numbers
            else LayerRotation(len(self._numbers), 0)
            for i, index in enumerate(of_layer)
        ]
        """How each layer rotates."""

    def of(self, hidden: torch.Tensor, positions: Sequence[int]) -> list[Rotation]:
        """The rotations of a step's tokens.

        Args:
            hidden: bf16 [1, rows, H], for its type.
            positions: the position of each token.
        """
        none = hidden[..., :0].contiguous()
        if self._rotary is None:
            return [(none, none)]
        at = torch.tensor([positions])
        kinds = self._kinds
        found = [self._rotary(hidden, at, kind) for kind in kinds] if kinds else [self._rotary(hidden, at)]
        rotations = [
            each if each[0].shape[-1] == numbers else of_both_halves(each, numbers)
            for each, numbers in zip(found, self._numbers, strict=True)
        ]
        return [*rotations, (none, none)]
