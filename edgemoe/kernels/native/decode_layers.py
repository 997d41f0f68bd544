"""A new token's way through decoder layers: as far as their experts are held, one call of csrc/decode_layers.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention import NativeAttention, TokenKV
from edgemoe.kernels.native.experts import HeldExperts, room_for
from edgemoe.kernels.native.router import NativeRouter

_HIGHEST = 8


class _Linear(ctypes.Structure):
    """`linear` in csrc/decode_layers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "row_scale", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "cols")),
    )


class _Layer(ctypes.Structure):
    """`layer` in csrc/decode_layers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention", "before", "behind")),
        *((name, ctypes.c_float) for name in ("before_epsilon", "behind_epsilon")),
        *((name, _Linear) for name in ("qkv", "out")),
    )


class _MoELayer(ctypes.Structure):
    """`moe_layer` in csrc/decode_layers.c."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            *("up_to_experts", "scratch", "normed"),
            *("router", "logits", "probabilities", "chosen", "shares", "held"),
        )
    )


class _ExpertRoom(ctypes.Structure):
    """`expert_room` in csrc/decode_layers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("up", "down")),
        ("inner", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("together", "rows", "computed")),
    )


_Weights = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class NativeLayer:
    """A decoder layer for one token: norm, attention, residual, norm, and the router of its experts.

    Args:
        attention: of the layer.
        before, behind: weights, bf16 [H], and epsilons of the norms before attention and behind it.
        qkv, out: weight, scale and bias of the projections, as dense.DenseLinear has them.
        router: where routed experts are all that is behind the norms, and those add up to the layer's output.
        held: what is held of its experts; None: nothing ever is.
    """

    def __init__(
        self,
        attention: NativeAttention,
        before: tuple[torch.Tensor, float],
        behind: tuple[torch.Tensor, float],
        qkv: _Weights,
        out: _Weights,
        router: NativeRouter | None,
        held: HeldExperts | None,
    ) -> None:
        self.attention, self.router, self.held = attention, router, held
        self._kept = before, behind, qkv, out  # the structure below has bare addresses of these
        self._layer = _Layer(
            *(attention.address, before[0].data_ptr(), behind[0].data_ptr(), before[1], behind[1]),
            *(_linear(weights) for weights in (qkv, out)),
        )
        self._scratch = qkv[0].new_empty(qkv[0].shape[0] + out[0].shape[1], dtype=torch.bfloat16)
        self.normed = before[0].new_empty(1, before[0].numel())
        """bf16 [1, H], what experts get of the last token that stopped here."""

    def structure(self) -> _MoELayer:
        """Valid as long as this."""
        return _MoELayer(
            *(ctypes.addressof(self._layer), self._scratch.data_ptr(), self.normed.data_ptr()),
            *(self.router.addresses if self.router else [None] * 5),
            self.held.address if self.held else None,
        )


class NativeLayers:
    """Decoder layers one after another.

    Args:
        layers: at least one, all with attention of one shape.
    """

    def __init__(self, layers: Sequence[NativeLayer]) -> None:
        self._layers = layers  # the structures below have bare addresses of what these own
        self._structures = (_MoELayer * len(layers))(*(layer.structure() for layer in layers))
        self._computed = (ctypes.c_int64 * (_HIGHEST + 1))()
        kernels = [layer.held.kernel for layer in layers if layer.held]
        slots = max((layer.router.top_k for layer in layers if layer.router), default=0)
        self._rows = layers[0].normed.new_empty(slots, layers[0].normed.shape[1])
        self._together = room_for(slots)
        sizes = kernels[0].sizes() if kernels else (None, None, 0)
        self._room = _ExpertRoom(
            *sizes,
            *(ctypes.addressof(self._together), self._rows.data_ptr(), ctypes.addressof(self._computed)),
        )

    def run(
        self,
        layers: range,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        past: int,
        first: int,
    ) -> int:
        """Takes a token through layers, as far as their experts are held.

        Args:
            layers: which.
            hidden: bf16, H in all, contiguous; changed in place.
            rotation: as NativeAttention's.
            keys, values: of the first of these layers, as NativeAttention's; the next ones' lie behind them.
            past, first: as NativeAttention's.

        Returns:
            The layer whose experts are still to come, of what is in its `normed`, as its router chose if it has one;
            or the end of `layers`.

        Raises:
            MemoryError: no memory for activations or scores.
            ValueError: as NativeAttention.
        """
        at = self._layers[layers.start]
        cosine, sine = at.attention.checked(rotation)
        kv = TokenKV(keys.data_ptr(), values.data_ptr(), keys.shape[1], past, first)
        through: int = native.library().edgemoe_pass(
            *(native.threads(), ctypes.byref(self._structures, layers.start * ctypes.sizeof(_MoELayer))),
            *(len(layers), ctypes.byref(kv), ctypes.byref(self._room)),
            *(hidden.data_ptr(), cosine.data_ptr(), sine.data_ptr()),
        )
        if through < 0:
            raise MemoryError("no memory for a new token's activations")
        return layers.start + through

    def take_computed(self) -> dict[int, int]:
        """Held experts that were computed since the last call, by level."""
        taken = {level: count for level, count in enumerate(self._computed) if count}
        ctypes.memset(self._computed, 0, ctypes.sizeof(self._computed))
        return taken


def _linear(weights: _Weights) -> _Linear:
    weight, scale, bias = weights
    optional = (None if tensor is None else tensor.data_ptr() for tensor in (scale, bias))
    return _Linear(weight.data_ptr(), *optional, *weight.shape)
