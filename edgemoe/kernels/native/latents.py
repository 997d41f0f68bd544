"""The parts of multi-head latent attention around its sums over tokens (csrc/latents.c)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention import StoredAttention
from edgemoe.kernels.native.attention_rows import LayerKV, Received
from edgemoe.kernels.native.norms import form_of
from edgemoe.kernels.native.structures import LatentAttention, LatentRows

HALVES, PAIRS, WIDE_PAIRS, UNROTATED = range(4)
"""Pairs of numbers of a rotary part that are rotated together (csrc/latents.h)."""


_BLOCK, _ROWS_PER_THREAD = 128, 16
"""Rows of a prompt whose queries and sums, in the form of keys, are in memory together: at least so many, and for each
thread so many. A row has several times the numbers there that it has elsewhere."""


class HeadMatrices(NamedTuple):
    """Each head's matrices.

    Attributes:
        keys: bf16 or int8 [heads, latent, key], one head's contiguous.
        values: [heads, value, latent], the same.
        scale: bf16 [heads, key + value], of the columns of int8 keys and the rows of int8 values; None: both are bf16.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scale: torch.Tensor | None


class ProjectedRows(NamedTuple):
    """Consecutive tokens of a sequence, as the products before attention leave them.

    Attributes:
        queries: bf16 [R, heads * (key + rotary)].
        compressed: bf16 [R, latent + rotary].
        cosine, sine: tables of their positions: bf16 [R, rotary]; with WIDE_PAIRS float32 [R, rotary / 2], with
            UNROTATED bf16 [R, 0].
    """

    queries: torch.Tensor
    compressed: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor


class NativeLatents:
    """Turns queries into the form of stored keys, stores keys, attends, and makes values of sums.

    Args:
        matrices: the matrices of every head.
        rotary: numbers of a query and of a key that are rotated.
        norm: weight [latent], as kernels.program.Norm has it, and epsilon of the latents' norm.
        pairing: HALVES, PAIRS, WIDE_PAIRS or UNROTATED.

    Attributes:
        heads: number of heads.
        stored: numbers of a stored key.
        queries: numbers of a token's queries.
        values: numbers of a token's result.
    """

    def __init__(
        self, matrices: HeadMatrices, rotary: int, norm: tuple[torch.Tensor, float], pairing: int
    ) -> None:
        self._kept = matrices, norm[0]  # keeps the addresses below valid
        cols = {WIDE_PAIRS: rotary // 2, UNROTATED: 0}.get(pairing, rotary)
        self._tables = torch.float32 if pairing == WIDE_PAIRS else torch.bfloat16, cols
        keys, values, scale = matrices
        self.heads, latent, key = keys.shape
        value = values.shape[1]
        self.stored, self.queries, self.values = (
            latent + rotary,
            self.heads * (key + rotary),
            self.heads * value,
        )
        self._structure = LatentAttention(
            heads=self.heads,
            key=key,
            value=value,
            latent=latent,
            rotary=rotary,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            key_scale=None if scale is None else scale.data_ptr(),
            value_scale=None if scale is None else scale[:, key:].data_ptr(),
            stride=keys.stride(0),
            scale_stride=key + value,
            norm=norm[0].data_ptr(),
            epsilon=norm[1],
            wide_norm=form_of(norm[0]),
            pairing=pairing,
        )

    @property
    def address(self) -> int:
        """The address of its structure; valid as long as this object."""
        return ctypes.addressof(self._structure)

    def attend(
        self,
        rows: ProjectedRows,
        attention: StoredAttention,
        kv: LayerKV,
        window: int | None,
        received: Received | None = None,
    ) -> torch.Tensor:
        """Stores the keys of consecutive tokens, and attends; a row has the same bits alone and among others.

        Args:
            rows: contiguous tensors.
            attention: sums of keys of `stored` numbers that all heads share.
            kv: keys, written from `past` on.
            window: latest tokens that a row sees, itself included; None: all.
            received: overwritten; None: the attention that tokens receive is not counted.

        Returns:
            bf16 [R, values].

        Raises:
            MemoryError: no memory for the call.
            ValueError: sizes that differ, or that the context has no place for.
        """
        count = self._check(rows, kv, received)
        block = count if received else min(count, max(_BLOCK, _ROWS_PER_THREAD * native.thread_count()))
        as_keys, summed = rows.queries.new_empty(2, block, self.heads * self.stored)
        out = rows.queries.new_empty(count, self.values)
        counted, sums = received.addressed(kv.moved) if received else (0, None)
        inputs, outputs = ([each.data_ptr() for each in part] for part in (rows, (as_keys, summed, out)))
        run = LatentRows(count, window or 0, *inputs, block, *outputs, counted, sums)
        stored = attention.structure(kv, max(kv.past + 1 - window, 0) if window else 0)
        result = native.library().edgemoe_latent_rows(
            native.threads(), self.address, attention.address, ctypes.byref(stored), ctypes.byref(run)
        )
        if result:
            raise native.failure(result, "latent attention")
        return out

    def _check(self, rows: ProjectedRows, kv: LayerKV, received: Received | None) -> int:
        """Refuses what C would read or write past. Returns the number of rows.

        Raises:
            ValueError: naming the sizes.
        """
        (dtype, cols), count = self._tables, len(rows.queries)
        if received:
            received.check(kv.past + count)
        want = [(count, self.queries), (count, self.stored), *[(count, cols)] * 2]
        types = [torch.bfloat16, torch.bfloat16, dtype, dtype]
        if [each.dtype for each in rows] != types or not all(each.is_contiguous() for each in rows):
            raise ValueError(f"expected contiguous rows of {types}, got {[each.dtype for each in rows]}")
        if [tuple(each.shape) for each in rows] != want:
            raise ValueError(f"expected rows of {want}, got {[tuple(each.shape) for each in rows]}")
        return count
