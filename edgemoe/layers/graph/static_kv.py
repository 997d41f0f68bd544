"""The state of a step in captured launches: numbers in the device's memory say where keys and values are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from edgemoe.errors import ModelRefused
from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.shape import KVShape
from edgemoe.kv.step import Segment, Step, StepKV


class StaticSequence:
    """Stands in for the sequence of a captured token, whose numbers the host does not know.

    Args:
        states: the states that the captured layers read and write; None: there are none.

    Attributes:
        length: a number above 0, since a token of a sequence without tokens has zeros for its states.
    """

    def __init__(self, states: LinearStates | None) -> None:
        self.states, self.length = states, 1

    def require(self, tokens: int) -> None:
        """Does nothing: the host makes room for a token before its launch."""


class StaticKV(StepKV):
    """StepKV for one token whose launches are captured.

    `update` and `attend` launch kernels that find the token's position and its sequence's keys and values in `state`.

    Args:
        shape: the shape of every sequence's KV, without an index.
        state: int64, as kernels.triton.attention.STATE.
        states: the states that the captured layers read and write; None: there are none.
    """

    def __init__(self, shape: KVShape, state: torch.Tensor, states: LinearStates | None) -> None:
        sequence: Any = StaticSequence(states)
        super().__init__(Step((Segment(sequence, (0,)),)))
        self._state = state
        self._shapes = {layer: part for part in shape.parts for layer in part.layers}
        self._new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of the layers whose attention has not been launched yet."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the token's keys and values [1, heads, 1, D], which `attend` stores; returns them unchanged."""
        self._new[layer_idx] = key_states, value_states
        return key_states, value_states

    def attend(
        self, module: Any, query: torch.Tensor, how: tuple[float, int | None, torch.Tensor | None]
    ) -> torch.Tensor:
        """Launches the KV's new entry of a layer and the attention to all entries.

        Args:
            module: the layer's attention module.
            query: bf16 [1, heads, 1, D].
            how: factor of the scores, window and sinks, as in layers.attention.

        Returns:
            bf16 [1, 1, heads, V].

        Raises:
            ModelRefused: the layer has no keys and values of its own.
        """
        layer = module.layer_idx
        if layer not in self._new or layer not in self._shapes:
            raise ModelRefused("keys and values in each layer with attention", f"none in layer {layer}", "")
        (keys, values), shape, (_, window, _) = self._new.pop(layer), self._shapes[layer], how
        if shape.window and (not window or window > shape.window):
            raise ModelRefused(f"a window of {shape.window} tokens", f"one of {window or 'all'}", "")
        if shape.latent:
            return self._latents(module, query[0, :, 0], keys, values, how)
        own = values.shape[-1]
        values = F.pad(values, (0, shape.value_dim - own))
        return self._attended(layer, query[0], keys, values, how)[None, None, :, :own]

    def _latents(
        self,
        module: Any,
        query: torch.Tensor,
        latent: torch.Tensor,
        rotary: torch.Tensor,
        how: tuple[float, int | None, torch.Tensor | None],
    ) -> torch.Tensor:
        """Launches the store and the attention of a layer with latents.

        Args:
            module: the layer's attention module, with kv_b_proj.
            query: bf16 [heads, key + rotary].
            latent, rotary: bf16 [1, 1, 1, latent] and [1, 1, 1, rotary] of the token.
            how: factor of the scores, window and sinks, which are None.

        Returns:
            bf16 [1, 1, heads, value].
        """
        from edgemoe.kernels.triton.latents import LatentRowAttention

        linear, key, (scaling, window, _) = module.kv_b_proj, module.qk_nope_head_dim, how
        sizes, layer = (len(query), key, query.shape[1] - key), module.layer_idx
        attention = LatentRowAttention(
            *(linear.weight.data, linear.scale, *sizes, scaling, layer, window or 0),
            form=self._shapes[layer].format,
        )
        attention.store(latent.reshape(-1), rotary.reshape(-1), self._state)
        scratch = torch.empty(attention.scratch_size, device=query.device)
        out = query.new_empty(len(query), module.v_head_dim)
        attention.attend(query.contiguous(), self._state, scratch, out)
        return out[None, None]

    def _attended(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        how: tuple[float, int | None, torch.Tensor | None],
    ) -> torch.Tensor:
        """Launches the store and the attention of a layer.

        Args:
            layer: number of the layer in the model.
            query: [heads, 1, D].
            keys, values: [1, kv_heads, 1, D or V].
            how: factor of the scores, window and sinks.

        Returns:
            bf16 [heads, V].
        """
        from edgemoe.kernels.triton.attention import StoredRowAttention, scratch_size

        shape, (scaling, window, sinks) = self._shapes[layer], how
        heads, width = len(query), shape.value_dim
        attention = StoredRowAttention(
            *(heads, shape.heads, shape.key_dim, width, scaling, window or 0, sinks, layer),
            form=shape.format,
        )
        attention.store(keys[0, :, 0].contiguous(), values[0, :, 0].contiguous(), self._state)
        scratch = torch.empty(scratch_size(heads, max(shape.key_dim, width)), device=query.device)
        out = query.new_empty(heads, width)
        attention.attend(query[:, 0].contiguous(), self._state, scratch, out)
        return out


@contextmanager
def latents_alone(model: Any) -> Iterator[None]:
    """Makes modules of latent attention pass latents on as they are within the block, without expanding them."""
    modules = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    for module in modules:
        module.expand_kv = lambda latents, rotary: (latents, rotary)
    try:
        yield
    finally:
        for module in modules:
            del module.expand_kv
