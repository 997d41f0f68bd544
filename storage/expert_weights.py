"""An expert's matrices, wherever a checkpoint keeps them: a tensor each, or fused over a layer's experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from storage.checkpoint import Checkpoint, Config
from storage.errors import DamagedData, MissingTensor, ModelRefused
from storage.record import MatrixSpec, RecordGeometry


class ExpertNames(Protocol):
    """What a model family calls its experts, and how many there are. Pure functions of their arguments."""

    def moe_layers(self, config: Config) -> Sequence[int]:
        """The layers that have experts, ascending."""

    def experts(self, config: Config) -> int:
        """Experts in each of them."""

    def intermediate(self, config: Config) -> int:
        """An expert's inner size I."""

    def separate(self, layer: int, expert: int) -> tuple[str, str, str]:
        """One expert's tensors: gate [I, H], up [I, H], down [H, I]."""

    def fused(self, layer: int) -> tuple[str, str]:
        """All experts' tensors: gate and up [E, 2I, H], gate first; down [E, H, I]."""

    def is_expert(self, name: str) -> bool:
        """Whether a tensor of this name holds expert weights, of any layer and expert."""

    def is_router(self, name: str) -> bool:
        """Whether a tensor of this name is a router's weight, which is never quantized."""


class ExpertWeights:
    """All experts of a checkpoint. Thread-safe.

    Attributes:
        layers: that have experts, ascending.
        count: experts in each of them.
        names: every tensor that holds expert weights.

    Raises:
        MissingTensor: an expert's tensor is not there, or not of the config's shape. No weight was read yet.
        ModelRefused: the config has no layer with experts, the checkpoint has experts that the config has
            not, or they are not floating point.
    """

    def __init__(self, checkpoint: Checkpoint, family: ExpertNames) -> None:
        self._checkpoint, self._family = checkpoint, family
        config = checkpoint.config
        self.layers = tuple(family.moe_layers(config))
        self.count = family.experts(config)
        self._hidden, self._inner = config["hidden_size"], family.intermediate(config)
        self.names = {name for name in checkpoint.names() if family.is_expert(name)}
        self._fused = {layer for layer in self.layers if family.fused(layer)[0] in self.names}
        if not self.layers:
            raise ModelRefused(
                f"a mixture of experts was wanted in {checkpoint.directory}",
                "config.json leaves no layer with experts",
                "Run a dense model with another program",
            )
        self._check_names()

    def geometry(self, max_level: int) -> RecordGeometry:
        """The record of each expert, stored up to `max_level` (8 or 4)."""
        gate_up = MatrixSpec.of("gate_up", 2 * self._inner, self._hidden)
        return RecordGeometry((gate_up, MatrixSpec.of("down", self._hidden, self._inner)), max_level)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a layer's expert weights on disk."""
        return sum(self._checkpoint.nbytes(name) for name, _ in self._wanted(layer))

    def read(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up [2I, H] (gate first) and down [H, I], in the checkpoint's dtype.

        Raises:
            DamagedData: a weight is NaN or infinite; names layer, expert and matrix.
            ModelRefused, TruncatedFile: as Checkpoint.read.
        """
        source = self._checkpoint
        if layer in self._fused:
            gate_up_name, down_name = self._family.fused(layer)
            gate_up, down = source.read_slice(gate_up_name, expert), source.read_slice(down_name, expert)
        else:
            gate, up, down_name = self._family.separate(layer, expert)
            gate_up, down = torch.cat((source.read(gate), source.read(up))), source.read(down_name)
        for matrix, weight in (("gate_up", gate_up), ("down", down)):
            if not all_finite(weight):
                raise DamagedData(
                    f"finite weights were wanted in layer {layer}, expert {expert}, matrix {matrix}",
                    f"{source.directory} has NaN or infinity there",
                    "Download the checkpoint again",
                )
        return gate_up, down

    def _wanted(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor that holds a layer's experts."""
        hidden, inner = self._hidden, self._inner
        if layer in self._fused:
            gate_up, down = self._family.fused(layer)
            yield gate_up, (self.count, 2 * inner, hidden)
            yield down, (self.count, hidden, inner)
            return
        for expert in range(self.count):
            gate, up, down = self._family.separate(layer, expert)
            yield from ((gate, (inner, hidden)), (up, (inner, hidden)), (down, (hidden, inner)))

    def _check_names(self) -> None:
        unclaimed = set(self.names)
        for layer in self.layers:
            for name, shape in self._wanted(layer):
                found = self._checkpoint.shape(name) if name in self.names else "not there"
                if found != shape:
                    raise MissingTensor(
                        f"tensor {name} of shape {shape} was wanted in {self._checkpoint.directory}",
                        f"it is {found}",
                        "Download the checkpoint again",
                    )
                self._checkpoint.dtype(name)
                unclaimed.discard(name)
        if unclaimed:
            raise ModelRefused(
                f"{self.count} experts in each of {len(self.layers)} layers were wanted by config.json",
                f"{len(unclaimed)} more tensors hold expert weights, first {min(unclaimed)}",
                "Check that config.json belongs to this checkpoint",
            )


def all_finite(weight: torch.Tensor) -> bool:
    """Whether a floating-point tensor is free of NaN and infinity. Needs no memory of the tensor's size."""
    if not weight.numel():
        return True
    low, high = torch.aminmax(weight)
    return bool(torch.isfinite(low) & torch.isfinite(high))
