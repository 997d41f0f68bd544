"""Memory that the captured launches of transformers' modules read and write."""

from __future__ import annotations

import torch

from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape
from edgemoe.layers.graph.memory import Sizes, TokenMemory
from edgemoe.machine.device import Device


class ModuleMemory(TokenMemory):
    """Memory at fixed addresses for one token of a model of any family.

    Args:
        device: Device of the model.
        sizes: Sizes of the model.
        shape: Shape of a sequence's KV.
        biases: Sizes of the biases of an expert's two matrices; None: experts have no biases.

    Attributes:
        states: States of the token's sequence: the valid copy before the token, the other one after it. None: the model
            keeps none.
        biases: bf16 [k, N] and [k, X], biases of the slots' experts; None: experts have no biases.
        products: bf16 [k, X], results of experts before the second bias is added.
    """

    def __init__(
        self, device: Device, sizes: Sizes, shape: KVShape, biases: tuple[int, int] | None = None
    ) -> None:
        super().__init__(device, sizes)
        self.states = LinearStates(shape.linear, device.place, checkpoints=0) if shape.linear else None
        self.biases: tuple[torch.Tensor, torch.Tensor] | None = None
        if biases:
            self.biases = self._bf16(sizes.slots, biases[0]), self._bf16(sizes.slots, biases[1])
        self.products = self.rows if biases is None else self._bf16(sizes.slots, sizes.outer)

    def begin_token(self, sequence: SequenceKV, token: int) -> None:
        """Sets the state of a sequence's next token, with a token's id, and launches the copy of its states."""
        super().begin_token(sequence, token)
        if self.states:
            assert sequence.states
            if sequence.length:
                self.states.copy(sequence.states)
            else:
                self.states.clear()

    def end_token(self, sequence: SequenceKV) -> None:
        """Launches the copy of the states after a token into the copy of its sequence's that the step writes."""
        if self.states:
            assert sequence.states
            sequence.states.copy_next(self.states)
