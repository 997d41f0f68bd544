"""Runs one step through a model on a device, with some of its experts on the CPU where that pays."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from edgemoe.engine.cpu_offload import CpuOffload
from edgemoe.engine.model_runner import ModelRunner
from edgemoe.experts.layer import ExpertRuntime
from edgemoe.kv.step import Step, StepKV
from edgemoe.machine.out_of_memory import taking
from edgemoe.memory.plan import MemoryPlan


class DeviceModelRunner(ModelRunner):
    """A ModelRunner on a device. A step that finds too little memory is run once more after unused memory is freed.

    Args:
        model: of layers.build.
        runtime: of its experts.
        plan: whose limits an error names.
        offload: computes experts of single tokens on the CPU; None: none are.
    """

    def __init__(
        self, model: Any, runtime: ExpertRuntime, plan: MemoryPlan, offload: CpuOffload | None
    ) -> None:
        super().__init__(model, runtime)
        self._plan, self._offload = plan, offload

    def run(self, step: Step, *, all_rows: bool) -> torch.Tensor:
        """Runs a step, as ModelRunner.run; only a new token's step that is not exact computes experts on the CPU."""
        settings = self._runtime.policy.settings
        alone = step.decodes and step.rows == 1
        offload = self._offload if alone and not settings.exact and settings.cpu_experts != "off" else None
        self._runtime.dram_kernel = offload.kernel if offload else None
        self._runtime.source.configure(settings.speculate, offload.split if offload else None)
        return super().run(step, all_rows=all_rows)

    def _logits(self, step: Step, kv: StepKV, *, all_rows: bool) -> torch.Tensor:
        device = self._runtime.device
        assert device
        logits = None
        with suppress(torch.OutOfMemoryError):
            logits = device.to_host([super()._logits(step, kv, all_rows=all_rows)])[0]
        if logits is None:  # out here, where no traceback keeps the first try's activations
            self._runtime.source.release_pins()
            device.free_unused()
            least = self._plan.vram_limit_bytes + self._plan.workspace_bytes
            with taking(device, f"a step of {step.rows} tokens", least):
                logits = device.to_host([super()._logits(step, kv, all_rows=all_rows)])[0]
        return logits
