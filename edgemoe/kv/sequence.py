"""Keys and values of one sequence, preallocated for its context."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

import torch
import torch.nn.functional as F

from edgemoe.errors import ContextExceeded, ModelRefused
from edgemoe.kv.file_rows import FileRows
from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.rows import decode, encode, rotate, row_of
from edgemoe.kv.shape import KVShape
from edgemoe.kv.window_rows import MovedRows, PlacedRows
from edgemoe.kv.windows import Windows, most_tokens
from edgemoe.machine.pages import return_pages, sparse_tensor


class SequenceKV:
    """Keys and values of one sequence in every layer, in the shape's format. Not thread-safe.

    A step writes after the `length` valid tokens, and increases `length` once it has succeeded; otherwise all stays.

    Args:
        shape: the shape of the KV.
        context: most tokens. In RAM pages of tokens that are not written yet take none; on a device all are taken.
        place: the device.
        reserved: see below; None: the context.

    Attributes:
        length: number of valid tokens.
        changes: grows whenever tokens become valid or invalid: an equal number stands for equal tokens.
        whole: number of tokens of the whole prompt; the rotary factors of all keys are made for that length.
        reserved: number of tokens, from the first, whose bytes are reserved; no step writes after them.
        slots: layer -> index of its keys and values in `slices`, which are in the order of their layers.
        shapes: layer -> the shape of its keys and values.
        keys: [layers, heads, context, W], of rows.row_of, for the layers of the shape itself; W of bf16 is key_dim.
        values: [layers, heads, context, W]; with latents in bf16 a view of the latents in `keys`, in other formats
            `keys` itself.
        stored: all tensors that have keys, values or latents: `keys`, `values`, and tensors of other shapes and index.
        windowed: layer with a window -> its parts of these tensors, each [heads, rows, W] with the shape's rows_for.
        windows: tokens that such layers keep; None: each layer keeps all tokens.
        window_rows: layer with a window -> the rows of its tokens.
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
        self.shape, self.context, self.length, self.whole, self.changes = shape, context, 0, 0, 0
        self.reserved = context if reserved is None else reserved
        parts = shape.parts
        self.shapes = {layer: part for part in parts for layer in part.layers}
        self.slots = {layer: slot for slot, layer in enumerate(sorted(self.shapes))}
        self.stored, self.windowed = list[torch.Tensor](), dict[int, list[torch.Tensor]]()
        made = [self._made(part, place) for part in parts]
        self.keys, self.values = made[0]
        by_layer = dict[int, tuple[torch.Tensor, torch.Tensor]]()
        for part, (keys, values) in zip(parts, made, strict=True):
            by_layer |= zip(part.layers, zip(keys.unbind(), values.unbind(), strict=True), strict=True)
        self.slices = [by_layer[layer] for layer in sorted(by_layer)]
        self.index = dict[int, torch.Tensor]()
        if shape.index:
            index_keys, _ = self._made(shape.index, place)
            self.index = dict(zip(shape.index.layers, index_keys[:, 0].unbind(), strict=True))
        self.states = LinearStates(shape.linear, place) if shape.linear else None
        window = shape.longest_window
        self.windows = Windows(window, drops=context > most_tokens(window)) if window else None
        kind = MovedRows if shape.moves else PlacedRows
        self.window_rows = {layer: kind(stored) for layer, stored in self.windowed.items()}

    def _made(self, part: KVShape, place: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocates the keys and the values of one kind of layers."""
        size = len(part.layers), part.heads, self.shape.rows_for(part, self.context)
        made = sparse_tensor if torch.device(place).type == "cpu" else partial(torch.empty, device=place)
        (dtype, width), (other, value_width) = (
            row_of(part.format.keys, part.key_dim),
            row_of(part.format.values, part.value_dim),
        )
        tensors = [made((*size, width), dtype=dtype)]
        if part.value_dim and not part.latent:
            tensors.append(made((*size, value_width), dtype=other))
        self.stored += tensors
        if part.window:
            self.windowed |= {layer: [each[i] for each in tensors] for i, layer in enumerate(part.layers)}
        keys, values = tensors[0], tensors[-1]
        if part.latent:
            return keys, keys if part.format.quantized else keys[..., : part.latent]
        return keys, values if part.value_dim else keys[..., :0]

    def require(self, tokens: int) -> None:
        """Raises ContextExceeded if `tokens` more do not fit."""
        self.require_tokens(self.length + tokens, self.context)
        assert self.length + tokens <= self.reserved, "a step beyond the reserved tokens"
        if self.windows:
            self._forget(self.windows.failed())

    @staticmethod
    def require_tokens(tokens: int, context: int) -> None:
        """Raises ContextExceeded if so many tokens do not fit a context."""
        if tokens > context:
            raise ContextExceeded(
                f"a context of at least {tokens} tokens",
                f"one of {context}",
                "use a larger context or a shorter prompt",
            )

    def reach(self, length: int) -> int:
        """Returns the most tokens, at most `length`, that the sequence can be cropped to.

        Linear-attention layers have the states after some numbers of tokens, and others the windows before some.

        Args:
            length: number of tokens, at most the valid ones.
        """
        left = self.states.reach(length, self.length) if self.states else length
        left = self.windows.reach(left) if self.windows else left
        return left if left in (0, length) else self.reach(left)

    def crop(self, length: int) -> int:
        """Crops the sequence to as many tokens as `reach` returns, and returns their number.

        Args:
            length: number of tokens, at most the valid ones.
        """
        assert 0 <= length <= self.length
        before, self.length, self.changes = self.length, self.reach(length), self.changes + 1
        if self.states:
            self.states.crop(self.length, before)
        if self.windows:
            self._forget(self.windows.crop(self.length))
        self.whole = self.whole if self.length else 0
        return self.length

    def mark(self, shared: int | None, prompt: int) -> None:
        """Has layers keep what a crop to two numbers of tokens needs, as Windows.mark and Checkpoints.mark."""
        if self.states:
            self.states.checkpoints.mark(shared, prompt, self.length)
        if self.windows:
            self._forget(self.windows.mark(shared, prompt))

    def pass_window(self, layer: int, window: int | None, rows: int) -> None:
        """Drops tokens of a step that are not seen any more, and makes room for a layer's next rows.

        Args:
            layer: the layer.
            window: latest tokens that the model has the layer attend to; None: all.
            rows: tokens that it computes after the valid ones.

        Raises:
            ModelRefused: the layer attends to more tokens than it keeps.
        """
        kept = self.shapes[layer].window
        if not kept or not self.windows:
            return
        if not window or window > kept:
            wanted, found = f"a window of {kept} tokens in layer {layer}", f"one of {window or 'all'}"
            raise ModelRefused(wanted, found, "choose a model of another family")
        self._make_room(layer, rows)

    def _make_room(self, layer: int, rows: int) -> None:
        """Drops what a layer with a window does not see any more; gives rows to the next tokens where they move."""
        if self.windows:
            self._forget(self.windows.passed(self.length, rows), (layer,))
        self.window_rows[layer].add(range(self.length, self.length + rows))

    def rows_of(self, layer: int, tokens: range) -> slice:
        """Returns the rows of some tokens, which the layer has, in its keys and values."""
        rows = self.window_rows.get(layer)
        first = rows.row(tokens) if rows else tokens.start
        return slice(first, first + len(tokens))

    def _forget(self, ranges: Iterable[range], layers: Collection[int] | None = None) -> None:
        """Frees the memory of some tokens of the layers with a window, or of some of these layers."""
        for tokens in ranges:
            for layer in self.window_rows if layers is None else layers:
                self.window_rows[layer].drop(tokens)

    def return_behind(self, tokens: int) -> None:
        """Returns the memory of all tokens but the first `tokens` to the system; these stay reserved. In RAM alone.

        Args:
            tokens: number of tokens, at least the valid ones, at most the reserved ones.
        """
        assert self.length <= tokens <= self.reserved
        self.reserved = tokens
        for stored in self.stored:
            row = stored.shape[-1] * stored.itemsize
            for slot in stored.flatten(0, 1):
                return_pages(slot, tokens * row)

    def copy_prefix(self, other: SequenceKV, length: int) -> int:
        """Copies the first tokens of another sequence of the same shape; they become this one's only tokens.

        Args:
            other: has at least `length` tokens.
            length: number of tokens, at most the reserved ones.

        Returns:
            The number of tokens copied; see `reach` of the other sequence.
        """
        assert length <= min(other.length, self.reserved)
        length = other.reach(length)
        if self.states and other.states and length:
            self.states.copy_prefix(other.states, length, other.length)
        for own, theirs in zip(self._whole(), other._whole(), strict=True):
            own[:, :, :length] = theirs[:, :, :length]
        if self.windows and other.windows:
            self.windows.copy(other.windows, length)
        kept = [tokens for tokens in self.windows.ranges if tokens] if self.windows else []
        for layer, parts in self.windowed.items():
            self.window_rows[layer].hold(kept)
            for tokens in kept:
                to, source = self.rows_of(layer, tokens), other.rows_of(layer, tokens)
                for own, theirs in zip(parts, other.windowed[layer], strict=True):
                    own[:, to] = theirs[:, source]
        self.length, self.changes = length, self.changes + 1
        return length

    def _whole(self) -> list[torch.Tensor]:
        """The tensors of layers without a window, and of an index."""
        with_window = {
            each.untyped_storage().data_ptr() for parts in self.windowed.values() for each in parts
        }
        return [each for each in self.stored if each.untyped_storage().data_ptr() not in with_window]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values [heads, R, D] after the valid ones; with latents, the latents and rotary keys.

        Values that are shorter than the shape's are padded with zeros.
        """
        shape, tokens = self.shapes[layer], range(self.length, self.length + keys.shape[1])
        if layer in self.window_rows:
            self._make_room(layer, len(tokens))
        place = self.rows_of(layer, tokens)
        to_keys, to_values = (stored[:, place] for stored in self.slices[self.slots[layer]])
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
        place = self.rows_of(layer, range(first, end))
        keys, values = (stored[:, place] for stored in self.slices[self.slots[layer]])
        if not shape.format.quantized:
            return keys, values
        wide = decode(shape.format.keys, keys, shape.key_dim)
        if shape.latent:
            return wide, wide[..., : shape.latent]
        return wide, decode(shape.format.values, values, shape.value_dim)

    def rows(self, first: int, end: int, *, windowed: bool = False) -> FileRows:
        """Returns the stored bytes of some tokens' keys and values.

        Args:
            first, end: range of tokens, within the reserved ones.
            windowed: True: rows of layers with a window; False: of all other layers.
        """
        assert first <= end <= self.reserved
        kinds = (each for parts in self.windowed.values() for each in parts)
        layers = kinds if windowed else (layer for kind in self._whole() for layer in kind)
        return FileRows([head[first:end] for layer in layers for head in layer], on_device=self.shape.moves)

    def restore(self, tokens: range, *, windowed: bool) -> None:
        """Makes tokens valid whose rows have been written (`rows`); they become the last ones.

        Args:
            tokens: they follow valid ones, or replace some.
            windowed: whether layers with a window have their rows too. A step needs their whole window.
        """
        assert not self.states
        self.length, self.changes = tokens.stop, self.changes + 1
        if self.windows and windowed:
            self.windows.restore(tokens)

    def commit(self, tokens: int, *, guesses: bool = False) -> None:
        """Makes the next `tokens` tokens of the last step valid; with `guesses`, guesses that were right."""
        self.length, self.changes = self.length + tokens, self.changes + 1
        if self.states:
            self.states.commit(tokens if guesses else None, length=self.length)
        if self.windows and (gone := self.windows.commit(self.length)):
            self._forget(gone)
