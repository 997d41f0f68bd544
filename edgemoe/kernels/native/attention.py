"""Attention of one token, a call of csrc/attention/decode.c, and of many, one of csrc/attention/prefill.c."""

from __future__ import annotations

import ctypes

import torch

from edgemoe.kernels.native import library as native

MOST_SHARING = 128
"""Heads that may share keys and values (`PANELS` times `LANES`)."""


class _Shape(ctypes.Structure):
    """`attention_shape` in csrc/attention/decode.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        *((name, ctypes.c_int64) for name in ("q_norm_size", "k_norm_size")),
        *((name, ctypes.c_float) for name in ("q_epsilon", "k_epsilon", "scaling")),
    )


class TokenKV(ctypes.Structure):
    """`attention_kv` in csrc/attention/decode.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("context", "past", "first")),
    )


class NativeAttention:
    """Causal grouped-query attention with rotated halves, of the tokens after those in a KV.

    Args:
        heads, kv_heads: of queries, and of keys and values; the one is a multiple of the other.
        dim: of a head, a multiple of 16.
        norms: weights, bf16, and epsilons of the norms of queries and of keys, if they have such; a weight is of
            one head's size or of all heads' together.
        scaling: factor on the scores.

    Raises:
        ValueError: heads of another size, or more than MOST_SHARING to one of keys.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        norms: tuple[tuple[torch.Tensor, float], tuple[torch.Tensor, float]] | None,
        scaling: float,
    ) -> None:
        if dim % 16:
            raise ValueError(f"heads of {dim}: the kernel wants a multiple of 16")
        if heads > MOST_SHARING * kv_heads:
            raise ValueError(f"{heads} heads share {kv_heads}: {MOST_SHARING} may share one")
        self._heads, self._dim = heads, dim
        self._kept = norms  # the structure below has bare addresses of their weights
        (q, q_epsilon), (k, k_epsilon) = norms or ((None, 0.0), (None, 0.0))
        self._shape = _Shape(
            *(heads, kv_heads, dim),
            *(None if weight is None else weight.data_ptr() for weight in (q, k)),
            *(0 if weight is None else weight.numel() for weight in (q, k)),
            *(q_epsilon, k_epsilon, scaling),
        )

    def __call__(
        self,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        past: int,
        window: int | None,
    ) -> torch.Tensor:
        """Norms, rotates, writes keys and values into the KV, attends.

        What a token gets does not depend on which others come, if they are two or more and all is finite.

        Args:
            qkv: bf16 [R, (heads + 2 * kv_heads) * dim], contiguous; what the three projections gave. Overwritten.
            rotation: cosine and sine for each token's position, bf16 [R, dim] each, contiguous.
            keys, values: the layer's, bf16 [kv_heads, context, dim], contiguous; written from `past` on.
            past: tokens that are valid in them.
            window: how many of the latest tokens each sees, itself included; None: all.

        Returns:
            bf16 [R, heads * dim].

        Raises:
            MemoryError: no memory for scores.
            ValueError: a rotation of another size, as of a config that rotates a part of each head.
        """
        rows = len(qkv)
        for table in rotation:
            if table.shape != (rows, self._dim) or not table.is_contiguous():
                raise ValueError(
                    f"a rotation of {tuple(table.shape)}: wanted {rows} rows, and heads have {self._dim}"
                )
        out = qkv.new_empty(rows, self._heads * self._dim)
        kv = TokenKV(keys.data_ptr(), values.data_ptr(), keys.shape[1], past, first_seen(past, window))
        common = native.threads(), ctypes.byref(self._shape), ctypes.byref(kv)
        addresses = [tensor.data_ptr() for tensor in (qkv, *rotation, out)]
        library = native.library()
        if (
            library.edgemoe_attention_rows(*common, rows, window or 0, *addresses)
            if rows > 1
            else library.edgemoe_attention(*common, *addresses)
        ):
            raise MemoryError("no memory for attention's scores")
        return out

    @property
    def address(self) -> int:
        """Of the structure that describes it; valid as long as this."""
        return ctypes.addressof(self._shape)

    def checked(self, rotation: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotation, if it turns whole heads.

        Raises:
            ValueError: it does not, as of a config that rotates a part of each head.
        """
        if rotation[0].numel() != self._dim:
            raise ValueError(f"a rotation of {rotation[0].numel()} numbers: heads have {self._dim}")
        return rotation


def first_seen(past: int, window: int | None) -> int:
    """The first token that one behind `past` others sees."""
    return max(past + 1 - window, 0) if window else 0
