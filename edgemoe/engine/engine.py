"""The engine: a store opened under limits, and steps of token rows through it.

One decode step, top to bottom: `Engine.step` runs transformers' layers; each MoE layer's router ends in
`experts.experts_forward`, for a single token on a CPU in `token_experts.TokenExperts`, which asks
`prefetch.fetcher.Fetcher` for the experts that it does not hold; that pins the hits of `cache.plane_tier.PlaneTier`,
reserves blocks for the misses, reads them through `storage.reader.RecordReader` into their `storage.forms` shape,
publishes and hands out leases; `kernels.native` computes from each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from cache.budget import Budget
from edgemoe.engine.cpu_offload import cpu_experts
from edgemoe.engine.model_runner import Passes
from edgemoe.experts.layer import ExpertRunner
from edgemoe.kernels.base import ExpertKernel
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.build import build_model, skeleton
from edgemoe.machine.out_of_memory import taking
from edgemoe.machine.process import (
    freeze_existing_objects,
    peak_resident_bytes,
    reset_peak,
    resident_bytes,
    return_free_memory,
)
from edgemoe.memory.plan import PREFILL_ROWS, MemoryPlan
from edgemoe.memory.tiers import open_tiers
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.levels import ExpertUse, LevelPolicy
from edgemoe.policy.settings import BULK_READERS, RunSettings
from prefetch.base import TransferCounts
from prefetch.fetcher import Fetcher
from prefetch.warm import fill
from storage.base import ExpertKey, ResidentForm
from storage.errors import UserError
from storage.reader import RecordReader

__all__ = ["Engine", "StoreModel"]

FILL_BYTES = 1 << 26
"""Of experts read together into free room: enough for every reader, and no long wait for whoever asks meanwhile."""


class Engine:
    """A model under limits. Used by one thread at a time; `close` it, or use it as a context manager.

    From the first one on Python's garbage collector leaves out what was there before it
    (process.freeze_existing_objects).

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
        freeze_existing_objects()  # nothing of an engine's own: that is to go when it does
        model = skeleton(store.directory)
        return_free_memory()
        reset_peak()
        self.resident_before = resident_bytes()
        self.plan, self.shape, self.device = plan, store.shape, store.device
        layers = store.manifest.layers.items()
        everybody = [ExpertKey(i, e) for i, layer in layers for e in range(len(layer.records))]
        self._experts = sorted(everybody, key=lambda key: (key.expert, key.layer))
        self._place = store.device.place if store.device else torch.device("cpu")
        self.budget = Budget(plan.vram_limit_bytes)
        self._form = store.form
        self._reserve(store.form)
        if self.device:
            self.device.cap(plan.vram_limit_bytes - plan.driver_bytes)
        kernel = wrap_kernel(store.compute.kernel(store.manifest.geometry, store.compute.layout))
        policy = self._policy(settings)
        with ExitStack() as opened:
            tiers = open_tiers(store.form, plan, settings, self.device)
            opened.callback(tiers.close)
            self.vram, self.dram = tiers.vram, tiers.dram
            self._below = cpu_experts(store, model, plan, settings, tiers, wrap_kernel)
            reader = RecordReader.open(store.directory, store.manifest)
            opened.callback(reader.close)
            self._source = Fetcher(
                self.vram,
                self.dram,
                store.form,
                reader,
                route=tiers.route,
                workers=settings.readers,
                bulk=0 if self.device else BULK_READERS,
                speculate=settings.speculate,
                roomy=settings.cache and plan.holds_whole_model(store.form, store.shape.experts),
            )
            opened.callback(self._source.close)
            self._runner = ExpertRunner(self._source, kernel, policy, self.device)
            with taking(self.device, "dense weights", plan.minimum_vram_bytes):
                dense = store.directory / "dense.safetensors"
                self._model = build_model(model, dense, self._runner, self.device)
                self._passes = Passes(self._model, self._runner, plan)
            self._opened = opened.pop_all()

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
            UserError: the plan has no blocks for the highest level, or eviction, cache, readers, cpu_experts or
                graphs differ: those need another engine.
        """
        now = self.settings
        fixed = settings.with_(eviction=now.eviction, cache=now.cache, readers=now.readers)
        fixed = fixed.with_(cpu_experts=now.cpu_experts, graphs=now.graphs)
        if fixed != settings or settings.levels[0] > self.plan.levels[0]:
            raise UserError(
                f"{settings.name} was wanted",
                f"this engine was opened for levels up to {self.plan.levels[0]}, {now.eviction} and "
                f"{now.readers} readers",
                "Start again with those options",
            )
        self._source.settle()  # what is held was prepared for the levels of before
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
        del sequence.keys, sequence.values, sequence.slices, sequence.states
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

    def fill(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Reads experts into the fastest tier's free room, as many of every layer.

        Evicts nobody from it. An expert that cannot be read ends it without an error; whoever asks for that one gets
        it. Drops the counters. On any thread, while no other uses the engine (filling.filling).

        Args:
            go_on: False ends it with what is being read by then, some 0.1 s.
        """
        settings = self.settings
        if settings.cache:
            levels = [level for level in settings.levels if level]
            together = max(FILL_BYTES // self._form.bytes_at(levels[0]), 1)
            fill(self._source, self.vram, self._experts, levels, together, go_on)

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

    def watch(self, note: Callable[[int, torch.Tensor], None]) -> None:
        """Has `note` told of every layer and of what its router chooses, int64 [T, k], from the next step on."""
        self._source.settle()  # what is held goes by unseen
        self._runner.watch = note

    def take_counts(self) -> TransferCounts:
        """What moved between tiers since the last call."""
        return self._source.take_counts()

    def take_use(self) -> ExpertUse:
        """What experts were computed at since the last call."""
        taken, self._runner.use = self._runner.use, ExpertUse()
        return taken

    def close(self) -> None:
        """Stops the readers, closes the store and gives the tiers' memory back. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, step: Step, *, decode: bool, all_rows: bool) -> torch.Tensor:
        settings, below = self.settings, self._below
        if step.rows > 1 or settings.exact or settings.cpu_experts == "off":
            below = None
        self._runner.below, self._source.split = (below.kernel, below.split) if below else (None, None)
        return self._passes.run(step, decode=decode, all_rows=all_rows)
