"""Runs one step through the model.

There are two paths. New tokens, one per sequence, take layers.fused_decode where the model is of a family with
fused_gqa, and on a GPU layers.graph.decode. Every other step, a prompt's step of one token too, and one whose experts a
study chooses, goes through transformers' modules, whose attention and experts are this program's. On a CPU a prompt's
step pauses after each layer, so that other steps can run.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from edgemoe.errors import NotFinite
from edgemoe.experts.runtime import ExpertRuntime
from edgemoe.experts.step import StepContext
from edgemoe.families.table import traits_of
from edgemoe.kernels import torch_rules
from edgemoe.kv.rotary_lengths import RotaryLengths
from edgemoe.layers.fused_decode import FusedDecode
from edgemoe.layers.head_decode import HeadDecode
from edgemoe.layers.picture_rows import add_after_layers, rows_of_step
from edgemoe.layers.resumable import LayerByLayer
from edgemoe.layers.rotary_length import RotaryLength
from edgemoe.layers.row_blocks import in_row_blocks
from edgemoe.machine.sigint import DeferredInterrupt

if TYPE_CHECKING:
    from edgemoe.engine.drafts.head_runner import HeadRunner
    from edgemoe.kv.step import Step


class ModelRunner:
    """Runs steps on the CPU. Used by the engine's thread.

    Args:
        model: the model, from layers.build.
        runtime: the state that its MoE layers share.
        rows: the largest number of tokens of a fused step of new tokens.
        head: the head for further tokens, from layers.head, and the number of its layer; None: it is not used.

    Attributes:
        fused: runs steps of new tokens through all layers at once; None: the modules run them.
        head_decode: runs the head; None: it is not used, or has no list of operations.
        head: guesses with it, once load_model has made it; None: it is not used.
    """

    def __init__(
        self, model: Any, runtime: ExpertRuntime, rows: int = 1, head: tuple[Any, int] | None = None
    ) -> None:
        self._model, self._runtime = model, runtime
        self._place = runtime.device.place if runtime.device else torch.device("cpu")
        self._lengths = RotaryLength(model) if RotaryLengths.of(model.config.to_dict()) else None
        self.fused = self._make_fused(rows)
        self.head_decode: HeadDecode | None = None
        self.head: HeadRunner | None = None
        if head:
            traits = traits_of(model.config.model_type)
            self.head_decode = HeadDecode.try_from(head[0], traits.fused_gqa, runtime, rows, head[1])
        self._layers: LayerByLayer | None = None
        add_after_layers(model)
        in_row_blocks(model)  # after the fused paths, which look at the modules themselves
        if runtime.device is None:
            self._layers = LayerByLayer(model)

    def _make_fused(self, rows: int) -> Any:
        """Makes what runs steps of new tokens through all layers at once; None: nothing does."""
        traits = traits_of(self._model.config.model_type)
        return FusedDecode.try_from(self._model, traits.fused_gqa, self._runtime, rows)

    def run(self, context: StepContext) -> Generator[int, None, None]:
        """Runs a step's rows and appends them to their sequences; its context has the logits then.

        Yields the number of each layer of a prompt's step on a CPU, once it is done. Other steps may run before the
        caller goes on; closing the generator ends the step, and no sequence has changed.

        Raises:
            ContextExceeded, DoesNotFit, NotFinite, DamagedData: as Engine.step; no sequence has changed.
        """
        if self._lengths:
            self._lengths.tokens = max(max(s.whole, s.length + rows) for s, _, rows in context.kv.spans)
        logits = yield from self._logits(context)
        # Their sum is checked in a fraction of the time; it can overflow where no logit does.
        if not (bool(logits.sum().isfinite()) or bool(logits.isfinite().all())):
            raise self._not_finite(context, logits)
        context.kv.commit()
        context.logits = logits

    def _logits(self, context: StepContext) -> Generator[int, None, torch.Tensor]:
        """The logits of a step, in RAM."""
        if self._layers and not context.decode:
            return (yield from self._layer_by_layer(self._layers, context))
        with self._running(context):
            return self._at_once(context)

    def _at_once(self, context: StepContext) -> torch.Tensor:
        step = context.step
        fused = None if context.study.reroute or context.study.modules else self.fused
        if fused and context.remapping and not fused.remaps:
            fused = None
        if fused and context.policy.settings.compensation and not fused.compensates:
            fused = None
        if fused and step.pictured and not fused.turns:
            fused = None
        if fused and step.one_token_each and step.rows <= fused.most_rows:
            logits: torch.Tensor = fused([t for segment in step.segments for t in segment.tokens], context)
            return logits
        return self._by_modules(context)

    def discard_ahead(self) -> None:
        """Discards what has been computed ahead of its request; in RAM nothing is."""

    def _by_modules(self, context: StepContext) -> torch.Tensor:
        """The logits of a step through transformers' modules, in RAM."""
        return _float_logits(self._model(**self._inputs(context)))

    def _layer_by_layer(
        self, layers: LayerByLayer, context: StepContext
    ) -> Generator[int, None, torch.Tensor]:
        """Runs a prompt's step, and pauses after each layer."""
        work = layers.run(self._inputs(context), lambda state: context.keep_states(state[0]))
        while True:
            with self._running(context):
                try:
                    layer = next(work)
                except StopIteration as end:
                    return _float_logits(end.value)
            yield layer

    @contextmanager
    def _running(self, context: StepContext) -> Iterator[None]:
        """The state of this thread while a part of a step is computed.

        One block for all layers of a decode step: setting a signal's handler takes longer than a layer's Python.
        """
        with DeferredInterrupt(), torch.inference_mode(), torch_rules.one_thread(), context.entered():
            yield

    def _inputs(self, context: StepContext) -> dict[str, Any]:
        """The named arguments of the model's `forward` for a step."""
        step, kv = context.step, context.kv
        last = [row + rows - 1 for _, row, rows in kv.spans]
        wanted = range(step.rows) if context.all_rows else last

        return rows_of_step(self._model, context, self._place) | {
            "past_key_values": kv,
            "use_cache": True,
            "logits_to_keep": torch.tensor(wanted, device=self._place),
            "kv": kv,
        }

    def _not_finite(self, context: StepContext, logits: torch.Tensor) -> NotFinite:
        """Runs the step once more through transformers' modules, to name the first layer that went wrong."""
        bad: list[int] = []

        def look(layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if not bad and not bool(torch.isfinite(hidden).all()):
                bad.append(layer)

        layers: Any = self._model.get_submodule("model.layers")
        hooks = [layer.register_forward_hook(partial(look, i)) for i, layer in enumerate(layers)]
        try:
            with self._running(context):
                self._by_modules(context)
        finally:
            for hook in hooks:
                hook.remove()
        where = f"layer {bad[0]}" if bad else "the head"
        return NotFinite(
            "finite logits",
            f"NaN or infinity, first in {where}'s output",
            "run `edgemoe verify` on the store; if it is whole, the checkpoint is damaged",
            segments=_segments_of(context.step, logits.isfinite().all(1).logical_not()),
        )


def _float_logits(output: Any) -> torch.Tensor:
    """float32 [rows or segments, vocab], where the model is."""
    logits: torch.Tensor = output.logits[0].float()
    return logits


def _segments_of(step: Step, bad: torch.Tensor) -> tuple[int, ...]:
    """The segments that some rows of a step's logits belong to.

    Args:
        step: the step that gave the logits.
        bad: bool [rows or segments].
    """
    owners: Sequence[int] = range(len(step.segments))
    if len(bad) == step.rows:
        owners = [i for i, segment in enumerate(step.segments) for _ in segment.tokens]
    return tuple(sorted({owners[row] for row in bad.nonzero().flatten().tolist()}))
