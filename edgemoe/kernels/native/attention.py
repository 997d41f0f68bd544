"""Grouped-query attention of one token (csrc/attention/decode.c) and of several (csrc/attention/prefill.c)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.structures import AttentionKV, AttentionShape
from edgemoe.kv.formats import KINDS, KVFormat
from edgemoe.kv.rows import row_of

MOST_SHARING = 128
"""Query heads that may share a head of keys and values (`PANELS` times `LANES` in csrc/attention/prefill.c)."""

MOST_DIM = 1024
"""Largest size of a head (`KV_MOST_DIM` in csrc/attention/kv_rows.h)."""

_BF16 = KVFormat()


def kernel_fits(heads: int, kv_heads: int, dim: int, clip: float | None) -> bool:
    """Whether there is a compiled kernel, and it computes attention of these sizes.

    Args:
        heads, kv_heads: numbers of heads of queries, and of keys and values.
        dim: size of a head.
        clip: largest magnitude of projected numbers; None: they are not clipped.
    """
    sizes = dim % 16 == 0 and dim <= MOST_DIM and heads <= MOST_SHARING * kv_heads
    return native.available() and sizes and clip is None


class LayerKV(NamedTuple):
    """One layer's keys and values of a sequence.

    Attributes:
        keys, values: [kv_heads, context, W] of kv.rows.row_of, contiguous.
        past: Valid tokens in them.
        form: Format of keys and values.
    """

    keys: torch.Tensor
    values: torch.Tensor
    past: int
    form: KVFormat = _BF16


class Received(NamedTuple):
    """Attention that the tokens of a sequence receive from rows of a call: the sum of the mean over heads.

    Attributes:
        sums: float32 [past + R], contiguous; overwritten.
        first: row of the call from which on attention counts.
    """

    sums: torch.Tensor
    first: int


class NativeAttention:
    """Causal grouped-query attention with half-rotated positions, over a preallocated KV.

    Args:
        heads, kv_heads: numbers of heads of queries, and of keys and values; heads is a multiple of kv_heads.
        dim: size of a head, a multiple of 16, at most MOST_DIM.
        norms: weight, bf16, and epsilon of the queries' norm and of the keys' norm; None: no norms. A weight has the
            size of one head or of all heads together.
        scaling: factor on the scores.

    Raises:
        ValueError: another head size, or more than MOST_SHARING query heads for a head of keys.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        norms: tuple[tuple[torch.Tensor, float], tuple[torch.Tensor, float]] | None,
        scaling: float,
    ) -> None:
        if dim % 16 or dim > MOST_DIM:
            raise ValueError(f"expected heads of a multiple of 16, at most {MOST_DIM}, got {dim}")
        if heads > MOST_SHARING * kv_heads:
            raise ValueError(
                f"expected at most {MOST_SHARING} heads for one of keys, got {heads} for {kv_heads}"
            )
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self._norms = norms  # keeps the addresses below valid
        shape = self._shape = AttentionShape(heads=heads, kv_heads=kv_heads, dim=dim, scaling=scaling)
        if norms:
            (q, shape.q_epsilon), (k, shape.k_epsilon) = norms
            shape.q_norm, shape.q_norm_size = q.data_ptr(), q.numel()
            shape.k_norm, shape.k_norm_size = k.data_ptr(), k.numel()

    def __call__(
        self,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        kv: LayerKV,
        window: int | None,
        received: Received | None = None,
    ) -> torch.Tensor:
        """Norms and rotates queries and keys, writes keys and values into the KV, attends.

        A row has the same bits alone as among others, where all that is stored in its block of 64 places is finite.

        Args:
            qkv: bf16 [R, (heads + 2 * kv_heads) * dim], contiguous: the three projections' results. Overwritten.
            rotation: Cosine and sine of each row's position, bf16 [R, dim] each, contiguous.
            kv: Keys and values, written from `past` on.
            window: Latest tokens that a row sees, itself included; None: all.
            received: Overwritten; None: the attention that tokens receive is not counted.

        Returns:
            bf16 [R, heads * dim].

        Raises:
            MemoryError: no memory for a block of keys and values.
            ValueError: sizes that do not go with this attention's, with the context or with each other.
        """
        self._check(qkv, rotation, kv.past, received)
        rows, library = len(qkv), native.library()
        out = qkv.new_empty(rows, self.heads * self.dim)
        stored = self.structure(kv, max(kv.past + 1 - window, 0) if window else 0)
        common = native.threads(), self.address, ctypes.byref(stored)
        addresses = [tensor.data_ptr() for tensor in (qkv, *rotation, out)]
        if rows > 1 or received:
            counts = (received.first, received.sums.data_ptr()) if received else (0, None)
            result = library.edgemoe_attention_rows(*common, rows, window or 0, *addresses, *counts)
        else:
            result = library.edgemoe_attention(*common, 1, *addresses)
        if result:
            raise native.failure(result, "attention's blocks")
        return out

    def _check(
        self,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        past: int,
        received: Received | None,
    ) -> None:
        """Refuses what C would read past: other projections, a rotation of a part of each head, sums of other tokens.

        Raises:
            ValueError: naming both sizes.
        """
        rows = len(qkv)
        if qkv.shape[1] != (self.heads + 2 * self.kv_heads) * self.dim:
            raise ValueError(
                f"expected rows of {self.heads} heads of {self.dim} and {self.kv_heads} of keys, got {qkv.shape[1]}"
            )
        for table in rotation:
            if table.shape != (rows, self.dim) or not table.is_contiguous():
                raise ValueError(f"expected a rotation of {(rows, self.dim)}, got {tuple(table.shape)}")
        if received and received.sums.shape != (past + rows,):
            raise ValueError(f"expected sums of {past + rows} tokens, got {tuple(received.sums.shape)}")

    def structure(self, kv: LayerKV, first: int = 0) -> AttentionKV:
        """Returns the structure of one layer's KV, which the tensors must outlive.

        Args:
            kv: Keys and values.
            first: Token that a single row's attention begins with.

        Raises:
            ValueError: other heads than this attention's, or rows of another format.
        """
        keys, values, past, form = kv
        for tensor, kind in ((keys, form.keys), (values, form.values)):
            dtype, width = row_of(kind, self.dim)
            if tensor.dtype != dtype or tensor.shape != (self.kv_heads, keys.shape[1], width):
                raise ValueError(
                    f"expected keys and values of {self.kv_heads} heads of {self.dim} in {form}, "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )
        return AttentionKV(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            context=keys.shape[1],
            past=past,
            first=first,
            key_format=KINDS.index(form.keys),
            value_format=KINDS.index(form.values),
            rotation=form.rotation(self.dim),
        )

    @property
    def address(self) -> int:
        """The address of its structure; valid as long as this object."""
        return ctypes.addressof(self._shape)
