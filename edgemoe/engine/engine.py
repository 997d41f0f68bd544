"""The engine: a store opened under limits, and steps of token rows through it.

One decode step, top to bottom: `Engine.run` -> `model_runner.ModelRunner.run` -> `layers.fused_decode`, which stops at
a layer with a missing expert -> `experts.layer.ExpertLayer.forward` -> `prefetch.step.FetcherStep.request`, which
reserves blocks in `cache.plane_tier.PlaneTier`, reads them through `storage.store.reader.RecordReader` into their
`storage.record.forms` shape and leases them -> `kernels.native` computes from them.

`parts` has what an engine is made of, `rules` the settings of its next steps, `sequences` the keys and values, and
`limited_memory` the limit's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from edgemoe.engine.limited_memory import LimitedMemory, block_split
from edgemoe.engine.load_model import model_without_weights
from edgemoe.engine.parts import EngineParts, Wraps, open_parts
from edgemoe.engine.peak import PeakMemory
from edgemoe.engine.random_tokens import measure_on_random_tokens
from edgemoe.engine.rehearsal import rehearse
from edgemoe.engine.rules import Rules, first_settings
from edgemoe.engine.sequences import Sequences
from edgemoe.engine.stepping import Stepping
from edgemoe.experts.step import Study
from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.calibration import calibration_of
from edgemoe.models.plans.requirements import require_gate
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.damage import Damage
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import ExpertKey

__all__ = ["Engine", "StoreModel"]


class Engine(Stepping):
    """A model under limits. Used by one thread at a time; `close` it, or use it as a context manager.

    From the first engine on, Python's garbage collector leaves out the objects made before it.

    Args:
        store: an opened store.
        plan: made from it and `settings`; every byte of it is reserved here before anything is loaded.
        settings: how to run it; `configure` changes them later.
        wraps: wrappers that measure the kernel and the expert source; None: nothing is measured.

    Attributes:
        memory, sequences: the limit's bytes, and the keys and values among them.
        rules: the settings of the next steps, with what they go by.
        vram, dram: tiers of experts; dram is None where there is no slower one.
        peak: the most memory that the model has taken.
    """

    def __init__(
        self, store: StoreModel, plan: MemoryPlan, settings: RunSettings, wraps: Wraps | None = None
    ) -> None:
        store = store.guessing(settings).for_run(settings, plan.parallel)
        model = model_without_weights(store)
        self.peak = PeakMemory(store.device)
        self.store, self.plan, self.shape, self.device = store, plan, store.shape, store.device
        keys = [
            ExpertKey(i, e) for i, layer in store.records.layers.items() for e in range(len(layer.records))
        ]
        self._keys = sorted(keys, key=lambda key: (key.expert, key.layer))
        self._listeners = []
        split = block_split(store, settings)
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
            with self.peak.counting():
                self.rules.damage = Damage.of(known or measure_on_random_tokens(self))

    @contextmanager
    def studied(self, study: Study) -> Iterator[None]:
        """Measures or changes the steps that begin inside the block.

        Args:
            study: is added to the present study. With compensators, configure the engine inside the block.

        Raises:
            UserError: experts are rerouted, and the family's routers do not choose by one score for each expert.
        """
        if study.reroute:
            require_gate(self.store.config, "--study")
        before, compensators = self._study, study.compensators
        self._study = before.joined(study)
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
        self._parts.runner.discard_ahead()
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
