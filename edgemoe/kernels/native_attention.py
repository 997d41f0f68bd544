"""A new token's attention, and its whole way up to a layer's experts, each a call of avx2/attention.c."""

from __future__ import annotations

import ctypes

import torch

from edgemoe.kernels import native


class _Shape(ctypes.Structure):
    """`attention_shape` in avx2/attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")),
        *((name, ctypes.c_int64) for name in ("q_norm_size", "k_norm_size")),
        *((name, ctypes.c_float) for name in ("q_epsilon", "k_epsilon", "scaling")),
    )


class _KV(ctypes.Structure):
    """`attention_kv` in avx2/attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("context", "past", "first")),
    )


class _Linear(ctypes.Structure):
    """`linear` in avx2/attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "row_scale", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "cols")),
    )


class _Layer(ctypes.Structure):
    """`layer` in avx2/attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention", "before", "behind")),
        *((name, ctypes.c_float) for name in ("before_epsilon", "behind_epsilon")),
        *((name, _Linear) for name in ("qkv", "out")),
    )


_Weights = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class NativeAttention:
    """Causal grouped-query attention with rotated halves, of one token after those in a KV.

    Args:
        heads, kv_heads: of queries, and of keys and values; the one is a multiple of the other.
        dim: of a head, a multiple of 16.
        norms: weights, bf16, and epsilons of the norms of queries and of keys, if they have such; a weight is of
            one head's size or of all heads' together.
        scaling: factor on the scores.

    Raises:
        ValueError: heads of another size.
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
        first: int,
    ) -> torch.Tensor:
        """Norms, rotates, writes key and value into the KV, attends.

        Args:
            qkv: bf16 [(heads + 2 * kv_heads) * dim], contiguous; what the three projections gave. Overwritten.
            rotation: cosine and sine for the token's position, bf16, dim in all each, contiguous.
            keys, values: the layer's, bf16 [kv_heads, context, dim], contiguous; written at `past`.
            past: tokens that are valid in them.
            first: the first of them that this token sees.

        Returns:
            bf16 [heads * dim].

        Raises:
            MemoryError: no memory for scores.
            ValueError: a rotation of another size, as of a config that rotates a part of each head.
        """
        cosine, sine = self.checked(rotation)
        out = qkv.new_empty(self._heads * self._dim)
        kv = _KV(keys.data_ptr(), values.data_ptr(), keys.shape[1], past, first)
        if native.library().edgemoe_attention(
            *(native.threads(), ctypes.byref(self._shape), ctypes.byref(kv), qkv.data_ptr()),
            *(cosine.data_ptr(), sine.data_ptr(), out.data_ptr()),
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


class NativeLayer:
    """A decoder layer up to its experts, for one token: norm, attention, residual, norm.

    Args:
        attention: of the layer.
        before, behind: weights, bf16 [H], and epsilons of the norms before attention and behind it.
        qkv, out: weight, scale and bias of the projections, as dense.DenseLinear has them.
    """

    def __init__(
        self,
        attention: NativeAttention,
        before: tuple[torch.Tensor, float],
        behind: tuple[torch.Tensor, float],
        qkv: _Weights,
        out: _Weights,
    ) -> None:
        self._attention = attention
        self._kept = before, behind, qkv, out  # the structure below has bare addresses of these
        self._scratch = qkv[0].new_empty(qkv[0].shape[0] + out[0].shape[1], dtype=torch.bfloat16)
        self._normed = before[0].new_empty(1, before[0].numel())
        self._results = self._scratch.data_ptr(), self._normed.data_ptr()
        self._layer = _Layer(
            *(attention.address, before[0].data_ptr(), behind[0].data_ptr(), before[1], behind[1]),
            *(_linear(weights) for weights in (qkv, out)),
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        past: int,
        first: int,
    ) -> torch.Tensor:
        """What experts get of a token.

        Args:
            hidden: bf16, H in all, contiguous. Attention's output is added to it.
            rotation, keys, values, past, first: as NativeAttention's.

        Returns:
            bf16 [1, H], valid until the next call.

        Raises:
            MemoryError: no memory for activations or scores.
            ValueError: as NativeAttention.
        """
        cosine, sine = self._attention.checked(rotation)
        kv = _KV(keys.data_ptr(), values.data_ptr(), keys.shape[1], past, first)
        if native.library().edgemoe_up_to_experts(
            *(native.threads(), ctypes.byref(self._layer), ctypes.byref(kv), hidden.data_ptr()),
            *(cosine.data_ptr(), sine.data_ptr(), *self._results),
        ):
            raise MemoryError("no memory for a new token's activations")
        return self._normed


def _linear(weights: _Weights) -> _Linear:
    weight, scale, bias = weights
    optional = (None if tensor is None else tensor.data_ptr() for tensor in (scale, bias))
    return _Linear(weight.data_ptr(), *optional, *weight.shape)
