"""One step through the model: run again where a device had no memory left, and blamed where it is not finite."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from edgemoe.engine.cuda_graphs import NewTokenGraph
from edgemoe.engine.fused_model import NewTokenModel
from edgemoe.experts.layer import ExpertRunner
from edgemoe.kernels import threads
from edgemoe.kv.sequence import StepKV
from edgemoe.kv.step import Step, StepState
from edgemoe.machine.out_of_memory import taking
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.importance import attention_kind, needs_attention
from prefetch.sigint import deferred_interrupt
from storage.errors import NotFinite


class Passes:
    """Runs steps through a model. Used by the engine's thread.

    Args:
        model: of model.build_model.
        runner: of its experts.
        plan: whose limits a step that needs too much memory is told of.
    """

    def __init__(self, model: nn.Module, runner: ExpertRunner, plan: MemoryPlan) -> None:
        self._model, self._runner, self._plan = model, runner, plan
        self._place = runner.device.place if runner.device else torch.device("cpu")
        graphs = runner.policy.settings.graphs
        self._graph = NewTokenGraph(model, runner.device) if graphs and runner.device else None
        self._quick: NewTokenModel | None = getattr(model, "of_one_token", None)

    def run(self, step: Step, *, decode: bool, all_rows: bool) -> torch.Tensor:
        """Runs a step's rows and appends them to their sequences.

        Args:
            step: whose sequences have room.
            decode: the phase that levels are chosen for.
            all_rows: logits after every row; otherwise after each segment's last.

        Returns:
            float32 [rows or segments, vocab], in RAM.

        Raises:
            ContextExceeded, DoesNotFit, NotFinite, DamagedData: as Engine.step; no sequence has changed.
        """
        settings = self._runner.policy.settings
        wanted = len(settings.levels) > 1 and not decode and needs_attention(settings.importance)
        state = StepState(decode, attention_kind(settings.importance) if wanted else None)
        kv = StepKV(step, state)
        logits: torch.Tensor | None = None
        with suppress(torch.OutOfMemoryError):
            logits = self._forward(step, kv, all_rows=all_rows)
        if logits is None:  # out here, where no traceback keeps the first try's activations
            logits = self._once_more(step, kv, all_rows=all_rows)
        # Their sum tells in a fraction of the time, but for one that is too large itself.
        if not (bool(logits.sum().isfinite()) or bool(logits.isfinite().all())):
            raise self._not_finite(step, state)
        kv.commit()
        return logits

    def _once_more(self, step: Step, kv: StepKV, *, all_rows: bool) -> torch.Tensor:
        """A step for which a device had not enough memory, with all given back that is not in use.

        Raises:
            DoesNotFit: it still has not; the step has changed nothing, and a shorter one may do.
        """
        device = self._runner.device
        assert device
        self._runner.source.settle()
        device.free_unused()
        least = self._plan.vram_limit_bytes + self._plan.workspace_bytes
        with taking(device, f"a step of {step.rows} tokens", least):
            return self._forward(step, kv, all_rows=all_rows)

    def _forward(self, step: Step, kv: StepKV, *, all_rows: bool) -> torch.Tensor:
        self._runner.state, device = kv.state, self._runner.device
        # One context for all layers: setting a signal's handler takes longer than a layer has of Python otherwise.
        with deferred_interrupt(), torch.inference_mode(), threads.for_step():
            logits = self._of_one_token(step, kv)
            if logits is None:
                logits = self._of_rows(step, kv, all_rows=all_rows)
            return device.to_host([logits])[0] if device else logits

    def _of_one_token(self, step: Step, kv: StepKV) -> torch.Tensor | None:
        """Logits of a step that there is a quicker way for; None: there is none."""
        if step.rows > 1 or kv.state.signal or kv.state.one_by_one:
            return None
        token = step.segments[0].tokens[0]
        if self._graph:
            return self._graph.run(token, kv)
        return self._quick(token, kv) if self._quick and self._quick.ready else None

    def _of_rows(self, step: Step, kv: StepKV, *, all_rows: bool) -> torch.Tensor:
        ids = torch.tensor([[t for s in step.segments for t in s.tokens]], device=self._place)
        spans = [range(s.length, s.length + rows) for s, _, rows in kv.spans]
        positions = torch.tensor([[position for span in spans for position in span]], device=self._place)
        last = [row + rows - 1 for _, row, rows in kv.spans]
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=kv,
            use_cache=True,
            logits_to_keep=torch.tensor(range(step.rows) if all_rows else last, device=self._place),
            kv=kv,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _not_finite(self, step: Step, state: StepState) -> NotFinite:
        """Runs the step once more, watching every layer, to name the first that went wrong."""
        bad: list[int] = []

        def watch(layer: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                if not bad and not bool(torch.isfinite(hidden).all()):
                    bad.append(layer)

            return hook

        layers: Any = self._model.get_submodule("model.layers")
        hooks = [layer.register_forward_hook(watch(i)) for i, layer in enumerate(layers)]
        try:
            again = replace(state, passed=0, one_by_one=True)
            self._forward(step, StepKV(step, again), all_rows=False)
        finally:
            for hook in hooks:
                hook.remove()
        where = (
            f"layer {bad[0]}'s output is the first with NaN or infinity"
            if bad
            else "only the head's output is not"
        )
        return NotFinite(
            "finite logits were wanted",
            where,
            "Run `edgemoe verify` on the store; if it is whole, the source checkpoint is damaged",
        )
