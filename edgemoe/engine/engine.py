"""The engine: a store opened under limits, and steps of token rows through it.

One decode step, top to bottom: `Engine.step` -> `model_runner.ModelRunner.run` -> `layers.fused_decode`, which stops at
a layer with a missing expert -> `experts.layer.ExpertLayer.forward` -> `prefetch.fetcher.Fetcher.request`, which
reserves blocks in `cache.plane_tier.PlaneTier`, reads them through `storage.store.reader.RecordReader` into their
`storage.record.forms` shape and leases them -> `kernels.native` computes from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cached_property

import torch

from edgemoe.engine.device_runner import DeviceModelRunner
from edgemoe.engine.hot_experts import HotExperts
from edgemoe.engine.limited_memory import LimitedMemory
from edgemoe.engine.model_runner import ModelRunner
from edgemoe.errors import DoesNotFit, EdgemoeError, ModelRefused, NotFinite, UserError
from edgemoe.experts.held import HeldExperts
from edgemoe.experts.layer import ExpertProbe, ExpertRuntime, Reroute
from edgemoe.experts.output_errors import OutputErrors
from edgemoe.experts.use import ExpertUse
from edgemoe.families.table import known_family
from edgemoe.kernels.base import ExpertKernel
from edgemoe.kernels.compensators import Compensators
from edgemoe.kv.blocks import whole_blocks
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.build import build_model, skeleton
from edgemoe.machine.out_of_memory import taking
from edgemoe.machine.process import (
    file_backed_bytes,
    freeze_existing_objects,
    peak_resident_bytes,
    reset_peak,
    resident_bytes,
    return_free_memory,
)
from edgemoe.memory.plan import MemoryPlan
from edgemoe.memory.split import BlockSplit, require_sizes
from edgemoe.memory.tiers import form_of, open_tiers
from edgemoe.memory.workspace import long_step_bytes
from edgemoe.models.calibration import calibration_of
from edgemoe.models.plans.requirements import require_base_level
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.policy.damage import Damage
from edgemoe.policy.importance import PromptAttention
from edgemoe.policy.levels import LevelPolicy, SkipEveryExpert
from edgemoe.policy.settings import RunSettings
from edgemoe.policy.target import BitsController
from edgemoe.policy.tier_prices import TierPrices
from edgemoe.prefetch.base import ExpertSource
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.fetcher import Fetcher
from edgemoe.prefetch.workers import SCAN_WORKERS
from edgemoe.speed.tiers import copy_speed, read_speed
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.store.calibration import CALIBRATION_NAME, Calibration
from edgemoe.storage.store.manifest import DENSE_NAME
from edgemoe.storage.store.reader import RecordReader

__all__ = ["Engine", "StoreModel"]

RANDOM_TOKENS = 512
"""Tokens that experts are measured on where a store has no calibration."""

SPEED_SECONDS, SPEED_BYTES = 0.1, 1 << 22
"""Time that each tier's speed is measured for, and bytes of a copy: both buffers fit in any workspace."""

FIXED = ("eviction", "promotion", "cache", "readers", "compensators_limit")
"""Fields of RunSettings that an engine cannot change."""

_ABOVE_LOWEST = 0.01
"""Bits above those of the lowest level: fewer cannot be a mean of several levels."""

_log = logging.getLogger("edgemoe")


