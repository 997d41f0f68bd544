"""Gated short convolutions of a layer in one call of csrc/short_conv.c."""

from __future__ import annotations

import ctypes

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.structures import DeltaRun, ShortConv

MOST_TAPS = 16
"""Most inputs that a convolution adds up (`MOST_TAPS` in csrc/short_conv.h)."""


class NativeShortConv:
    """The part of a short convolution between its products: c conv(b x) of each row's b, c and x.

    Args:
        weight: [channels, taps], the oldest input's first; taps at most MOST_TAPS.
        bias: [channels], added to the convolution; None: there is none.

    Attributes:
        reads, writes: numbers of a token's row, 3 channels, and of its result.

    Raises:
        ValueError: another number of taps, or of biases.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._channels, self._taps = weight.shape
        if self._taps > MOST_TAPS or (bias is not None and bias.shape != (self._channels,)):
            raise ValueError(
                f"expected at most {MOST_TAPS} taps and a bias for each channel, got {list(weight.shape)}"
            )
        self.reads, self.writes = 3 * self._channels, self._channels
        # These keep the addresses below valid.
        self._weight = weight.detach().float().t().contiguous()
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._structure = ShortConv(
            channels=self._channels,
            taps=self._taps,
            conv=self._weight.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
        )

    @property
    def address(self) -> int:
        """The address of its structure; valid as long as this object."""
        return ctypes.addressof(self._structure)

    def __call__(
        self,
        projected: torch.Tensor,
        before: torch.Tensor | None,
        after: torch.Tensor,
        earlier: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes consecutive tokens of one sequence; a token's bits do not depend on how many a call has.

        Args:
            projected: bf16 [T, reads], contiguous.
            before: the last inputs before the tokens, bf16 [channels, taps]; None: the sequence has no token.
            after: where the last inputs after them are written: the same place, or another.
            earlier: rows of tokens before the call that `before` does not have, bf16 [N, reads]; None: it has all.

        Returns:
            bf16 [T, writes].

        Raises:
            MemoryError: no memory for the call.
            ValueError: sizes of the arguments differ.
        """
        want, given = (self._channels, self._taps), [after if before is None else before, after]
        shapes = {tuple(each.shape) for each in given if each.is_contiguous()}
        if projected.shape[1:] != (self.reads,) or not projected.is_contiguous() or shapes != {want}:
            raise ValueError(f"expected rows of {self.reads} and inputs of {want}, got {shapes}")
        out = projected.new_empty(len(projected), self.writes)
        first = None if before is None else before.data_ptr()
        run = DeltaRun(conv=first, next_conv=after.data_ptr(), tokens=len(projected))
        if earlier is not None:
            run.earlier, run.earlier_count = earlier.data_ptr(), len(earlier)
        result = native.library().edgemoe_short_conv(
            *(native.threads(), self.address, projected.data_ptr(), 1),
            *(ctypes.byref(run), out.data_ptr()),
        )
        if result:
            raise native.failure(result, "a short convolution")
        return out
