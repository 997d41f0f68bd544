"""The engine: a store opened under limits, and steps of token rows through it.

One decode step, top to bottom: `Engine.step` runs transformers' layers; each MoE layer's router ends in
`experts.experts_forward`, which asks `prefetch.fetcher.Fetcher` for its experts; that pins the hits of
`cache.plane_tier.PlaneTier`, reserves blocks for the misses, reads them through `storage.reader.RecordReader`
into their `storage.forms` shape, publishes and hands out leases; `kernels.native` computes from each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cache.budget import Budget
from edgemoe.dense import dense_bytes, widest_matrix
from edgemoe.device_memory import taking
from edgemoe.experts import ExpertRunner
from edgemoe.families import family_of
from edgemoe.importance import attention_kind, needs_attention
from edgemoe.kernels import threads
from edgemoe.kernels.base import ExpertKernel
from edgemoe.kernels.choice import Compute, compute
from edgemoe.kv import SequenceKV, StepKV
from edgemoe.model import build_model, skeleton
from edgemoe.plan import PREFILL_ROWS, MemoryPlan, ModelShape, make_plan
from edgemoe.policy import ExpertUse, LevelPolicy
from edgemoe.process import peak_resident_bytes, reset_peak, resident_bytes
from edgemoe.settings import RunSettings
from edgemoe.step import Segment, Step, StepState
from edgemoe.tiers import open_tiers
from prefetch.base import TransferCounts
from prefetch.fetcher import Fetcher
from storage.base import ResidentForm
from storage.checkpoint import bounded_config
from storage.device import Device
from storage.errors import NotFinite, UserError
from storage.layout import LAYOUTS
from storage.manifest import Manifest
from storage.reader import RecordReader
from storage.untrusted import read_json


@dataclass(frozen=True)
class StoreModel:
    """A store as found on disk, before anything is loaded."""

    directory: Path
    manifest: Manifest
    config: dict[str, Any]
    shape: ModelShape
    form: ResidentForm
    compute: Compute
    device: Device | None = None
    """Where it will be computed; None: on the CPU."""

    @classmethod
    def open(cls, directory: Path, device: Device | None = None) -> StoreModel:
        """Reads store.json, config.json and the dense header.

        Raises:
            UserError, BadManifest, BadHeader, ModelRefused: naming what is wrong.
        """
        manifest = Manifest.load(directory)
        config = bounded_config(read_json(directory, "config.json"))
        family = family_of(config)
        shape = ModelShape(
            layers=config["num_hidden_layers"],
            experts=sum(len(layer.records) for layer in manifest.layers.values()),
            experts_per_layer=family.experts(config),
            top_k=config[family.top_k_key],
            hidden=config["hidden_size"],
            intermediate=config[family.intermediate_key],
            heads=config["num_attention_heads"],
            kv=family.kv(config),
            widest=widest_matrix(directory / "dense.safetensors", config["vocab_size"]),
            vocab=config["vocab_size"],
            dense_bytes=dense_bytes(directory / "dense.safetensors"),
        )
        way = compute(device.place if device else "cpu")
        if manifest.layout != way.layout.name:
            logging.getLogger("edgemoe").warning(
                "%s is in layout %s, and the kernel here wants %s: every expert is re-laid out as it is read, "
                "which is several times slower. Convert the model again with --layout %s",
                directory,
                manifest.layout,
                way.layout.name,
                way.layout.name,
            )
        form = way.form(manifest.geometry, LAYOUTS[manifest.layout], way.layout)
        return cls(directory, manifest, config, shape, form, way, device)

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes of dense weights that one decoded token reads: all but the embedding's other rows.

        A tied embedding is read whole, as the head.
        """
        if self.config.get("tie_word_embeddings"):
            return self.shape.dense_bytes
        return self.shape.dense_bytes - self.shape.vocab * self.shape.hidden * self.manifest.dense_bits // 8

    def default_context(self) -> int:
        """Tokens of context where none was asked: what the model was made for, at most 4096."""
        return min(int(self.config.get("max_position_embeddings", 4096)), 4096)

    def plan(
        self,
        *,
        vram_limit: int | None,
        dram_limit: int = 0,
        settings: RunSettings | None = None,
        context: int | None = None,
    ) -> MemoryPlan:
        """See plan.make_plan; settings default to everything at the store's highest level, context to the model's."""
        settings = settings or RunSettings(levels=(self.manifest.max_level,))
        if settings.levels[0] > self.manifest.max_level:
            raise UserError(
                f"level {settings.levels[0]} was wanted",
                f"{self.directory} was converted with --max-level {self.manifest.max_level}",
                "Ask for a lower level, or convert the model again with a higher one",
            )
        return make_plan(
            self.shape,
            self.manifest.geometry,
            self.form,
            vram_limit=vram_limit,
            dram_limit=dram_limit,
            settings=settings,
            context=context or self.default_context(),
            device=self.device,
        )


