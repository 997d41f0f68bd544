"""Runs one step through a model on a device."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from edgemoe.engine.model_runner import ModelRunner
from edgemoe.experts.runtime import ExpertRuntime
from edgemoe.experts.step import StepContext
from edgemoe.layers.graph.decode import GraphDecode
from edgemoe.machine.out_of_memory import taking
from edgemoe.memory.model_shape import ModelShape
from edgemoe.memory.plan import MemoryPlan


class DeviceModelRunner(ModelRunner):
    """A ModelRunner on a device. A step that finds too little memory is run once more after unused memory is freed.

    Args:
        model: the model, from layers.build.
        runtime: the state that its MoE layers share.
        shape: the sizes of the model.
        plan: its limits stand in error messages.
    """

    def __init__(self, model: Any, runtime: ExpertRuntime, shape: ModelShape, plan: MemoryPlan) -> None:
        self._shape = shape
        super().__init__(model, runtime)
        self._plan = plan

    def _make_fused(self, rows: int) -> Any:
        return GraphDecode.try_from(self._model, self._runtime, self._shape.kv, self._shape.top_k)

    def discard_ahead(self) -> None:
        """Waits for a token that ran ahead of its request, and discards it."""
        if isinstance(self.fused, GraphDecode):
            self.fused.discard()

    def _by_modules(self, context: StepContext) -> torch.Tensor:
        device = self._runtime.device
        assert device
        self.discard_ahead()
        return device.to_host([super()._by_modules(context)])[0]

    def _at_once(self, context: StepContext) -> torch.Tensor:
        device = self._runtime.device
        assert device
        logits = None
        with suppress(torch.OutOfMemoryError):
            logits = super()._at_once(context)
        if logits is None:  # out here, where no traceback keeps the first try's activations
            self._runtime.source.release_pins()
            device.free_unused()
            least = self._plan.vram_limit_bytes + self._plan.workspace_bytes
            with taking(device, f"a step of {context.step.rows} tokens", least):
                logits = super()._at_once(context)
        return logits
