"""The shape of a sequence's KV: keys and values, latents, and the state of linear-attention layers."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field, replace

from edgemoe.kv.checkpoints import COUNT
from edgemoe.kv.formats import KVFormat, row_bytes
from edgemoe.kv.window_rows import most_rows
from edgemoe.kv.windows import most_tokens

PAGE = mmap.PAGESIZE
"""Bytes of memory that are taken at once."""

_BROKEN_PAGES = 9
"""Pages that a layer's and head's kept tokens share with others: two for each of four ranges, and one at their end."""

INDEX_SCORES = 1 << 21
"""Most float32 scores of an index that exist at once, of all its heads; at least one row has them."""


@dataclass(frozen=True)
class LinearState:
    """The shape of the state of linear-attention layers and their kind, which does not depend on a sequence's length.

    Args:
        layers: the layers with such a state, ascending.
        channels, kernel: sizes of the convolution, whose last inputs are stored as bf16 [channels, kernel].
        heads, key_dim, value_dim: shape of the recurrence's state, float32 [heads, key_dim, value_dim]; 0: none.
        guesses: most guesses in a step, whose rows are stored until it is known which were right.
    """

    layers: tuple[int, ...]
    channels: int
    kernel: int
    heads: int
    key_dim: int
    value_dim: int
    guesses: int = 0

    @property
    def row(self) -> int:
        """Upper estimate of the bf16 numbers of a token that a layer's kernel takes.

        A short convolution takes three for each channel. Otherwise there are, next to the channels, a gate for each
        number of a value, a rate of each head, and at most a decay for each number of a key.
        """
        if not self.heads:
            return 3 * self.channels
        return self.channels + self.heads * (2 * max(self.key_dim, self.value_dim) + 1)

    @property
    def bytes(self) -> int:
        """Bytes of all layers' states in two copies: a step writes one, so that the other can undo the step."""
        return 2 * (self._copy + 2 * len(self.layers) * self.guesses * self.row)

    @property
    def bytes_with_checkpoints(self) -> int:
        """Bytes of both copies, and of the states after earlier tokens (Checkpoints)."""
        return self.bytes + COUNT * self._copy

    @property
    def _copy(self) -> int:
        """Bytes of one copy of all layers' states."""
        each = 2 * self.channels * self.kernel + 4 * self.heads * self.key_dim * self.value_dim
        return len(self.layers) * each


@dataclass(frozen=True)
class KVShape:
    """The shape of one sequence's KV.

    Args:
        layers: the layers with attention, ascending.
        heads: number of key and value heads.
        key_dim: size of a key.
        value_dim: size of a value; 0 where values are not stored.
        latent: leading elements of a key that are the latent of its value (multi-head latent attention); 0: none.
        linear: state of the linear-attention layers; None: there are none.
        format: how keys and values are stored; latents are stored as keys.
        others: shapes of further layers, whose keys and values have other heads or sizes; they have no `linear` and no
            `others`.
        index: keys of an index that chooses the tokens that a layer attends to, one head, always bf16; None: none.
        window: latest tokens that these layers attend to, which are all that a long sequence keeps of them; 0: all.
        moves: whether layers with a window have memory for the tokens that they keep alone, whose rows move, as on a
            device; False: each token has its place in memory for the whole context, whose pages return to the system.
    """

    layers: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int
    latent: int = 0
    linear: LinearState | None = None
    format: KVFormat = field(default_factory=KVFormat)
    others: tuple[KVShape, ...] = ()
    index: KVShape | None = None
    window: int = 0
    moves: bool = False

    @property
    def parts(self) -> tuple[KVShape, ...]:
        """One shape for each kind of layers, this one first."""
        return self, *self.others

    @property
    def rotation(self) -> int:
        """Numbers of a key that are rotated together (KVFormat.rotation); 0: keys lie plain."""
        return self.format.rotation(self.key_dim, self.latent or self.key_dim)

    def stored_as(self, form: KVFormat) -> KVShape:
        """Returns the shape with another format."""
        return replace(self, format=form, others=tuple(each.stored_as(form) for each in self.others))

    def guessing(self, guesses: int) -> KVShape:
        """Returns the shape with space for so many guesses in a step, where layers have a state of fixed size."""
        return replace(self, linear=replace(self.linear, guesses=guesses)) if self.linear else self

    @property
    def longest_window(self) -> int:
        """Tokens of the longest window of a layer; 0: no layer has one."""
        return max(part.window for part in self.parts)

    def moving(self) -> KVShape:
        """Returns this shape for memory that is allocated at once, on a device."""
        others = tuple(replace(each, moves=True) for each in self.others)
        return replace(self, others=others, moves=True)

    def rows_for(self, part: KVShape, context: int) -> int:
        """Returns the rows of each head that one kind of layers maps, in a sequence of a context of some tokens.

        Args:
            part: a kind of these layers (`parts`), or the index.
            context: tokens that the sequence may have.
        """
        moves = part.window and part.moves
        return min(context, most_rows(most_tokens(self.longest_window))) if moves else context

    def without_windows(self) -> KVShape:
        """Returns this shape without windows: every layer keeps the tokens of the whole context."""
        kinds = dict[KVShape, list[int]]()
        for part in self.parts:
            plain = replace(part, layers=(), linear=None, others=(), index=None, window=0)
            kinds.setdefault(plain, []).extend(part.layers)
        first, *others = [replace(kind, layers=tuple(sorted(layers))) for kind, layers in kinds.items()]
        return replace(first, linear=self.linear, others=tuple(others), index=self.index)

    def bytes_for(self, context: int) -> int:
        """Returns the most bytes of a sequence's KV for `context` tokens."""
        return self._bytes(context, context, whole=True)

    def bytes_in_pages(self, tokens: int, context: int) -> int:
        """Returns the bytes of the pages that a sequence's first tokens lie in, where its context has been mapped.

        Keys and values of each layer and head lie together, for all tokens of the context.

        Args:
            tokens: number of first tokens, at most the context.
            context: tokens that the sequence may have.
        """
        return self._bytes(tokens, context, whole=False) if tokens else self._bytes(0, 0, whole=True)

    def _bytes(self, tokens: int, context: int, *, whole: bool) -> int:
        """Bytes of the states, and of a sequence's first tokens; with `whole`, bytes of the whole context."""
        total = self.linear.bytes_with_checkpoints if self.linear else 0
        for part in self._stored:
            for row in filter(None, part._row_bytes()):
                most = self.rows_for(part, context) * row
                if part.window and not part.moves:
                    kept = most_tokens(self.longest_window) * row
                    most = min(most, (-(-kept // PAGE) + _BROKEN_PAGES) * PAGE)
                pages = -(-tokens * row // PAGE) + (context * row % PAGE > 0)
                total += len(part.layers) * part.heads * (most if whole else min(pages * PAGE, most))
        return total

    @property
    def _stored(self) -> tuple[KVShape, ...]:
        """The shapes of all that grows with a sequence."""
        return (*self.parts, self.index) if self.index else self.parts

    def _row_bytes(self) -> tuple[int, int]:
        """Bytes of a stored key and of a stored value, of one head of a layer of `layers`."""
        return row_bytes(self.format.keys, self.key_dim), row_bytes(self.format.values, self.value_dim)
