"""The rules of an engine's next steps: levels, what they go by, hot experts, and bits for a wanted time per token."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property

from edgemoe.engine.hot_experts import HotExperts
from edgemoe.engine.limited_memory import LimitedMemory
from edgemoe.engine.parts import EngineParts
from edgemoe.engine.prices import dram_price
from edgemoe.errors import UserError
from edgemoe.kernels.device_compensators import AnyCompensators
from edgemoe.memory.plan import MemoryPlan
from edgemoe.memory.split import require_every, require_sizes
from edgemoe.models.plans.requirements import require_base_level, require_gate
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.damage import Damage
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings
from edgemoe.policy.target import BitsController
from edgemoe.policy.tier_prices import TierPrices
from edgemoe.storage.base import ExpertKey

FIXED = ("eviction", "promotion", "cache", "readers", "compensators_limit", "drafts")
"""Fields of RunSettings that an engine cannot change."""

_log = logging.getLogger("edgemoe")


def first_settings(settings: RunSettings) -> RunSettings:
    """The settings to open an engine with: one level, where damage may have to be measured by steps of the engine."""
    if not (settings.priced or settings.hotness):
        return settings
    return settings.with_(levels=settings.levels[:1], bits=None, tpot_target=None, hotness=None)


class Rules:
    """Makes the policy of the steps that follow. A step keeps the policy that it began with.

    Args:
        store: the opened store.
        plan: the division of the limit.
        memory: the limit's blocks.
        parts: tiers, source and compensators of the engine.
        settings: the first ones (first_settings).

    Attributes:
        policy: the policy of the next step.
        damage: the loss of quality from fewer bits of each expert; None until settings use it (Engine.require_damage).
        hot: the hot experts, where precision follows hotness; else None.
    """

    def __init__(
        self,
        store: StoreModel,
        plan: MemoryPlan,
        memory: LimitedMemory,
        parts: EngineParts,
        settings: RunSettings,
    ) -> None:
        self._store, self._plan, self._memory, self._parts = store, plan, memory, parts
        self.damage: Damage | None = None
        self.hot: HotExperts | None = None
        self._controller: BitsController | None = None
        self._heat: Mapping[ExpertKey, float] = {}
        self._missed: float | None = None
        self.policy = self._policy(settings)

    @property
    def settings(self) -> RunSettings:
        """The settings of the next step."""
        return self.policy.settings

    def require(self, settings: RunSettings, compensators: AnyCompensators | None) -> None:
        """Refuses settings that need another engine (Engine.configure).

        Args:
            settings: the settings of the steps that follow.
            compensators: the compensators of these steps; None: they have none.
        """
        self._require_same_engine(settings)
        if settings.hotness and self._store.device:
            require_every(self._store.shape, self._store.form, settings, self._plan.vram_blocks)
        if settings.compensation:
            _require_compensators(settings, compensators)

    def configure(self, settings: RunSettings) -> None:
        """Changes the settings of the steps that follow (Engine.configure); `damage` is known where they go by it."""
        now, policy = self.settings, self._policy(settings)
        if settings.hotness:
            require_sizes(self._store.form, settings.levels)
        if (settings.levels, settings.tpot_target) != (now.levels, now.tpot_target):
            self._controller = BitsController.of(settings)
        source = self._parts.source
        source.configure(settings.speculate)
        if (settings.hotness, settings.levels) != (now.hotness, now.levels):
            source.release_pins()  # they were made for the levels before
            self._follow_hotness(settings)
        self.policy = policy

    def _require_same_engine(self, settings: RunSettings) -> None:
        """Refuses settings for which another engine must be opened, and names the first of them."""
        now, most = self.settings, self._plan.levels[0]
        if settings.levels[0] > most:
            raise UserError(
                f"levels of at most {most} bits, for which memory was divided",
                f"{settings.levels[0]}",
                "start again with this level",
            )
        for name in FIXED:
            wanted, fixed = getattr(settings, name), getattr(now, name)
            if wanted != fixed:
                raise UserError(
                    f"{name} {fixed}, as at the start", f"{name} {wanted}", "start again with this setting"
                )

    def _follow_hotness(self, settings: RunSettings) -> None:
        """Makes what moves the planes of hot experts, or ends it."""
        if self.hot:
            self.hot.end()
        self.hot = None
        if settings.hotness:
            parts = self._parts
            self.hot = HotExperts.of_blocks(
                settings,
                self._memory.blocks,
                self._store,
                parts.source,
                parts.vram,
                parts.expert_places,
            )
            self.hot.start_from(self._heat)

    def start_from(self, heat: Mapping[ExpertKey, float]) -> None:
        """Makes the hottest experts of an earlier run the first hot sets."""
        self._heat = heat
        if self.hot:
            self.hot.start_from(heat)

    @property
    def filled_levels(self) -> tuple[int, ...]:
        """The levels that free blocks are filled at, high to low.

        Without any heat the lower level of all experts comes first, and routers decide which are hot.
        """
        settings = self.settings
        return tuple(level for level in (settings.levels if self._heat else settings.scheduled) if level)

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
            self.policy = self._policy(self.settings.with_(bits=controller.bits))
        if controller.least and self._missed != controller.target:
            self._missed = controller.target
            _log.warning(
                "%.3g ms per token cannot be met: %.3g bits per weight take %.3g ms here: raise the limit",
                *(1000 * controller.target, controller.range[0], 1000 * controller.least),
            )

    def _policy(self, settings: RunSettings) -> LevelPolicy:
        if settings.remapping:
            require_gate(self._store.config, "--lynx")
        tiers = None
        if settings.priced and not settings.exact:
            tiers = TierPrices(
                self._parts.expert_places.places, self._dram_price, settings.promotion == "whole"
            )
        layers, experts = sorted(self._store.manifest.layers), self._store.shape.experts_per_layer
        limits = self._store.manifest.geometry.level_limits
        return LevelPolicy(settings, layers, experts, self.damage, tiers, limits)

    @cached_property
    def _dram_price(self) -> float:
        """Price of a bit from DRAM (dram_price), measured when it is first used."""
        return dram_price(self._store, self._plan) if self._parts.dram else 1.0


def _require_compensators(settings: RunSettings, compensators: AnyCompensators | None) -> None:
    """Refuses compensation without compensators in memory, or for another level than theirs."""
    assert settings.compensation
    if compensators is None:
        action = f"start again with {settings.compensation.option}"
        raise UserError("compensators in memory", settings.name, action)
    require_base_level(settings, compensators.level)
