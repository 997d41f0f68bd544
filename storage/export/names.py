"""The names of a model family's tensors in the checkpoints that an export writes."""

from __future__ import annotations

from typing import Protocol

from edgemoe.storage.convert.expert_weights import ExpertNames


class ExportNames(ExpertNames, Protocol):
    """Names of a family's tensors in the checkpoints that engines load."""

    @property
    def model_type(self) -> str:
        """The model_type of config.json."""

    @property
    def fused_checkpoints(self) -> bool:
        """Whether checkpoints of the Hub have the experts of a layer in one tensor."""

    @property
    def quantized_as(self) -> ExportNames | None:
        """The family without multipliers in whose form engines load quantized experts; None: this one."""

    def router(self, layer: int) -> str:
        """The name in a checkpoint of the Hub of a layer's router weight."""

    def in_checkpoint(self, name: str) -> str:
        """The name in a checkpoint of the Hub of a dense tensor."""
