"""Keys and values of one sequence, preallocated for its context."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from edgemoe.errors import ContextExceeded
from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.rows import decode, encode, rotate, row_of
from edgemoe.kv.shape import KVShape
from edgemoe.machine.pages import return_pages, sparse_tensor


class SequenceKV:
    """Keys and values of one sequence in every layer, in the shape's format. Not thread-safe.

    A step writes behind the `length` valid tokens, and increases `length` after it has succeeded; an error or Ctrl-C
    within a step does not change the sequence.

    Args:
        shape: the shape of the KV.
        context: most tokens. In RAM pages of tokens that are not written yet take none; on a device all are taken.
        place: the device.
        reserved: see below; None: the context.

    Attributes:
        length: number of valid tokens.
        whole: tokens of the prompt that its steps come to, whose number the rotary factors of all its keys are for.
        reserved: tokens, from the first, whose bytes are reserved; no step writes behind them.
        slots: layer -> index of its keys and values in `slices`.
        shapes: layer -> the shape of its keys and values.
        keys: [layers, heads, context, W], of rows.row_of, for the layers of the shape itself; W of bf16 is key_dim.
        values: [layers, heads, context, W]; with latents in bf16 a view of the latents in `keys`, in other formats
            `keys` itself.
        stored: all tensors that have keys, values or latents: `keys`, `values`, those of the shape's others and index.
        index: layer -> its index keys, bf16 [context, D].
        slices: (keys, values) of each layer with attention, each [heads, context, W].
        states: the states of linear-attention layers; None: there are none.
    """

    def __init__(
        self,
        shape: KVShape,
        context: int,
        place: torch.device | str = "cpu",
        *,
        reserved: int | None = None,
    ) -> None:
        self.shape, self.context, self.length, self.whole = shape, context, 0, 0
        self.reserved = context if reserved is None else reserved
        parts = shape.parts
        self.slots = {
            layer: slot for slot, layer in enumerate(layer for part in parts for layer in part.layers)
        }
        self.shapes = {layer: part for part in parts for layer in part.layers}
        self.stored, self.slices = list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
        made = [self._made(part, place) for part in parts]
        self.keys, self.values = made[0]
        for keys, values in made:
            self.slices += zip(keys.unbind(), values.unbind(), strict=True)
        self.index = dict[int, torch.Tensor]()
        if shape.index:
            index_keys, _ = self._made(shape.index, place)
            self.index = dict(zip(shape.index.layers, index_keys[:, 0].unbind(), strict=True))
        self.states = LinearStates(shape.linear, place) if shape.linear else None

    def _made(self, part: KVShape, place: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocates the keys and the values of one kind of layers."""
        size = len(part.layers), part.heads, self.context
        made = sparse_tensor if torch.device(place).type == "cpu" else partial(torch.empty, device=place)
        (dtype, width), (other, value_width) = (
            row_of(part.format.keys, part.key_dim),
            row_of(part.format.values, part.value_dim),
        )
        keys = made((*size, width), dtype=dtype)
        self.stored.append(keys)
        if part.latent:
            return keys, keys if part.format.quantized else keys[..., : part.latent]
        if not part.value_dim:
            return keys, keys[..., :0]
        values = made((*size, value_width), dtype=other)
        self.stored.append(values)
        return keys, values

    def require(self, tokens: int) -> None:
        """Raises ContextExceeded if `tokens` more do not fit."""
        self.require_tokens(self.length + tokens, self.context)
        assert self.length + tokens <= self.reserved, "a step beyond the reserved tokens"

    @staticmethod
    def require_tokens(tokens: int, context: int) -> None:
        """Raises ContextExceeded if so many tokens do not fit a context."""
        if tokens > context:
            raise ContextExceeded(
                f"a context of at least {tokens} tokens",
                f"one of {context}",
                "use a larger context or a shorter prompt",
            )

    def crop(self, length: int) -> int:
        """Drops every token from `length` on.

        Args:
            length: at most the number of valid tokens.

        Returns:
            The number of tokens that are left: `length`, or 0 where linear-attention layers have a later state only.
        """
        assert 0 <= length <= self.length
        self.length = 0 if self.states and length < self.length else length
        self.whole = self.whole if self.length else 0
        return self.length

    def return_behind(self, tokens: int) -> None:
        """Returns the memory of tokens behind the first `tokens` to the system, and reserves only these. In RAM alone.

        Args:
            tokens: at least the valid ones, at most the reserved ones.
        """
        assert self.length <= tokens <= self.reserved
        self.reserved = tokens
        for stored in self.stored:
            row = stored.shape[-1] * stored.itemsize
            for slot in stored.flatten(0, 1):
                return_pages(slot, tokens * row)

    def copy_prefix(self, other: SequenceKV, length: int) -> int:
        """Makes the first tokens of another sequence of the same shape the only ones of this one.

        Args:
            other: has at least `length` tokens.
            length: at most the reserved tokens.

        Returns:
            The number of tokens copied: `length`, or 0 where linear-attention layers have a later state only.
        """
        assert length <= min(other.length, self.reserved)
        if self.states and other.states:
            if length < other.length:
                return 0
            self.states.copy(other.states)
        for own, theirs in zip(self.stored, other.stored, strict=True):
            own[:, :, :length] = theirs[:, :, :length]
        self.length = length
        return length

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values [heads, R, D] behind the valid ones; with latents, the latents and rotary keys.

        Values that are shorter than the shape's are padded with zeros.
        """
        shape, slot, end = self.shapes[layer], self.slots[layer], self.length + keys.shape[1]
        to_keys, to_values = (stored[:, self.length : end] for stored in self.slices[slot])
        if shape.latent:
            keys = torch.cat((keys, values), dim=-1)
        else:
            padded = F.pad(values, (0, shape.value_dim - values.shape[-1]))
            to_values[:] = encode(shape.format.values, padded)
        to_keys[:] = encode(shape.format.keys, rotate(keys, shape.rotation))

    def read(self, layer: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [heads, end - first, D] of some tokens, valid or just written.

        bf16 ones as they lie, others as float32 copies. Keys are rotated, and with latents values are, by the shape's
        rotation.
        """
        shape = self.shapes[layer]
        keys, values = (stored[:, first:end] for stored in self.slices[self.slots[layer]])
        if not shape.format.quantized:
            return keys, values
        wide = decode(shape.format.keys, keys, shape.key_dim)
        if shape.latent:
            return wide, wide[..., : shape.latent]
        return wide, decode(shape.format.values, values, shape.value_dim)

    def rows(self, first: int, end: int) -> list[memoryview]:
        """Returns the stored bytes of some tokens' keys and values, writable, layer by layer and head by head; in RAM.

        Args:
            first, end: tokens, within the reserved ones.
        """
        assert first <= end <= self.reserved
        heads = (head[first:end] for kind in self.stored for layer in kind for head in layer)
        return [memoryview(head.view(torch.uint8).numpy()).cast("B") for head in heads]

    def restore(self, length: int) -> None:
        """Makes the first tokens, whose rows have been written from outside (`rows`), the only valid ones."""
        assert not self.states
        self.length = length

    def commit(self, tokens: int) -> None:
        """Makes the last `tokens` tokens that a step wrote valid."""
        self.length += tokens
        if self.states:
            self.states.commit()
