"""Memory that the captured launches of a new token read and write: on the device, and in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgemoe.kv.rotary_lengths import RotaryLengths
from edgemoe.kv.sequence import SequenceKV
from edgemoe.layers.graph.sequence_places import SequencePlaces
from edgemoe.machine.device import Device

_LEVEL, _SLOT, _ROWS = 5, 6, 7
"""Places of an item's last numbers (kernels.triton.products)."""

ADDRESSES = _SLOT
"""Numbers of an item that differ between experts: five addresses and the level."""


class GraphMemory:
    """Memory at fixed addresses, of which a new token's launches use the same places every time.

    Args:
        device: the device of the model.
        model: the model that layers.build made, with plain attention of one shape in every layer.
        inner: inner size I of an expert.
        experts: number of experts in a layer.
        slots: experts of a token.

    Attributes:
        state: int64 [STATE + PLACE * layers + 1], as kernels.triton.attention; then `stopped`.
        position, token: int64 [1], the first numbers of the state.
        stopped: int32 [1], the last number of the state, as place_experts.
        hidden, normed: bf16 [H].
        qkv, queries, attended, projected: bf16, of attention.
        scratch: float32, of attention.
        frequencies: float32 [head's size], the angle by which each position turns.
        lengths: whether the frequencies depend on the length of a sequence.
        angles, turned: float32 [head's size], scratch of the rotation.
        cosine, sine: bf16 [head's size], of the token's position.
        router_logits: bf16 [2 E], of a layer's router and of the next one's.
        reporting, reported: int32 [3 k] on the device and in the host's memory, as choose_experts.
        items, gates: int64 [2, k, ITEM] and float32 [k], on the device: the experts to compute and their gate weights.
        inner, rows: bf16 [k, I] and [k, H], of experts.
        one: float32 [1], 1.
        head, highest: bf16 [vocab] and float32 [parts_of(vocab)], scratch of the head.
        outcome, outcome_parts: int32, on the device: everything that the host reads of a token; and its three parts.
        logits: float32 [vocab], the bits of the outcome's first numbers.
        trace: int32 [layers, 3 k + 1], as place_experts.
        likeliest: int32 [1 + parts_of(vocab)], as choose_likeliest.
    """

    def __init__(self, device: Device, model: Any, inner: int, experts: int, slots: int) -> None:
        from edgemoe.kernels.triton import attention

        self.slots, place = slots, device.place
        first = model.model.layers[0].self_attn
        hidden, width = model.model.embed_tokens.weight.shape[1], first.q_proj.out_features

        def bf16(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.bfloat16, device=place)

        self.hidden, self.normed, self.projected = bf16(hidden), bf16(hidden), bf16(hidden)
        self.qkv = bf16(width + 2 * first.k_proj.out_features)
        self.queries, self.attended = bf16(width), bf16(width)
        self.cosine, self.sine, self.router_logits = (
            bf16(first.head_dim),
            bf16(first.head_dim),
            bf16(2 * experts),
        )
        self.inner, self.rows, self.one = bf16(slots, inner), bf16(slots, hidden), torch.ones(1, device=place)
        count = len(model.model.layers)
        numbers = attention.STATE + attention.PLACE * count + 1
        self.state = torch.zeros(numbers, dtype=torch.int64, device=place)
        self.position, self.token = self.state[:1], self.state[1:2]
        self.stopped = self.state[-1:].view(torch.int32)[:1]
        self._make_outer(model, count, place)
        self.reporting = torch.zeros(3 * slots, dtype=torch.int32, device=place)
        self.scratch = torch.zeros(
            attention.scratch_size(width // first.head_dim, first.head_dim), device=place
        )
        self._make_tables(device, slots)
        self.reported = device.host_tensor((3 * slots,), torch.int32)
        self._chosen = self.reported[: 2 * slots].numpy()
        self._reported_gates = self.reported[2 * slots :].view(torch.float32)
        self._places = SequencePlaces()
        self._host_state = device.host_tensor((numbers,), torch.int64)

    def _make_outer(self, model: Any, layers: int, place: torch.device) -> None:
        """Allocates what the beginning and the end of a token compute with."""
        from edgemoe.kernels.triton.token import parts_of

        vocab, rotary = model.lm_head.out_features, model.model.rotary_emb
        self._rotary, self.lengths = rotary, RotaryLengths.of(model.config.to_dict()) is not None
        self.frequencies = torch.cat((rotary.inv_freq, rotary.inv_freq)).to(place, torch.float32)
        self.angles, self.turned = torch.zeros_like(self.frequencies), torch.zeros_like(self.frequencies)
        self.head = torch.zeros(vocab, dtype=torch.bfloat16, device=place)
        self.highest = torch.zeros(parts_of(vocab), device=place)
        sizes = vocab, layers * (3 * self.slots + 1), 1 + parts_of(vocab)
        self.outcome = torch.zeros(sum(sizes), dtype=torch.int32, device=place)
        self.outcome_parts = self.outcome.split(sizes)
        logits, trace, self.likeliest = self.outcome_parts
        self.logits: torch.Tensor = logits.view(torch.float32)
        self.trace: torch.Tensor = trace.view(layers, -1)

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
        if self.lengths:
            self._rotary(self.hidden[None, None], self.position[None])  # it chooses its factors
            self.frequencies.view(2, -1).copy_(self._rotary.inv_freq)

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
