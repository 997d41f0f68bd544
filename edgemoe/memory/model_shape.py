"""The sizes of a model that its memory depends on, and the memory that it is computed in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgemoe.kv.shape import KVShape
from edgemoe.machine.device import Device
from edgemoe.storage.base import ResidentForm
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.vision.sizes import VisionSize


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that a memory plan depends on, in elements unless named bytes."""

    layers: int
    experts: int
    """Over all layers."""
    experts_per_layer: int
    top_k: int
    hidden: int
    intermediate: int
    heads: int
    """Number of heads of queries."""
    kv: KVShape
    widest: int
    """Largest side of a dense matrix, except matrices with a row per word of the vocabulary."""
    vocab: int
    dense_bytes: int
    compiled_attention: bool = False
    """Whether the compiled kernel computes attention: it reads keys and values where they lie."""
    compiled_states: bool = False
    """Whether the compiled kernel computes linear attention and state spaces, token by token."""
    index_topk: int = 0
    """Tokens that a row attends to where an index chooses them; 0: all."""
    attention_copies: int = 2
    """Copies of a step's queries, keys and values that exist at once next to compiled attention."""
    vision: VisionSize | None = None
    """Bytes of the vision tower that is loaded; None: pictures are not taken."""
    up_to_four: int = 0
    """Experts, over all layers, of layers whose codes have at most 4 bits in a store up to level 8."""

    def share(self, level: int) -> float:
        """The share of experts, 0 to 1, that have the planes of a level."""
        return 1 - self.up_to_four / self.experts if level > 4 and self.experts else 1.0


@dataclass(frozen=True)
class PlannedModel:
    """A model as a memory plan sees it.

    Args:
        shape: the model's sizes.
        geometry: the sizes of the store's records.
        form: the form in which experts lie in the device's memory.
        device: the device that computes, with memory of its own; None: the CPU, in RAM.
    """

    shape: ModelShape
    geometry: RecordGeometry
    form: ResidentForm
    device: Device | None = None

    def bytes_of_all(self, level: int) -> int:
        """Bytes of all experts at a level, or at their layer's highest level if that is lower."""
        shape, low = self.shape, min(level, 4)
        limited = shape.up_to_four * (self.form.bytes_at(level) - self.form.bytes_at(low))
        return shape.experts * self.form.bytes_at(level) - limited

    @property
    def place(self) -> torch.device:
        """The device that computes, as torch names it."""
        return self.device.place if self.device else torch.device("cpu")
