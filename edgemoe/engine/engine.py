"""The engine: a store opened under limits, and steps of token rows through it.

One decode step, top to bottom: `Engine.run` -> `model_runner.ModelRunner.run` -> `layers.fused_decode`, which stops at
a layer with a missing expert -> `experts.layer.ExpertLayer.forward` -> `prefetch.step.FetcherStep.request`, which
reserves blocks in `cache.plane_tier.PlaneTier`, reads them through `storage.store.reader.RecordReader` into their
`storage.record.forms` shape and leases them -> `kernels.native` computes from them.

`parts` has what an engine is made of, `rules` the settings of its next steps, `sequences` the keys and values, and
`limited_memory` the limit's bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import torch

from edgemoe.engine.contexts import rehearse
from edgemoe.engine.limited_memory import LimitedMemory
from edgemoe.engine.parts import EngineParts, Wraps, open_parts
from edgemoe.engine.peak import PeakMemory
from edgemoe.engine.rules import Rules, first_settings
from edgemoe.engine.sequences import Sequences
from edgemoe.engine.stepping import Stepping
from edgemoe.errors import DoesNotFit, EdgemoeError, UserError
from edgemoe.experts.output_errors import OutputErrors
from edgemoe.experts.step import ExpertProbe, Reroute, StepRecord, Study
from edgemoe.kernels.compensators import Compensators
from edgemoe.kv.step import Segment, Step
from edgemoe.layers.build import skeleton
from edgemoe.machine.process import freeze_existing_objects, return_free_memory
from edgemoe.memory.plan import MemoryPlan
from edgemoe.memory.split import BlockSplit
from edgemoe.memory.tiers import form_of
from edgemoe.models.calibration import calibration_of
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.damage import Damage
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.store.calibration import CALIBRATION_NAME, Calibration

__all__ = ["Engine", "StoreModel"]

RANDOM_TOKENS = 512
"""Tokens that experts are measured on where a store has no calibration."""

_log = logging.getLogger("edgemoe")


class Engine(Stepping):
    """A model under limits. Used by one thread at a time; `close` it, or use it as a context manager.

    From the first engine on, Python's garbage collector leaves out the objects made before it.

    Args:
        store: an opened store.
        plan: made from it and `settings`; every byte of it is reserved here before anything is loaded.
        settings: how to run it; `configure` changes them later.
        wraps: what measures the kernel and the expert source; None: nothing does.

    Attributes:
        memory, sequences: the limit's bytes, and the keys and values among them.
        rules: the settings of the next steps, with what they go by.
        vram, dram: tiers of experts; dram is None where there is no slower one.
        peak: the most memory that the model has taken.
    """

    def __init__(
        self, store: StoreModel, plan: MemoryPlan, settings: RunSettings, wraps: Wraps | None = None
    ) -> None:
        freeze_existing_objects()  # before any object of an engine exists: these are collected with it
        model = skeleton(store.directory, store.config)
        return_free_memory()
        self.peak = PeakMemory(store.device)
        self.store, self.plan, self.shape, self.device = store, plan, store.shape, store.device
        keys = [
            ExpertKey(i, e) for i, layer in store.manifest.layers.items() for e in range(len(layer.records))
        ]
        self._keys = sorted(keys, key=lambda key: (key.expert, key.layer))
        self._listeners: list[list[StepRecord]] = []
        split = BlockSplit.of(
            store.shape, form_of(store.form, settings), settings, store.known_damage(settings)
        )
        self.memory = LimitedMemory(plan, split, self._resize)
        self.budget = self.memory.budget
        self.sequences = Sequences(store.shape.kv, plan, self.memory, store.device)
        with ExitStack() as opened:
            self._parts: EngineParts = opened.enter_context(
                open_parts(model, store, plan, settings, wraps or Wraps())
            )
            self.vram, self.dram, self._source = self._parts.vram, self._parts.dram, self._parts.source
            self._study = Study(compensators=self._parts.compensators)
            # Damage may have to be measured, by steps of this engine.
            first = first_settings(settings)
            self.rules = Rules(store, plan, self.memory, self._parts, first)
            if not self.device:
                rehearse(self._parts, first, store)
                self.peak.exclude_libraries()
            if settings != first:
                self.configure(settings)
            self._opened = opened.pop_all()

    def _resize(self, blocks: Mapping[str, int]) -> None:
        """Changes the number of blocks of the fastest tier."""
        self._source.resize(blocks)
        if self.rules.hot:
            self.rules.hot.resize(blocks)

    @property
    def settings(self) -> RunSettings:
        """The settings of the next step."""
        return self.rules.settings

    def configure(self, settings: RunSettings) -> None:
        """Changes levels, bits, retention, importance, depth, exactness, look-ahead and scan from the next step on.

        Levels that go by damage take it from the store's calibration. Without one it is measured here on random tokens.

        Raises:
            UserError: the plan has no blocks for the highest level, or eviction, promotion, cache, readers or the
                compensators' limit differ: those need another engine; or the family's routers cannot be remapped; or
                the engine has no compensators.
        """
        self.rules.require(settings, self._study.compensators)
        if settings.priced:
            self.require_damage()
        self.rules.configure(settings)

    def require_damage(self) -> None:
        """Reads or measures what fewer bits of each expert cost, if that is not known yet.

        Raises:
            UserError: it must be measured, and a sequence has the memory.
        """
        if self.rules.damage is None:
            store = self.store
            known = calibration_of(store.directory, store.manifest, self.plan.levels[0])
            self.rules.damage = Damage.of(known or _measured(self))

    @contextmanager
    def studied(
        self,
        *,
        probe: ExpertProbe | None = None,
        reroute: Reroute | None = None,
        compensators: Compensators | None = None,
        policy: LevelPolicy | None = None,
        modules: bool = False,
        choices: bool = False,
    ) -> Iterator[None]:
        """Measures or changes the steps that begin inside the block.

        Args:
            probe: measures the experts of steps of several rows.
            reroute: chooses the experts of every step, from the logits of the routers.
            policy, modules, choices: see Study.
            compensators: used instead of the store's; configure the engine inside the block.

        Raises:
            UserError: `reroute` is given, and the family's routers do not choose by one score for each expert.
        """
        if reroute:
            self.rules.require_gate("--study")
        before = self._study
        self._study = Study(
            before.probe if probe is None else probe,
            before.reroute if reroute is None else reroute,
            before.compensators if compensators is None else compensators,
            before.policy if policy is None else policy,
            before.modules or modules,
            before.choices or choices,
            before.watch,
        )
        if compensators:
            self._source.use_compensators(compensators.where)
        try:
            yield
        finally:
            self._study = before
            if compensators:
                self._source.use_compensators(before.compensators.where if before.compensators else None)
                self.configure(self.settings.with_(compensation=None))

    def fill(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Reads experts into free blocks of the tiers, in the order of fill_first (ExpertSource.fill).

        On any thread, while no other thread uses the engine (chat.idle_prefetch).

        Args:
            go_on: False ends it with the reads under way, some 0.1 s.
        """
        if self.settings.cache:
            self._source.fill(self._keys, self.rules.filled_levels, go_on)

    def fill_first(self, heat: Mapping[ExpertKey, float]) -> None:
        """Makes `fill` read the hottest experts first. By default it reads equally many of every layer."""
        self.rules.start_from(heat)
        self._keys.sort(key=lambda key: -heat.get(key, 0.0))

    def heat(self) -> dict[ExpertKey, float]:
        """How hot each expert was in this run, above 0, at most 1; experts that were never used may be missing."""
        return self.rules.hot.heat() if self.rules.hot else self.vram.heat()

    def forget_experts(self) -> None:
        """Empties the expert tiers: the next step finds nothing resident."""
        self._source.release_pins()
        for tier in (self.vram, self.dram):
            if tier is not None:
                for key in tier.resident():
                    tier.drop(key)
        if self.rules.hot:
            self.rules.hot.forget()

    def close(self) -> None:
        """Stops the readers, closes the store and frees the tiers' memory. Idempotent."""
        self.memory.close()
        self._opened.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _measured(engine: Engine) -> Calibration:
    """Measures every expert's error on random tokens; the result is saved with a store that has no calibration.

    Raises:
        UserError: a sequence takes the memory that a measurement needs.
    """
    store, before, level = engine.store, engine.settings, engine.plan.levels[0]
    _log.warning(
        "%s has no usable calibration: levels go by errors on random tokens; `edgemoe calibrate` measures on text",
        store.directory,
    )
    try:
        sequence = engine.sequences.new()
    except DoesNotFit as error:
        found = f"{store.directory} without a calibration"
        action = "run `edgemoe calibrate` on it, or start again with these levels"
        raise UserError("what fewer bits of each expert cost", found, action) from error
    one = {"bits": None, "tpot_target": None, "hotness": None, "compensation": None}
    engine.configure(before.with_(levels=(level,), exact=True, speculate="off", **one))
    errors = OutputErrors(sorted(store.manifest.layers), engine.shape.experts_per_layer)
    enough = min(RANDOM_TOKENS, engine.plan.context)
    rows = min(enough, engine.plan.prefill_rows)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(engine.shape.vocab, (rows,), generator=random).tolist()
    try:
        with engine.studied(probe=errors):
            engine.step(Step((Segment(sequence, tuple(tokens)),)))
    finally:
        engine.sequences.end(sequence)
        engine.forget_experts()
        engine.configure(before)
    made = errors.calibration(store.manifest.source, level, rows)
    keeps = rows == enough and level == store.manifest.max_level
    if keeps and not (store.directory / CALIBRATION_NAME).exists():
        with suppress(EdgemoeError):  # a store that only others may write to
            made.save(store.directory)
    return made
