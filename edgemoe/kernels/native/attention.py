"""Grouped-query attention of one token (csrc/attention/decode.c) and of several (csrc/attention/prefill.c)."""

from __future__ import annotations

import ctypes

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention_rows import LayerKV, Received, ValueForm
from edgemoe.kernels.native.norms import form_of
from edgemoe.kernels.native.rotation import ROTATE_HALVES, check_tables
from edgemoe.kernels.native.structures import AttentionKV, AttentionShape
from edgemoe.kv.formats import KINDS
from edgemoe.kv.rows import row_of

MOST_SHARING = 128
"""Query heads that may share a head of keys and values (`PANELS` times `LANES` in csrc/attention/prefill.c)."""

MOST_DIM = 1024
"""Largest size of a head (`KV_MOST_DIM` in csrc/attention/kv_rows.h)."""


def kernel_fits(heads: int, kv_heads: int, dim: int) -> bool:
    """Whether there is a compiled kernel for so many heads of queries, and of keys and values, of size `dim`."""
    return native.available() and dim % 16 == 0 and dim <= MOST_DIM and heads <= MOST_SHARING * kv_heads


def _address_of(ahead: torch.Tensor | None, rows: int) -> int | None:
    """The address of the counts of tokens that rows see after them; None: they see none.

    Raises:
        ValueError: another dtype, or another number of rows.
    """
    if ahead is None:
        return None
    if ahead.dtype != torch.int32 or ahead.shape != (rows,):
        raise ValueError(
            f"expected {rows} int32 counts of tokens ahead, got {ahead.dtype} {list(ahead.shape)}"
        )
    return ahead.data_ptr()


