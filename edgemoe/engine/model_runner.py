"""Runs one step through the model.

There are two paths. New tokens, one a sequence, through a model of a family with fused_gqa take layers.fused_decode, on
a GPU a single one layers.graph.decode. Every other step, a prompt's step of one token too, and one whose experts a
study chooses, goes through transformers' modules, whose attention and experts are this program's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from edgemoe.errors import NotFinite
from edgemoe.experts.layer import ExpertRuntime
from edgemoe.families.table import known_family
from edgemoe.kernels import threads
from edgemoe.kv.step import Step, StepKV
from edgemoe.layers.fused_decode import FusedDecode
from edgemoe.layers.graph.decode import GraphDecode
from edgemoe.layers.row_blocks import in_row_blocks
from edgemoe.machine.sigint import DeferredInterrupt
from edgemoe.policy.importance import attention_kind, needs_attention
from edgemoe.policy.levels import LevelPolicy


class ModelRunner:
    """Runs steps on the CPU. Used by the engine's thread.

    Args:
        model: of layers.build.
        runtime: of its experts.
        rows: most sequences of a step of new tokens that is fused.
    """

    def __init__(self, model: Any, runtime: ExpertRuntime, rows: int = 1) -> None:
        self._model, self._runtime = model, runtime
        self._place = runtime.device.place if runtime.device else torch.device("cpu")
        family = known_family(model.config.model_type)
        parts = model, family.fused_gqa, runtime
        self._fused = FusedDecode.try_from(*parts, rows) or GraphDecode.try_from(*parts)
        if runtime.device is None:
            in_row_blocks(model)  # behind the fused paths, which look at the modules themselves

    def configure(self, policy: LevelPolicy) -> None:
        """Sets the policy of the steps that follow."""
        self._runtime.policy = policy
        if self._fused:
            self._fused.configure(policy)

    def run(self, step: Step, *, all_rows: bool) -> torch.Tensor:
        """Runs a step's rows and appends them to their sequences.

        Args:
            step: of sequences with free places.
            all_rows: logits after every row; otherwise after each segment's last.

        Returns:
            float32 [rows or segments, vocab], in RAM.

        Raises:
            ContextExceeded, DoesNotFit, NotFinite, DamagedData: as Engine.step; no sequence has changed.
        """
        settings = self._runtime.policy.settings
        ranked = len(settings.scheduled) > 1 and not settings.priced
        scored = ranked and not step.decodes and needs_attention(settings.importance)
        kv = StepKV(step, signal=attention_kind(settings.importance) if scored else None)
        logits = self._logits(step, kv, all_rows=all_rows)
        # Their sum is checked in a fraction of the time; it can overflow where no logit does.
        if not (bool(logits.sum().isfinite()) or bool(logits.isfinite().all())):
            raise self._not_finite(step, kv, logits)
        kv.commit()
        return logits

    def _logits(self, step: Step, kv: StepKV, *, all_rows: bool) -> torch.Tensor:
        """The logits of a step, in RAM."""
        self._runtime.step = kv
        # One context for all layers: setting a signal's handler takes longer than a layer's Python otherwise.
        with DeferredInterrupt(), torch.inference_mode(), threads.for_step():
            fused = None if self._runtime.reroute else self._fused
            if fused and kv.decode and step.rows == len(step.segments) <= fused.most_rows:
                return fused([segment.tokens[0] for segment in step.segments], kv)
            return self._through_modules(step, kv, all_rows=all_rows)

    def _through_modules(self, step: Step, kv: StepKV, *, all_rows: bool) -> torch.Tensor:
        """float32 [rows or segments, vocab], where the model is."""
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

    def _not_finite(self, step: Step, kv: StepKV, logits: torch.Tensor) -> NotFinite:
        """Runs the step once more through transformers' modules, to name the first layer that went wrong."""
        bad: list[int] = []

        def look(layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if not bad and not bool(torch.isfinite(hidden).all()):
                bad.append(layer)

        layers: Any = self._model.get_submodule("model.layers")
        hooks = [layer.register_forward_hook(partial(look, i)) for i, layer in enumerate(layers)]
        again = self._runtime.step = StepKV(step, signal=kv.signal)
        try:
            with DeferredInterrupt(), torch.inference_mode(), threads.for_step():
                self._through_modules(step, again, all_rows=False)
        finally:
            for hook in hooks:
                hook.remove()
        where = f"layer {bad[0]}" if bad else "the head"
        return NotFinite(
            "finite logits",
            f"NaN or infinity, first in {where}'s output",
            "run `edgemoe verify` on the store; if it is whole, the checkpoint is damaged",
            segments=_segments_of(step, logits.isfinite().all(1).logical_not()),
        )


def _segments_of(step: Step, bad: torch.Tensor) -> tuple[int, ...]:
    """The segments that some rows of a step's logits belong to.

    Args:
        step: whose logits these are.
        bad: bool [rows or segments].
    """
    owners: Sequence[int] = range(len(step.segments))
    if len(bad) == step.rows:
        owners = [i for i, segment in enumerate(step.segments) for _ in segment.tokens]
    return tuple(sorted({owners[row] for row in bad.nonzero().flatten().tolist()}))
