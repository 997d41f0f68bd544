"""Memory that the captured launches of a new token read and write: on the device, and in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgemoe.kv.rotary_lengths import RotaryLengths
from edgemoe.kv.sequence import SequenceKV
from edgemoe.layers.graph.draw_memory import DrawMemory
from edgemoe.layers.graph.sequence_places import SequencePlaces
from edgemoe.machine.device import Device

_LEVEL, _SLOT, _ROWS = 5, 6, 7
"""Places of an item's last numbers (kernels.triton.products)."""

ADDRESSES = _SLOT
"""Numbers of an item that differ between experts: five addresses and the level."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model.

    Args:
        layers: number of layers.
        hidden, vocab: sizes of a state and of the vocabulary.
        outer, inner: sizes X and I of the state that experts take, and between an expert's matrices.
        slots: experts k of a token.
    """

    layers: int
    hidden: int
    vocab: int
    outer: int
    inner: int
    slots: int


class TokenMemory:
    """Memory at fixed addresses, of which a new token's launches use the same places every time.

    Args:
        device: the device of the model.
        sizes: the sizes of the model.

    Attributes:
        state: int64 [STATE + PLACE * layers + 1], as kernels.triton.attention; then `stopped`.
        position, token: int64 [1], the first numbers of the state.
        stopped: int32 [1], the last number of the state, as place_experts.
        hidden: bf16 [H], the state between two layers.
        normed: bf16 [X], the state that experts take.
        reporting, reported: int32 [3 k] on the device and in the host's memory, as choose_experts.
        items, gates: int64 [2, k, ITEM] and float32 [k], on the device: the experts to compute and their gate weights.
        inner, rows: bf16 [k, I] and [k, X], of experts.
        highest: float32 [parts_of(vocab)], scratch of the head.
        outcome, outcome_parts: int32, on the device: everything that the host reads of a token; and its three parts.
        logits: float32 [vocab], the bits of the outcome's first numbers.
        trace: int32 [layers, 3 k + 1], as place_experts.
        following: int32 [1 + parts_of(vocab)], the next token, as choose_likeliest and draw_token write it.
        draws: rule and random numbers by which the next token is drawn.
        drawing: whether launches that are made now draw the next token; otherwise it is the likeliest one.
    """

    def __init__(self, device: Device, sizes: Sizes) -> None:
        from edgemoe.kernels.triton import attention
        from edgemoe.kernels.triton.token import parts_of

        self._place, self.slots = device.place, sizes.slots
        slots, vocab, layers = sizes.slots, sizes.vocab, sizes.layers
        self.hidden, self.normed = self._bf16(sizes.hidden), self._bf16(sizes.outer)
        self.inner, self.rows = self._bf16(slots, sizes.inner), self._bf16(slots, sizes.outer)
        numbers = attention.STATE + attention.PLACE * layers + 1
        self.state = torch.zeros(numbers, dtype=torch.int64, device=device.place)
        self.position, self.token = self.state[:1], self.state[1:2]
        self.stopped = self.state[-1:].view(torch.int32)[:1]
        self.reporting = torch.zeros(3 * slots, dtype=torch.int32, device=device.place)
        self.highest = torch.zeros(parts_of(vocab), device=device.place)
        parts = vocab, layers * (3 * slots + 1), 1 + parts_of(vocab)
        self.outcome = torch.zeros(sum(parts), dtype=torch.int32, device=device.place)
        self.outcome_parts = self.outcome.split(parts)
        logits, trace, self.following = self.outcome_parts
        self.logits: torch.Tensor = logits.view(torch.float32)
        self.trace: torch.Tensor = trace.view(layers, -1)
        self.draws, self.drawing = DrawMemory(device, vocab), False
        self._make_tables(device, slots)
        self.reported = device.host_tensor((3 * slots,), torch.int32)
        self._chosen = self.reported[: 2 * slots].numpy()
        self._reported_gates = self.reported[2 * slots :].view(torch.float32)
        self._places = SequencePlaces()
        self._host_state = device.host_tensor((numbers,), torch.int64)

    lengths = False
    """Whether rotary factors depend on the length of a sequence."""

    def _bf16(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16, device=self._place)

    def _make_tables(self, device: Device, slots: int) -> None:
        """Allocates the table of a launch's experts on the device, and the tables of a layer in the host's memory.

        A layer has at most as many lists of experts as slots, and all are computed when the next layer reports.
        """
        from edgemoe.kernels.triton.products import ITEM

        end = 2 * slots * ITEM
        self._table = torch.zeros(end + -(-slots // 2), dtype=torch.int64, device=device.place)
        self.items = self._table[:end].view(2, slots, ITEM)
        self.gates = self._table[end:].view(torch.float32)[:slots]
        tables = device.host_tensor((slots, len(self._table)), torch.int64)
        self._tables = list(tables)
        items = tables[:, :end].view(slots, 2, slots, ITEM).numpy()
        items[..., _SLOT], items[..., _ROWS] = np.arange(slots), 1
        self._items = list(items)
        self._table_gates = tables[:, end:].view(torch.float32)[:, :slots].numpy()
        self._at = 0

    def begin_token(self, sequence: SequenceKV, token: int) -> None:
        """Sets the state of a sequence's next token, with a token's id."""
        self.set_state(sequence.length, token, self._places.next_token(sequence))

    def end_token(self, sequence: SequenceKV) -> None:
        """Launches what a token leaves to its sequence in addition to keys and values: nothing."""

    def set_state(self, position: int, token: int, places: NDArray[np.int64]) -> None:
        """Sets the token's position and id, and where its sequence's keys and values are.

        Args:
            position: the number of the sequence's tokens before it.
            token: its id.
            places: [layers, PLACE], as kernels.triton.attention.PLACE.
        """
        numbers = self._host_state.numpy()
        numbers[0], numbers[1], numbers[2 : 2 + places.size] = position, token, places.ravel()
        self.state.copy_(self._host_state, non_blocking=True)

    def choose(self, logits: torch.Tensor) -> None:
        """Launches the choice of the next token, of logits bf16 [vocab], and the state in which its launch begins."""
        from edgemoe.kernels.triton.draw import draw_token
        from edgemoe.kernels.triton.token import choose_likeliest

        places = self.highest, self.logits, self.following, self.state
        if self.drawing:
            draw_token(logits, *places, self.draws.tables)
        else:
            choose_likeliest(logits, *places)

    def report(self) -> tuple[list[int], list[int], torch.Tensor]:
        """The experts chosen and predicted, and the gate weights float32 [1, k], of the layer that was awaited.

        Begins the layer's tables. The gate weights are valid until the next layer is launched.
        """
        self._at = 0
        numbers: list[int] = self._chosen.tolist()
        return numbers[: self.slots], numbers[self.slots :], self._reported_gates[None]

    def set_gates(self, gates: torch.Tensor) -> None:
        """Sets the gate weights [1, k] of the layer's tables."""
        self._table_gates[:] = gates.numpy()

    def set_experts(self, experts: Mapping[int, NDArray[np.int64]]) -> int:
        """Fills the layer's next table: slot -> an expert's items [2, ADDRESSES]; the other slots compute nothing.

        Every table carries the layer's gate weights as well.

        Returns:
            the table's number, for send_table.
        """
        at, self._at = self._at, self._at + 1
        items = self._items[at]
        items[:, :, _LEVEL] = 0
        for slot, expert in experts.items():
            items[:, slot, :ADDRESSES] = expert
        return at

    def send_table(self, number: int) -> None:
        """Launches the copy of a table to the device."""
        self._table.copy_(self._tables[number], non_blocking=True)


class GraphMemory(TokenMemory):
    """Memory of the launches of layers with plain attention of one shape in every layer.

    Args:
        device: the device of the model.
        model: the model that layers.build made.
        inner: inner size I of an expert.
        experts: number of experts in a layer.
        slots: experts of a token.

    Attributes:
        qkv, queries, attended, projected: bf16, of attention.
        scratch: float32, of attention.
        frequencies: float32 [head's size], the angle by which each position turns.
        angles, turned: float32 [head's size], scratch of the rotation.
        cosine, sine: bf16 [head's size], of the token's position.
        router_logits: bf16 [2 E], of a layer's router and of the next one's.
        one: float32 [1], 1.
        head: bf16 [vocab], scratch of the head.
    """

    def __init__(self, device: Device, model: Any, inner: int, experts: int, slots: int) -> None:
        from edgemoe.kernels.triton import attention

        place, first, rotary = device.place, model.model.layers[0].self_attn, model.model.rotary_emb
        hidden, width = model.lm_head.in_features, first.q_proj.out_features
        vocab, layers = model.lm_head.out_features, len(model.model.layers)
        super().__init__(device, Sizes(layers, hidden, vocab, hidden, inner, slots))
        self.projected, self.qkv = self._bf16(hidden), self._bf16(width + 2 * first.k_proj.out_features)
        self.queries, self.attended = self._bf16(width), self._bf16(width)
        self.cosine, self.sine = self._bf16(first.head_dim), self._bf16(first.head_dim)
        self.router_logits, self.head = self._bf16(2 * experts), self._bf16(vocab)
        self.one = torch.ones(1, device=place)
        self._rotary, self.lengths = rotary, RotaryLengths.of(model.config.to_dict()) is not None
        self.frequencies = torch.cat((rotary.inv_freq, rotary.inv_freq)).to(place, torch.float32)
        self.angles, self.turned = torch.zeros_like(self.frequencies), torch.zeros_like(self.frequencies)
        heads = width // first.head_dim
        self.scratch = torch.zeros(attention.scratch_size(heads, first.head_dim), device=place)

    def begin_token(self, sequence: SequenceKV, token: int) -> None:
        """Sets the state of a sequence's next token, and the rotary factors where they depend on its length."""
        super().begin_token(sequence, token)
        if self.lengths:
            self._rotary(self.hidden[None, None], self.position[None])  # it chooses its factors
            self.frequencies.view(2, -1).copy_(self._rotary.inv_freq)
