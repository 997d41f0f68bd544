"""The keys and values of sequences, reserved from an engine's limit."""

from __future__ import annotations

from edgemoe.engine.limited_memory import LimitedMemory
from edgemoe.kv.blocks import whole_blocks
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape
from edgemoe.machine.device import Device
from edgemoe.machine.out_of_memory import taking
from edgemoe.memory.plan import MemoryPlan


class Sequences:
    """Makes sequences, and reserves their bytes as they grow. Used by the engine's thread, between two steps.

    Args:
        shape: sizes and format of keys and values.
        plan: the division of the limit.
        memory: where bytes are reserved; experts may lose blocks for them.
        device: the device that the model is computed on; None: the CPU.
    """

    def __init__(
        self, shape: KVShape, plan: MemoryPlan, memory: LimitedMemory, device: Device | None
    ) -> None:
        self._shape, self._plan, self._memory, self._device = shape, plan, memory, device

    def new(self, context: int | None = None, *, reserve: int | None = None) -> SequenceKV:
        """Makes a sequence with keys and values of its own, reserved from the budget.

        Args:
            context: most tokens of the sequence, at most the plan's; None: the plan's.
            reserve: its first tokens whose bytes are reserved now, at most the context; `reserve` adds to them.
                None: all. A device always takes all of them.

        Raises:
            DoesNotFit: the budget, or a device, has too little left.
        """
        context = context or self._plan.context
        assert context <= self._plan.context
        reserved = context if reserve is None else self._tokens_taken(reserve, context)
        nbytes = self._bytes_of(reserved, context)
        self._memory.reserve_kv(nbytes)
        place = self._device.place if self._device else "cpu"
        try:
            with taking(self._device, "keys and values", self._plan.minimum_vram_bytes):
                return SequenceKV(self._shape, context, place, reserved=reserved)
        except BaseException:
            self._memory.release_kv(nbytes)
            raise

    def bytes_to_reserve(self, tokens: int, sequence: SequenceKV | None = None) -> int:
        """Bytes that the first `tokens` tokens of a sequence need in addition to its reserved bytes.

        Args:
            tokens: number of tokens, at most the context.
            sequence: the sequence; None: a new one with the plan's context.
        """
        context = sequence.context if sequence else self._plan.context
        nbytes = self._bytes_of(self._tokens_taken(tokens, context), context)
        return max(nbytes - self.bytes_of(sequence), 0) if sequence else nbytes

    def bytes_of(self, sequence: SequenceKV) -> int:
        """Bytes of the budget that a sequence has reserved."""
        return self._bytes_of(sequence.reserved, sequence.context)

    def reserve(self, sequence: SequenceKV, tokens: int) -> None:
        """Reserves the bytes of a sequence's first `tokens` tokens, and of the rest of their last block.

        Experts may lose blocks (LimitedMemory).

        Raises:
            DoesNotFit: the budget has too little left; the sequence is as before.
        """
        self._memory.reserve_kv(self.bytes_to_reserve(tokens, sequence))
        sequence.reserved = max(sequence.reserved, self._tokens_taken(tokens, sequence.context))

    def crop(self, sequence: SequenceKV, tokens: int) -> int:
        """Drops the tokens after a sequence's first `tokens`, and returns the memory of blocks that are then empty.

        Returns:
            the number of tokens that are left, as SequenceKV.crop.
        """
        left, before = sequence.crop(tokens), self.bytes_of(sequence)
        if not self._device:
            sequence.return_behind(min(self._tokens_taken(left, sequence.context), sequence.reserved))
            self._memory.release_kv(before - self.bytes_of(sequence))
        return left

    def end(self, sequence: SequenceKV) -> None:
        """Frees a sequence's keys and values; experts get blocks back. The sequence must not be used any more."""
        del sequence.keys, sequence.values, sequence.stored, sequence.slices, sequence.states, sequence.index
        del sequence.windowed, sequence.window_rows
        self._memory.release_kv(self.bytes_of(sequence))

    def _tokens_taken(self, tokens: int, context: int) -> int:
        """Tokens whose memory a sequence of `tokens` takes."""
        return context if self._device else whole_blocks(tokens, context)

    def _bytes_of(self, tokens: int, context: int) -> int:
        return self._shape.bytes_for(tokens) if self._device else self._shape.bytes_in_pages(tokens, context)