class _Attention:
    """Causal grouped-query attention over a preallocated KV.

    Args:
        heads, kv_heads: numbers of heads of queries, and of keys and values; heads is a multiple of kv_heads.
        dim: size of a head, a multiple of 16, at most MOST_DIM.
        scaling: factor on the scores.

    Raises:
        ValueError: another head size, or more than MOST_SHARING query heads for a head of keys.
    """

    def __init__(
        self, heads: int, kv_heads: int, dim: int, scaling: float, sinks: torch.Tensor | None = None
    ) -> None:
        if dim % 16 or dim > MOST_DIM:
            raise ValueError(f"expected heads of a multiple of 16, at most {MOST_DIM}, got {dim}")
        if heads > (most := MOST_SHARING * kv_heads):
            raise ValueError(f"expected at most {most} heads for {kv_heads} heads of keys, got {heads}")
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.value_dim = dim
        """Numbers of a head's result."""
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "rotated": dim, "value_dim": dim}
        self._shape = AttentionShape(**sizes, scaling=scaling)
        if sinks is not None:
            if sinks.shape != (heads,):
                raise ValueError(f"expected {heads} sinks, got {list(sinks.shape)}")
            self._sinks = sinks.detach().float().contiguous()  # keeps the address valid
            self._shape.sinks = self._sinks.data_ptr()

    def _attend(
        self,
        rows: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        kv: LayerKV,
        window: int | None,
        received: Received | None,
        ahead: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Calls the kernel for consecutive tokens.

        Args:
            rows: bf16 [R, N], contiguous: what the kernel reads of each token.
            rotation: Cosine and sine of each row's position, [R, rotated] each; None: the queries are rotated already.
            kv: Keys and values of earlier tokens. Where rotation is None it also has these tokens' own.
            window: Latest tokens that a row sees, itself included; None: all.
            received: Overwritten with the attention that tokens receive; None: it is not counted.
            ahead: int32 [R], how many of the tokens after it a row sees too; their ends ascend. None: none.

        Returns:
            bf16 [R, heads * value_dim]. NativeAttention.__call__ lists the errors.
        """
        count, library, seen = len(rows), native.library(), _address_of(ahead, len(rows))
        if received:
            received.check(kv.past + count)
        out = rows.new_empty(count, self.heads * self.value_dim)
        stored = self.structure(kv, max(kv.past + 1 - window, 0) if window else 0)
        common = native.threads(), self.address, ctypes.byref(stored)
        tables = map(torch.Tensor.data_ptr, rotation) if rotation else (None, None)
        addresses = rows.data_ptr(), *tables, out.data_ptr()
        if count == 1 and not received:
            result = library.edgemoe_attention(*common, 1, *addresses)
        else:
            counts = received.addressed(kv.moved) if received else (0, None)
            result = library.edgemoe_attention_rows(*common, count, window or 0, seen, *addresses, *counts)
        if result:
            raise native.failure(result, "attention's blocks")
        return out

    @property
    def reads(self) -> int:
        """Numbers of a row that it reads: projected queries, keys and values, or finished queries."""
        value = 0 if self._shape.values_are_keys else self.value_dim
        return self.heads * self.dim + (0 if self._shape.prepared else self.kv_heads * (self.dim + value))

    def structure(self, kv: LayerKV, first: int = 0) -> AttentionKV:
        """Returns the structure of one layer's KV, which the tensors must outlive.

        Args:
            kv: Keys and values.
            first: Token that a single row's attention begins with.

        Raises:
            ValueError: other heads than this attention's, or rows of another format.
        """
        keys, values, past, form, latent, moved = kv
        for tensor, kind in ((keys, form.keys), (values, form.keys if latent else form.values)):
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
            past=past - moved,
            first=max(first - moved, 0),
            key_format=KINDS.index(form.keys),
            value_format=KINDS.index(form.keys if latent else form.values),
            rotation=form.rotation(self.dim, latent or self.dim),
        )

    @property
    def address(self) -> int:
        """The address of its structure; valid as long as this object."""
        return ctypes.addressof(self._shape)


class NativeAttention(_Attention):
    """Attention with rotated positions, of projected queries, keys and values.

    Args:
        heads, kv_heads: numbers of heads of queries, and of keys and values; heads is a multiple of kv_heads.
        dim: size of a head, a multiple of 16, at most MOST_DIM.
        scaling: factor on the scores.
        norms: weight and epsilon of the queries' norm and of the keys' norm; None: no norms. A weight has the size of
            one head or of all heads together; both are bf16, or both float32 (kernels.program.Norm).
        clip: largest magnitude of queries, keys and values after their norms; None: any.
        rotated: leading numbers of a head that are rotated by its position, an even number; None: all.
        sinks: [heads], one more score in each head's softmax, without a value; None: none.
        values: how values are made; None: they are projected, as long as keys.
        pairing: how numbers are rotated (native.rotation).
        norms_last: whether the norms come after the rotation.
        queries_alone: whether keys are not rotated.

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
        clip: float | None = None,
        *,
        rotated: int | None = None,
        sinks: torch.Tensor | None = None,
        values: ValueForm | None = None,
        pairing: int = ROTATE_HALVES,
        norms_last: bool = False,
        queries_alone: bool = False,
    ) -> None:
        super().__init__(heads, kv_heads, dim, scaling, sinks)
        self._shape.pairing, self._shape.norms_last = pairing, norms_last
        self._shape.queries_alone = queries_alone
        self.rotated = self._shape.rotated = dim if rotated is None else rotated
        self._norms = norms  # keeps the addresses below valid
        self._shape.clip = clip or 0
        if norms:
            shape = self._shape
            (q, shape.q_epsilon), (k, shape.k_epsilon) = norms
            shape.q_norm, shape.q_norm_size = q.data_ptr(), q.numel()
            shape.k_norm, shape.k_norm_size = k.data_ptr(), k.numel()
            shape.wide_norms = form_of(q)
        if values:
            self.value_dim = self._shape.value_dim = values.dim
            self._shape.v_scale, self._shape.values_are_keys = values.scale, values.are_keys
            self._values = values  # keeps the address below valid
            if values.norm:
                weight, self._shape.v_epsilon = values.norm
                self._shape.v_norm = weight.data_ptr()

    def __call__(
        self,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        kv: LayerKV,
        window: int | None,
        received: Received | None = None,
        ahead: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norms, clips and rotates queries and keys, writes keys and values into the KV, attends.

        A row has the same bits alone as among others, where all that is stored in its block of 64 places is finite.

        Args:
            qkv: bf16 [R, reads], contiguous: the three projections' results. Overwritten.
            rotation: Cosine and sine of each row's position, [R, rotated] each, contiguous (native.rotation).
            kv: Keys and values, written from `past` on.
            window: Latest tokens that a row sees, itself included; None: all.
            received: Overwritten; None: the attention that tokens receive is not counted.
            ahead: int32 [R], how many of the tokens after it a row sees too; their ends ascend. None: none.

        Returns:
            bf16 [R, heads * value_dim].

        Raises:
            MemoryError: no memory for a block of keys and values.
            ValueError: sizes that do not go with this attention's, with the context or with each other.
        """
        if qkv.shape[1] != self.reads:
            raise ValueError(
                f"expected rows of {self.heads} heads of {self.dim} and {self.kv_heads} of keys, got {qkv.shape[1]}"
            )
        check_tables(rotation, len(qkv), self.rotated, self._shape.pairing)
        return self._attend(qkv, rotation, kv, window, received, ahead)


class StoredAttention(_Attention):
    """Attention of queries to keys and values that the KV has already, including the queries' own tokens.

    Args:
        heads, kv_heads: numbers of heads of queries, and of keys and values; heads is a multiple of kv_heads.
        dim: size of a head, a multiple of 16, at most MOST_DIM.
        scaling: factor on the scores.
        sinks: [heads], one more score in each head's softmax, without a value; None: none.

    Raises:
        ValueError: another head size, or more than MOST_SHARING query heads for a head of keys.
    """

    def __init__(
        self, heads: int, kv_heads: int, dim: int, scaling: float, sinks: torch.Tensor | None = None
    ) -> None:
        super().__init__(heads, kv_heads, dim, scaling, sinks)
        self._shape.prepared = True

    def __call__(
        self, queries: torch.Tensor, kv: LayerKV, window: int | None, received: Received | None = None
    ) -> torch.Tensor:
        """Attends.

        A row has the same bits alone as among others, where all that is stored in its block of 64 places is finite.

        Args:
            queries: bf16 [heads, R, dim], of the tokens from `kv.past` on, rotated by their positions.
            kv: Keys and values of earlier tokens and of these.
            window: Latest tokens that a row sees, itself included; None: all.
            received: Overwritten; None: the attention that tokens receive is not counted.

        Returns:
            bf16 [heads, R, dim].

        Raises:
            MemoryError: no memory for a block of keys and values.
            ValueError: sizes that do not go with this attention's, with the context or with each other.
        """
        heads, rows, dim = queries.shape
        if (heads, dim) != (self.heads, self.dim):
            raise ValueError(f"expected {self.heads} heads of {self.dim}, got {heads} of {dim}")
        by_token = queries.transpose(0, 1).reshape(rows, -1).contiguous()
        return self._attend(by_token, None, kv, window, received).view(rows, heads, dim).transpose(0, 1)