class Engine:
    """A model under limits. Used by one thread; `close` it, or use it as a context manager.

    Args:
        store: an opened store.
        plan: made from it and `settings`; every byte of it is reserved here before anything is loaded.
        settings: how to run it; `configure` changes them later.
        wrap_kernel: put around the kernel, to watch it.
    """

    def __init__(
        self,
        store: StoreModel,
        plan: MemoryPlan,
        settings: RunSettings,
        *,
        wrap_kernel: Callable[[ExpertKernel], ExpertKernel] = lambda kernel: kernel,
    ) -> None:
        model = skeleton(store.directory)
        reset_peak()
        self.resident_before = resident_bytes()
        self.plan, self.shape, self.device = plan, store.shape, store.device
        self._place = store.device.place if store.device else torch.device("cpu")
        self.budget = Budget(plan.vram_limit_bytes)
        self._reserve(store.form)
        if self.device:
            self.device.cap(plan.vram_limit_bytes - plan.driver_bytes)
        # Before the readers: what fails after them has to end them.
        kernel = wrap_kernel(store.compute.kernel(store.manifest.geometry, store.compute.layout))
        policy = self._policy(settings)
        tiers = open_tiers(store.form, plan, settings, self.device)
        self.vram, self.dram = tiers.vram, tiers.dram
        self._reader = RecordReader.open(store.directory, store.manifest)
        self._source = Fetcher(
            self.vram,
            self.dram,
            store.form,
            self._reader,
            route=tiers.route,
            workers=settings.readers,
            speculate=settings.speculate,
        )
        self._runner = ExpertRunner(self._source, kernel, policy)
        try:
            with taking(self.device, "dense weights", plan.minimum_vram_bytes):
                dense = store.directory / "dense.safetensors"
                self._model = build_model(model, dense, self._runner, self.device)
        except BaseException:
            self.close()
            raise

    def _reserve(self, form: ResidentForm) -> None:
        """Takes from the budget what the plan has for all but sequences."""
        plan = self.plan
        planes = sum(kind.size * plan.vram_blocks.get(kind.name, 0) for kind in form.kinds)
        for name, size in (
            ("driver", plan.driver_bytes),
            ("dense", plan.dense_bytes),
            ("workspace", plan.workspace_bytes),
            ("planes", planes),
        ):
            self.budget.reserve(name, size)

    @property
    def settings(self) -> RunSettings:
        """What the next step runs with."""
        return self._runner.policy.settings

    def configure(self, settings: RunSettings) -> None:
        """Changes levels, retention, importance, depth, exactness and look-ahead from the next step on.

        Raises:
            UserError: the plan has no blocks for the highest level, or eviction, cache or readers differ:
                those need another engine.
        """
        now = self.settings
        fixed = settings.with_(eviction=now.eviction, cache=now.cache, readers=now.readers)
        if fixed != settings or settings.levels[0] > self.plan.levels[0]:
            raise UserError(
                f"{settings.name} was wanted",
                f"this engine was opened for levels up to {self.plan.levels[0]}, {now.eviction} and "
                f"{now.readers} readers",
                "Start again with those options",
            )
        self._source.mode = settings.speculate
        self._runner.policy = self._policy(settings)

    def _policy(self, settings: RunSettings) -> LevelPolicy:
        return LevelPolicy(settings, self.shape.layers, self.shape.experts_per_layer)

    def new_sequence(self) -> SequenceKV:
        """A sequence with a KV for the plan's context, reserved from the budget.

        Raises:
            DoesNotFit: the budget, or a device, has not so much left.
        """
        self.budget.reserve("kv", self.plan.kv_bytes)
        try:
            with taking(self.device, "keys and values", self.plan.minimum_vram_bytes):
                return SequenceKV(self.shape.kv, self.plan.context, self._place)
        except BaseException:
            self.budget.release("kv", self.plan.kv_bytes)
            raise

    def end_sequence(self, sequence: SequenceKV) -> None:
        """Gives a sequence's KV back to the budget. It must not be used any more."""
        del sequence.keys, sequence.values, sequence.states
        self.budget.release("kv", self.plan.kv_bytes)

    def step(self, step: Step) -> torch.Tensor:
        """Runs the rows of a step and appends them to their sequences.

        Returns:
            float32 [segments, vocab], in RAM: the logits after each segment's last token.

        Raises:
            ContextExceeded: a sequence has no room; nothing was run.
            DoesNotFit: a device's memory does not do for it; no sequence has changed.
            NotFinite: naming the first layer whose output is not finite; no sequence has changed.
            DamagedData: a read failed; no sequence has changed.
        """
        return self._run(step, decode=step.decodes, all_rows=False)

    def all_logits(self, sequence: SequenceKV, tokens: Sequence[int], *, decode: bool) -> torch.Tensor:
        """Appends at most PREFILL_ROWS tokens; returns the logits after each of them, float32 [tokens, vocab].

        With `decode` every token's levels are chosen by its own gate weights, as if it had come alone;
        unless exact, it is computed from the most planes that any of them asked for.

        Raises:
            as step.
        """
        return self._run(Step((Segment(sequence, tuple(tokens)),)), decode=decode, all_rows=True)

    def prefill(self, sequence: SequenceKV, tokens: Sequence[int]) -> torch.Tensor:
        """Appends a prompt of any length that the context holds; returns the last token's logits [vocab].

        Raises:
            UserError: there is no token.
            ContextExceeded: there are too many; nothing was run.
        """
        if not tokens:
            raise UserError("a prompt was wanted", "it has no tokens", "Ask something")
        sequence.require(len(tokens))
        for start in range(0, len(tokens), PREFILL_ROWS):
            logits = self.step(Step((Segment(sequence, tuple(tokens[start : start + PREFILL_ROWS])),)))
        return logits[0]

    def forget_experts(self) -> None:
        """Empties the expert tiers: the next step finds nothing resident."""
        self._source.settle()
        for tier in (self.vram, self.dram):
            if tier is not None:
                for key in tier.resident():
                    tier.drop(key)

    def peak_bytes(self) -> int:
        """The most that the model has taken of what --vram-limit limits.

        In RAM that is what the process has had resident, by the operating system's count, less what it had before
        loading; of a device, all that the process has had, by the driver's.
        """
        if self.device:
            return self.device.peak()
        return max(peak_resident_bytes() - self.resident_before, 0)

    def take_counts(self) -> TransferCounts:
        """What moved between tiers since the last call."""
        return self._source.take_counts()

    def take_use(self) -> ExpertUse:
        """What experts were computed at since the last call."""
        taken, self._runner.use = self._runner.use, ExpertUse()
        return taken

    def close(self) -> None:
        """Stops the readers and closes the store. Idempotent."""
        self._source.close()
        self._reader.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, step: Step, *, decode: bool, all_rows: bool) -> torch.Tensor:
        settings = self.settings
        wanted = len(settings.levels) > 1 and not decode and needs_attention(settings.importance)
        state = StepState(decode, attention_kind(settings.importance) if wanted else None)
        kv = StepKV(step, state)
        logits: torch.Tensor | None = None
        with suppress(torch.OutOfMemoryError):
            logits = self._forward(step, kv, all_rows=all_rows)
        if logits is None:  # out here, where no traceback keeps the first try's activations
            logits = self._once_more(step, kv, all_rows=all_rows)
        if not bool(torch.isfinite(logits).all()):
            raise self._not_finite(step, state)
        kv.commit()
        return logits

    def _once_more(self, step: Step, kv: StepKV, *, all_rows: bool) -> torch.Tensor:
        """A step for which a device had not enough memory, with all given back that is not in use.

        Raises:
            DoesNotFit: it still has not; the step has changed nothing, and a shorter one may do.
        """
        assert self.device
        self._source.settle()
        self.device.free_unused()
        least = self.plan.vram_limit_bytes + self.plan.workspace_bytes
        with taking(self.device, f"a step of {step.rows} tokens", least):
            return self._forward(step, kv, all_rows=all_rows)

    def _forward(self, step: Step, kv: StepKV, *, all_rows: bool) -> torch.Tensor:
        self._runner.state = kv.state
        ids = torch.tensor([[t for s in step.segments for t in s.tokens]], device=self._place)
        spans = [range(s.length, s.length + rows) for s, _, rows in kv.spans]
        positions = torch.tensor([[position for span in spans for position in span]], device=self._place)
        last = [row + rows - 1 for _, row, rows in kv.spans]
        with torch.inference_mode(), threads.for_step():
            output = self._model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=kv,
                use_cache=True,
                logits_to_keep=torch.tensor(range(step.rows) if all_rows else last, device=self._place),
                kv=kv,
            )
            return output.logits[0].float().cpu()  # type: ignore[no-any-return]

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
            self._forward(step, StepKV(step, state), all_rows=False)
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
