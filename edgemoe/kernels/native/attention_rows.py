"""Parameters of attention: the keys and values it reads, sums of attention it makes, and how values are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from edgemoe.kv.formats import KVFormat

_BF16 = KVFormat()


class LayerKV(NamedTuple):
    """One layer's keys and values of a sequence.

    Attributes:
        keys, values: [kv_heads, context, W] of kv.rows.row_of, contiguous.
        past, form: Valid tokens before the next row, and the format of keys and values.
        latent: leading numbers of a key that are its value, where `values` are the keys; 0: values are their own.
        moved: difference between a token's number and its row; the tokens before it have no row, and are not seen.
    """

    keys: torch.Tensor
    values: torch.Tensor
    past: int
    form: KVFormat = _BF16
    latent: int = 0
    moved: int = 0


@dataclass(frozen=True, eq=False)
class ValueForm:
    """How an attention makes values of its projections, where they are not keys' twins.

    Args:
        dim: numbers of a value, at most the size of a head; the KV has zeros after them.
        norm: weight and epsilon of a norm of each value; a weight has `dim` numbers, of the type of the other norms'.
        scale: factor of the values, which are then rounded to bf16; 0: none.
        are_keys: whether no values are projected: they are the projected keys, before their norm and rotation.
    """

    dim: int
    norm: tuple[torch.Tensor, float] | None = None
    scale: float = 0.0
    are_keys: bool = False


class Received(NamedTuple):
    """Attention that the tokens of a sequence receive from rows of a call: the sum of the mean over heads.

    Attributes:
        sums: float32 [past + R], contiguous; overwritten.
        first: row of the call from which on attention counts.
    """

    sums: torch.Tensor
    first: int

    def check(self, tokens: int) -> None:
        """Refuses sums of another number of tokens.

        Raises:
            ValueError: naming both numbers.
        """
        if self.sums.shape != (tokens,):
            raise ValueError(f"expected sums of {tokens} tokens, got {tuple(self.sums.shape)}")

    def addressed(self, moved: int) -> tuple[int, int]:
        """The first row, and the address of the sums after tokens that have no rows."""
        self.sums[:moved] = 0
        return self.first, self.sums[moved:].data_ptr()