class Engine:
    """A model under limits. Used by one thread at a time; `close` it, or use it as a context manager.

    From the first engine on, Python's garbage collector leaves out the objects made before it.

    Args:
        store: an opened store.
        plan: made from it and `settings`; every byte of it is reserved here before anything is loaded.
        settings: how to run it; `configure` changes them later.
        wrap_kernel: wraps the kernel, to measure it.
        wrap_source: wraps the expert source, to measure it.
    """

    def __init__(
        self,
        store: StoreModel,
        plan: MemoryPlan,
        settings: RunSettings,
        *,
        wrap_kernel: Callable[[ExpertKernel], ExpertKernel] = lambda kernel: kernel,
        wrap_source: Callable[[ExpertSource], ExpertSource] = lambda source: source,
    ) -> None:
        freeze_existing_objects()  # before any object of an engine exists: these are collected with it
        model = skeleton(store.directory, store.config)
        return_free_memory()
        reset_peak()
        self.resident_before, files = resident_bytes(), file_backed_bytes()
        self.store, self.plan, self.shape, self.device = store, plan, store.shape, store.device
        self.damage: Damage | None = None
        """What fewer bits of each expert cost; None until settings go by it."""
        self._controller: BitsController | None = None
        self.hot: HotExperts | None = None
        """The hot experts, where precision follows hotness."""
        self._heat: Mapping[ExpertKey, float] = {}
        self._missed: float | None = None
        self._layers = sorted(store.manifest.layers)
        layers = store.manifest.layers.items()
        keys = [ExpertKey(i, e) for i, layer in layers for e in range(len(layer.records))]
        self._keys = sorted(keys, key=lambda key: (key.expert, key.layer))
        self._place = store.device.place if store.device else torch.device("cpu")
        form = form_of(store.form, settings)
        self.memory = LimitedMemory(
            plan, BlockSplit.of(store.shape, form, settings, store.known_damage(settings)), self._resize
        )
        self.budget = self.memory.budget
        kernel = wrap_kernel(store.compute.kernel(store.manifest.geometry, store.compute.layout))
        with ExitStack() as opened:
            if self.device:
                self.device.cap(plan.vram_limit_bytes - plan.driver_bytes)
                opened.callback(self.device.cap, None)
            tiers = open_tiers(form, plan, settings, self.device)
            opened.callback(tiers.close)
            self.vram, self.dram = tiers.vram, tiers.dram
            reader = RecordReader.open(store.directory, store.manifest)
            opened.callback(reader.close)
            compensators = self._compensators(settings)
            if compensators:
                opened.callback(compensators.close)  # behind the reads of the source
            fetcher = Fetcher(
                self.vram,
                self.dram,
                form,
                reader,
                path=tiers.path,
                workers=settings.readers,
                scan_workers=0 if self.device else SCAN_WORKERS,
            )
            self._source = wrap_source(fetcher)
            opened.callback(self._source.close)
            self._source.configure(settings.speculate)
            self._held = HeldExperts(fetcher, self.shape.layers, self.shape.experts_per_layer)
            # Damage may have to be measured, by steps of this engine.
            one = {"levels": settings.levels[:1], "bits": None, "tpot_target": None, "hotness": None}
            first = settings.with_(**one) if settings.priced or settings.hotness else settings
            self._runtime = ExpertRuntime(self._source, kernel, self._policy(first), self.device)
            self._use_compensators(compensators)
            with taking(self.device, "dense weights", plan.minimum_vram_bytes):
                file = store.manifest.files[DENSE_NAME]
                self._model = build_model(model, store.directory / DENSE_NAME, file, self._runtime)
                self._runner = (
                    DeviceModelRunner(self._model, self._runtime, plan)
                    if self.device
                    else ModelRunner(self._model, self._runtime, plan.parallel)
                )
            if not self.device:
                self._rehearse(fetcher)
                self.resident_before += max(file_backed_bytes() - files, 0)
            if settings != first:
                self.configure(settings)
            self._opened = opened.pop_all()

    def _compensators(self, settings: RunSettings) -> Compensators | None:
        """Opens the store's compensators, as far as the plan has bytes for them; None where settings use none."""
        if settings.compensation is None:
            return None
        store, budget = self.store, self.plan.compensators_resident_bytes
        return Compensators.of_store(store.directory, store.manifest, budget=budget, policy=settings.eviction)

    def _use_compensators(self, compensators: Compensators | None) -> None:
        self._runtime.compensators = compensators
        self._source.use_compensators(compensators.where if compensators else None)

    def _rehearse(self, source: ExpertSource) -> None:
        """Runs two tokens without experts, so that the pages of libraries which steps touch are resident from now on.

        They belong to the program and not to the model: peak_bytes counts them as resident before loading.
        """
        runtime, highest = self._runtime, self.settings.levels[0]
        settings = self.settings.with_(levels=(highest, 0), speculate="off", hotness=None)
        skipping = SkipEveryExpert(settings, self._layers, self.shape.experts_per_layer)
        sequence = SequenceKV(self.shape.kv, 2, self._place)
        runtime.source, runtime.policy, wrapped, policy = source, skipping, runtime.source, runtime.policy
        try:
            # Weights that are not finite are named by the first step of a user.
            with suppress(NotFinite):
                self._runner.run(Step((Segment(sequence, (0, 0), PromptAttention()),)), all_rows=False)
        finally:
            runtime.source, runtime.policy = wrapped, policy
        self.take_use()
        self.take_counts()

    def _resize(self, blocks: Mapping[str, int]) -> None:
        """Changes the number of blocks of the fastest tier."""
        self._source.resize(blocks)
        if self.hot:
            self.hot.resize(blocks)

    @property
    def settings(self) -> RunSettings:
        """The settings of the next step."""
        return self._runtime.policy.settings

    def configure(self, settings: RunSettings) -> None:
        """Changes levels, bits, retention, importance, depth, exactness, look-ahead and scan from the next step on.

        Levels that go by damage take it from the store's calibration. Without one it is measured here on random tokens.

        Raises:
            UserError: the plan has no blocks for the highest level, or eviction, promotion, cache, readers or the
                compensators' limit differ: those need another engine; or the family's routers cannot be remapped; or
                the engine has no compensators.
        """
        now = self.settings
        fixed = settings.with_(**{name: getattr(now, name) for name in FIXED})
        if fixed != settings or settings.levels[0] > self.plan.levels[0]:
            raise UserError(
                f"settings for levels up to {self.plan.levels[0]}, {now.eviction}, promotion {now.promotion} and "
                f"{now.readers} readers",
                settings.name,
                "start again with those options",
            )
        if settings.compensation:
            if self._runtime.compensators is None:
                raise UserError(
                    "compensators in memory",
                    settings.name,
                    f"start again with {settings.compensation.option}",
                )
            require_base_level(settings, self._runtime.compensators.level)
        if settings.priced:
            self.require_damage()
        policy = self._policy(settings)
        if settings.hotness:
            require_sizes(self.store.form, settings.levels)
        if (settings.levels, settings.tpot_target) != (now.levels, now.tpot_target):
            self._controller = self._controller_of(settings)
        self._source.configure(settings.speculate)
        if (settings.hotness, settings.levels) != (now.hotness, now.levels):
            self._source.release_pins()  # they were made for the levels before
            self._follow_hotness(settings)
        self._runner.configure(policy)

    def _follow_hotness(self, settings: RunSettings) -> None:
        """Makes what counts experts and moves their planes, or ends it."""
        if self.hot:
            self.hot.end()
        self.hot = self._runtime.choices = None
        if settings.hotness is None:
            return
        self.hot = HotExperts.of_blocks(settings, self.memory.blocks, self.store, self._source, self.vram)
        self.hot.start_from(self._heat)
        self._runtime.choices = self.hot.choices

    @staticmethod
    def _controller_of(settings: RunSettings) -> BitsController | None:
        """What adjusts the bits of new tokens to a wanted time; None: no setting wants it."""
        if settings.tpot_target is None:
            return None
        lowest = min(level for level in settings.levels if level)
        fewest = BITS_PER_WEIGHT[lowest] + (0 if 0 in settings.levels else _ABOVE_LOWEST)
        most = BITS_PER_WEIGHT[settings.levels[0]]
        return BitsController(settings.tpot_target, max(settings.mean_bits, fewest), (fewest, most))

    def observe_token(self, seconds: float) -> None:
        """Takes the time of a new token: with a tpot_target the bits of later tokens follow it.

        A target that the fewest bits miss is logged as a warning, once a target.
        """
        controller = self._controller
        if controller is None:
            return
        before = controller.bits
        controller.observe(seconds)
        if controller.bits != before:
            self.configure(self.settings.with_(bits=controller.bits))
        if controller.least and self._missed != controller.target:
            self._missed = controller.target
            _log.warning(
                "%.3g ms a token cannot be met: %.3g bits a weight take %.3g ms here: raise the limit",
                *(1000 * controller.target, controller.range[0], 1000 * controller.least),
            )

    def require_damage(self) -> None:
        """Reads or measures what fewer bits of each expert cost, if that is not known yet.

        Raises:
            UserError: it must be measured, and a sequence has the memory.
        """
        if self.damage is None:
            level = self.plan.levels[0]
            self.damage = Damage.of(
                calibration_of(self.store.directory, self.store.manifest, level) or self._measured()
            )

    def _policy(self, settings: RunSettings) -> LevelPolicy:
        if settings.hotness and self.device:
            found = f"--device {self.device.name}"
            raise UserError("a model on the CPU, for --policy hotness", found, "give --device cpu")
        if settings.remapping:
            self._require_gate("--lynx")
        tiers = None
        if settings.priced and not settings.exact:
            tiers = TierPrices(self._held.places, self._dram_price, settings.promotion == "whole")
        return LevelPolicy(settings, self._layers, self.shape.experts_per_layer, self.damage, tiers)

    @cached_property
    def _dram_price(self) -> float:
        """Seconds of a bit from DRAM as a fraction of those from the slowest tier that bits come from, measured now.

        Where both tiers together have a block for every plane, bits come from DRAM alone once they have been read.
        """
        if self.dram is None:
            return 1.0
        plan, kinds = self.plan, self.store.form.kinds_at(self.plan.levels[0])
        fastest = {} if self.device else plan.vram_blocks
        if all(fastest.get(k.name, 0) + plan.dram_blocks.get(k.name, 0) >= self.shape.experts for k in kinds):
            return 1.0
        with closing(RecordReader.open(self.store.directory, self.store.manifest)) as reader:
            read = read_speed(reader, self.store.manifest, plan.levels[0], SPEED_SECONDS)
        return min(read / copy_speed(self.device, SPEED_BYTES, SPEED_SECONDS), 1.0)

    def _require_gate(self, option: str) -> None:
        """Refuses an option that chooses experts again, where the family's routers do not choose by scores alone."""
        family = self.store.config["model_type"]
        if known_family(family).gate is None:
            wanted = f"a model whose routers choose by one score for each expert, for {option}"
            raise UserError(wanted, f"model_type {family}", f"leave {option} out")

    @contextmanager
    def compensated_by(self, compensators: Compensators) -> Iterator[None]:
        """Has the steps inside the block use other compensators than the store's; configure the engine inside it."""
        before = self._runtime.compensators
        self._use_compensators(compensators)
        try:
            yield
        finally:
            self._use_compensators(before)
            self.configure(self.settings.with_(compensation=None))

    @contextmanager
    def rerouted(self, rule: Reroute) -> Iterator[None]:
        """Has a rule choose the experts of every step inside the block, from the logits of the routers.

        Raises:
            UserError: the family's routers do not choose by one score for each expert.
        """
        self._require_gate("--study")
        self._runtime.reroute = rule
        try:
            yield
        finally:
            self._runtime.reroute = None

    def _measured(self) -> Calibration:
        """Measures every expert's error on random tokens; the result goes beside a store that has no calibration.

        Raises:
            UserError: a sequence takes the memory that a measurement needs.
        """
        store, directory, before = self.store, self.store.directory, self.settings
        _log.warning(
            "%s has no usable calibration: levels go by errors on random tokens; `edgemoe calibrate` measures on text",
            directory,
        )
        try:
            sequence = self.new_sequence()
        except DoesNotFit as error:
            found = f"{directory} without a calibration"
            action = "run `edgemoe calibrate` on it, or start again with these levels"
            raise UserError("what fewer bits of each expert cost", found, action) from error
        level = self.plan.levels[0]
        self.configure(
            before.with_(
                levels=(level,),
                bits=None,
                tpot_target=None,
                hotness=None,
                compensation=None,
                exact=True,
                speculate="off",
            )
        )
        errors = OutputErrors(sorted(store.manifest.layers), self.shape.experts_per_layer)
        enough = min(RANDOM_TOKENS, self.plan.context)
        rows = min(enough, self.plan.prefill_rows)
        tokens = torch.randint(self.shape.vocab, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
        try:
            with self.probed(errors):
                self.step(Step((Segment(sequence, tuple(tokens)),)))
        finally:
            self.end_sequence(sequence)
            self.forget_experts()
            self.configure(before)
        self.take_use()
        self.take_counts()
        made = errors.calibration(store.manifest.source, level, rows)
        keeps = rows == enough and level == store.manifest.max_level
        if keeps and not (directory / CALIBRATION_NAME).exists():
            with suppress(EdgemoeError):  # a store that only others may write to
                made.save(directory)
        return made

    @contextmanager
    def probed(self, probe: ExpertProbe) -> Iterator[None]:
        """Lets a probe measure the experts of every step of several rows inside the block."""
        self._runtime.probe = probe
        try:
            yield
        finally:
            self._runtime.probe = None

    def new_sequence(self, context: int | None = None, *, reserve: int | None = None) -> SequenceKV:
        """A sequence with a KV of its own, reserved from the budget.

        Args:
            context: its tokens, at most the plan's; None: the plan's.
            reserve: its first tokens whose bytes are reserved now, at most the context; `reserve_tokens` adds to them.
                None: all. A device always takes all of them.

        Raises:
            DoesNotFit: the budget, or a device, has too little left.
        """
        context = context or self.plan.context
        assert context <= self.plan.context
        reserved = context if reserve is None else self._tokens_taken(reserve, context)
        nbytes = self._kv_bytes_of(reserved, context)
        self.memory.reserve_kv(nbytes)
        try:
            with taking(self.device, "keys and values", self.plan.minimum_vram_bytes):
                return SequenceKV(self.shape.kv, context, self._place, reserved=reserved)
        except BaseException:
            self.memory.release_kv(nbytes)
            raise

    def _tokens_taken(self, tokens: int, context: int) -> int:
        """Tokens whose memory a sequence of `tokens` takes."""
        return context if self.device else whole_blocks(tokens, context)

    def bytes_to_reserve(self, tokens: int, sequence: SequenceKV | None = None) -> int:
        """Bytes that the first `tokens` tokens of a sequence take beyond those that it has reserved.

        Args:
            tokens: at most the context.
            sequence: None: a new one with the plan's context.
        """
        context = sequence.context if sequence else self.plan.context
        nbytes = self._kv_bytes_of(self._tokens_taken(tokens, context), context)
        return max(nbytes - self.bytes_of(sequence), 0) if sequence else nbytes

    def bytes_of(self, sequence: SequenceKV) -> int:
        """Bytes of the budget that a sequence has reserved."""
        return self._kv_bytes_of(sequence.reserved, sequence.context)

    def _kv_bytes_of(self, tokens: int, context: int) -> int:
        kv = self.shape.kv
        return kv.bytes_for(tokens) if self.device else kv.bytes_in_pages(tokens, context)

    def reserve_tokens(self, sequence: SequenceKV, tokens: int) -> None:
        """Reserves the bytes of a sequence's first `tokens` tokens, and of the rest of their last block.

        Between two steps: experts may lose blocks (LimitedMemory).

        Raises:
            DoesNotFit: the budget has too little left; the sequence is as before.
        """
        self.memory.reserve_kv(self.bytes_to_reserve(tokens, sequence))
        sequence.reserved = max(sequence.reserved, self._tokens_taken(tokens, sequence.context))

    def crop(self, sequence: SequenceKV, tokens: int) -> int:
        """Drops a sequence's tokens behind the first `tokens`, and returns the memory of blocks that are empty then.

        Returns:
            the number of tokens that are left, as SequenceKV.crop.
        """
        left, before = sequence.crop(tokens), self.bytes_of(sequence)
        if not self.device:
            sequence.return_behind(min(self._tokens_taken(left, sequence.context), sequence.reserved))
            self.memory.release_kv(before - self.bytes_of(sequence))
        return left

    def end_sequence(self, sequence: SequenceKV) -> None:
        """Frees a sequence's KV; experts get blocks back. The sequence must not be used any more."""
        del sequence.keys, sequence.values, sequence.slices, sequence.states
        self.memory.release_kv(self.bytes_of(sequence))

    def step(self, step: Step, *, all_rows: bool = False) -> torch.Tensor:
        """Runs the rows of a step and appends them to their sequences.

        Args:
            step: of at most the plan's prefill_rows, or as many rows as sequences.
            all_rows: logits after every row, for which the plan's scored_rows is the most that the workspace holds.

        Returns:
            float32 [segments or rows, vocab], in RAM: the logits after each segment's last token, or after each token.

        Raises:
            ContextExceeded: a sequence's context is too small; nothing was run.
            DoesNotFit: a device has too little memory; no sequence has changed.
            NotFinite: naming the first layer whose output is not finite, and the segments; no sequence has changed.
            DamagedData: a read failed; no sequence has changed.
            StepCancelled: as Step; no sequence has changed.
            ValueError: more rows, for which the plan has no workspace.
        """
        most = self.plan.prefill_rows
        if step.rows > max(most, len(step.segments)):
            raise ValueError(f"expected at most {most} rows in a step, got {step.rows}")
        hot, prompt = self.hot, not step.decodes
        long = self.plan.long_step_bytes
        if not all_rows:
            rows = step.rows if step.rows > len(step.segments) else 0
            long = min(long_step_bytes(self.shape, rows), long)
        with self.memory.long_step(long):
            if hot:
                hot.before_step(prompt=prompt)
            logits = self._runner.run(step, all_rows=all_rows)
            if hot:
                hot.after_step(step.rows, prompt=prompt)
        return logits

    def all_logits(
        self,
        sequence: SequenceKV,
        tokens: Sequence[int],
        *,
        decode: bool,
        prompt: PromptAttention | None = None,
    ) -> torch.Tensor:
        """Appends at most the plan's prefill_rows tokens; returns the logits after each, float32 [tokens, vocab].

        With `decode` every token's levels are chosen by its own gate weights, as in a step of its own; unless exact, an
        expert is computed at the highest level that any of the tokens wants. Without `decode` they are tokens of a
        `prompt`, which its steps share; None: they are all of it.

        Raises:
            as step.
        """
        attention = None if decode else prompt or PromptAttention()
        segment = Segment(sequence, tuple(tokens), attention)
        return self.step(Step((segment,)), all_rows=True)

    def prefill(self, sequence: SequenceKV, tokens: Sequence[int]) -> torch.Tensor:
        """Appends a prompt of any length that the context holds; returns the last token's logits [vocab].

        A prompt of more tokens than the plan's prefill_rows takes several steps. Each one's experts are ranked for its
        own tokens; their attention is counted, and ranked, over all of the prompt so far.

        Raises:
            as require_prompt.
            ContextExceeded: there are too many; nothing was run.
        """
        self.require_prompt(tokens)
        sequence.require(len(tokens))
        prompt = PromptAttention()
        rows = self.plan.prefill_rows
        for start in range(0, len(tokens), rows):
            part = tuple(tokens[start : start + rows])
            logits = self.step(Step((Segment(sequence, part, prompt),)))
        return logits[0]

    def require_prompt(self, tokens: Sequence[int]) -> None:
        """Refuses token ids that are no prompt.

        Raises:
            UserError: there is no token.
            ModelRefused: a token that the model does not have, such as one from a tokenizer of another model.
        """
        if not tokens:
            raise UserError("a prompt of at least one token", "an empty one", "type a prompt")
        wrong = next((token for token in tokens if not 0 <= token < self.shape.vocab), None)
        if wrong is not None:
            raise ModelRefused(
                f"token ids of 0 or more below {self.shape.vocab}, the vocabulary that config.json has",
                f"{wrong} from the tokenizer",
                "convert the model again with its own tokenizer",
            )

    def fill(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Reads experts into free blocks of the tiers, in the order of fill_first (ExpertSource.fill).

        On any thread, while no other thread uses the engine (chat.idle_prefetch).

        Args:
            go_on: False ends it with the reads under way, some 0.1 s.
        """
        settings = self.settings
        if settings.cache:
            # Without any heat the lower level of all experts comes first, and routers decide which are hot.
            levels = settings.levels if self._heat else settings.scheduled
            self._source.fill(self._keys, [level for level in levels if level], go_on)

    def fill_first(self, heat: Mapping[ExpertKey, float]) -> None:
        """Has `fill` read the hottest experts first. By default it reads equally many of every layer."""
        self._heat = heat
        if self.hot:
            self.hot.start_from(heat)
        self._keys.sort(key=lambda key: -heat.get(key, 0.0))

    def heat(self) -> dict[ExpertKey, float]:
        """How hot each expert was in this run, above 0, at most 1; experts that were never used may be missing."""
        return self.hot.heat() if self.hot else self.vram.heat()

    def forget_experts(self) -> None:
        """Empties the expert tiers: the next step finds nothing resident."""
        self._source.release_pins()
        for tier in (self.vram, self.dram):
            if tier is not None:
                for key in tier.resident():
                    tier.drop(key)
        if self.hot:
            self.hot.forget()

    def peak_bytes(self) -> int:
        """The most bytes that the model has taken of the memory which --vram-limit limits.

        In RAM that is the operating system's count of the process's resident memory, less its memory before loading and
        the pages of libraries that loading and a first step touch; on a device the driver's count of the process.
        """
        if self.device:
            return self.device.peak()
        return max(peak_resident_bytes() - self.resident_before, 0)

    @contextmanager
    def outside_limit(self) -> Iterator[None]:
        """Has peak_bytes leave out by how much the process grows in the block: tables of a library, not the model.

        No step may run within the block: what it takes would be left out too.
        """
        before = peak_resident_bytes()
        yield
        self.resident_before += max(peak_resident_bytes() - before, 0)

    def watch(self, note: Callable[[int, torch.Tensor], None]) -> None:
        """Calls `note` with every layer and its router's choice, int64 [T, k], from the next step on."""
        self._runtime.watch = note

    def take_counts(self) -> TransferCounts:
        """Returns what moved between tiers since the last call."""
        return self._source.take_counts()

    def take_use(self) -> ExpertUse:
        """Returns the levels that experts were computed at since the last call."""
        taken, self._runtime.use = self._runtime.use, ExpertUse()
        return taken

    def close(self) -> None:
        """Stops the readers, closes the store and frees the tiers' memory. Idempotent."""
        self.memory.close()
        self._opened.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
