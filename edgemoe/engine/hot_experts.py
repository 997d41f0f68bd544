"""Precision that follows how hot experts are: counts of what routers choose, and moves between steps (DynaExq).

step ── its record counts what routers chose ── observe ── an interval ends ── policy.residency.moves
  ▲                                                                              │
  └── advance: publish what came, start more ◄── ExpertSource.change_levels ◄────┘

Nothing moves while a prompt's step has begun and not ended, whatever runs between its layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.experts.records import StepRecord
from edgemoe.experts.use import HeldExperts
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.hotness import Hotness, Trend, scores_of
from edgemoe.policy.residency import Moves, all_moves, capacity
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.base import ExpertSource
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.storage.base import BlockKind, ExpertKey


class HotExperts:
    """The hot set of every layer. Used by the engine's thread, between two steps.

    Args:
        settings: the settings of hotness.
        levels: the higher one is for hot experts, the lower one for all others.
        source: brings experts.
        tier: the tier that they are resident in.
        resident: int64 [layers, experts], each expert's level in the tier, which keeps it up (HeldExperts.levels).
        kinds: the kinds of blocks that the higher level has.
        blocks: number of blocks of each kind in the whole tier, as for `resize`.
        layers: indices of the model's layers that have experts.
        limits: layer -> its highest level, of layers whose highest level is below the store's.
        shape: number of layers of the model, and of experts in a layer.
        slots: number of experts that a token chooses in a layer.
        clock: seconds, never going back.

    Attributes:
        scores: how hot each expert is.
    """

    def __init__(
        self,
        settings: Hotness,
        levels: tuple[int, int],
        source: ExpertSource,
        tier: PlaneTier,
        *,
        resident: npt.NDArray[np.int64],
        kinds: Sequence[BlockKind],
        blocks: Mapping[str, int],
        layers: Sequence[int],
        limits: Mapping[int, int] = MappingProxyType({}),
        shape: tuple[int, int],
        slots: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self._shape, self._prompts = settings, shape, 0
        self._source, self._tier, self._resident = source, tier, resident
        self._slots, self._clock = slots, clock
        self._high, self._low = levels
        self._layers, self._kinds = list(layers), list(kinds)
        self._high_in = {layer: min(self._high, limits.get(layer, self._high)) for layer in layers}
        self._with_hot = [layer for layer in layers if self._high_in[layer] > self._low]
        self.capacity: dict[int, int] = {}
        """Layer -> most hot experts."""
        self._seed: np.ndarray | None = None
        self.forget()
        self.resize(blocks)

    def resize(self, blocks: Mapping[str, int]) -> None:
        """Gives layers the hot sets that so many blocks of the tier have room for, from the next step of new tokens on.

        Changes of level that waited have ended (ExpertSource.resize).
        """
        lower, upper = (
            min(blocks.get(kind.name, 0) for kind in self._kinds if (kind.level > self._low) == above)
            for above in (False, True)
        )
        self._every = lower >= len(self._layers) * self._shape[1]
        most = capacity(upper, len(self._with_hot)) if self._with_hot else []
        if self.settings.experts is not None:
            most = [min(each, self.settings.experts) for each in most]
        self.capacity = dict.fromkeys(self._layers, 0) | dict(zip(self._with_hot, most, strict=True))
        self._due |= self._warm

    @property
    def _warm(self) -> bool:
        """Whether there are scores to go by."""
        return self._seed is not None or self._seen >= max(self.settings.warmup, 1)

    @classmethod
    def of_blocks(
        cls,
        settings: RunSettings,
        blocks: Mapping[str, int],
        store: StoreModel,
        source: ExpertSource,
        tier: PlaneTier,
        places: HeldExperts,
    ) -> HotExperts:
        """Makes the hot sets that a tier's blocks have room for.

        Args:
            settings: settings with hotness, and two levels.
            blocks: block kind's name -> blocks of the tier.
            store: the opened store.
            source: brings experts.
            tier: the tier that they are resident in.
            places: the levels of experts in it.
        """
        assert settings.hotness
        high, low = settings.levels
        shape = store.shape
        return cls(
            settings.hotness,
            (high, low),
            source,
            tier,
            resident=places.levels,
            kinds=store.form.kinds_at(high),
            blocks=blocks,
            layers=sorted(store.manifest.layers),
            limits=store.manifest.geometry.level_limits,
            shape=(shape.layers, shape.experts_per_layer),
            slots=shape.top_k,
        )

    def forget(self) -> None:
        """Starts anew, without `fix`, and from the heat of `start_from` if there is any."""
        self.scores = scores_of(self.settings, *self._shape)
        self._fixed: dict[int, set[int]] | None = None
        self._seen = self._since = 0.0
        self._closed = self._clock()
        if self._seed is not None:
            self.scores.seed(self._seed, self._slots)
        self._trend, self._due = Trend(self.scores.values), self._seed is not None

    def end(self) -> None:
        """Leaves the tier to others."""
        self._tier.set_evict_last(())

    def start_from(self, heat: Mapping[ExpertKey, float]) -> None:
        """Takes the heat of earlier runs, 0 to 1, in place of a warm-up."""
        values = np.zeros(self._shape)
        for key, value in heat.items():
            values[key.layer, key.expert] = value
        self._seed = values if values.any() else None
        self.forget()

    def heat(self) -> dict[ExpertKey, float]:
        """How hot each expert is that was ever chosen, relative to the hottest of its layer."""
        relative = self.scores.values / np.maximum(self.scores.values.max(1, keepdims=True), 1e-30)
        layers, experts = np.nonzero(relative > 1e-9)
        return {
            ExpertKey(layer, expert): float(relative[layer, expert])
            for layer, expert in zip(layers.tolist(), experts.tolist(), strict=True)
        }

    @property
    def size(self) -> int:
        """Experts that are hot now, of all layers."""
        return sum(int(self._is_hot(layer).sum()) for layer in self._layers)

    def _is_hot(self, layer: int) -> npt.NDArray[np.bool_]:
        """Whether each expert of a layer is hot now, bool [experts]."""
        hot: npt.NDArray[np.bool_] = self._resident[layer] >= max(self._high_in[layer], self._low + 1)
        return hot

    def fix(self, hot: Mapping[int, set[int]] | None) -> None:
        """Gives layers these hot experts, at once, and keeps them; None: scores decide again."""
        self._fixed = dict(hot) if hot is not None else None
        if hot is not None:
            self._change()
            self._source.advance_changes(TransferCounts(), settle=True)

    @contextmanager
    def step(self, record: StepRecord) -> Iterator[None]:
        """Runs a step inside the block: publishes what has come before it, and takes what its routers chose after it.

        A step that ends in an error counts nothing.

        Args:
            record: the step's record, with `choices`.
        """
        prompt = not record.decodes
        if self._due and not (prompt or self._prompts):
            self._due = False
            self._change()
        if not self._prompts:
            self._source.advance_changes(record.transfers, start=not prompt)
        self._prompts += prompt
        try:
            yield
        finally:
            self._prompts -= prompt
        self._observe(record)

    def _observe(self, record: StepRecord) -> None:
        """Takes what the routers of a step chose; at the end of an interval decides what moves."""
        weight, hot = (1.0 if record.decodes else self.settings.prompt_weight), self.settings
        weighted = weight * record.rows
        if weighted:
            assert record.choices
            self.scores.observe(weight * record.choices.counts, weight * record.choices.mass, weighted)
        self._seen += record.rows
        self._since += weighted
        if not self._since or (self._seen < hot.warmup and self._seed is None):
            return
        ended = self._since >= hot.interval if hot.interval else self._clock() - self._closed >= hot.seconds
        if not ended:
            return
        self.scores.close_interval(self._since)
        self._trend.close_interval(self.scores.values)
        self._since, self._closed = 0.0, self._clock()
        if self._prompts:
            self._due = True  # before the next step without a prompt
            return
        self._change()
        if hot.settled:
            self._source.advance_changes(record.transfers, settle=True)

    def _change(self) -> None:
        """Tells the source what should move."""
        layers, at = np.array(self._layers), self._resident[self._layers]
        highest = np.maximum([self._high_in[layer] for layer in self._layers], self._low + 1)[:, None]
        # Levels between the two are of other settings, and have blocks that hot experts need.
        between = _keys(layers, (at > self._low) & (at < highest))
        changes = self._moves(at, at >= highest)
        promote = [
            ExpertKey(i, e) for i, each in zip(self._layers, changes, strict=True) for e in each.promote
        ]
        demoted = [
            ExpertKey(i, e) for i, each in zip(self._layers, changes, strict=True) for e in each.demote
        ]
        demote = dict.fromkeys({*demoted, *between}.difference(promote), self._low)
        absent = _keys(layers, at < self._low) if self._every else []
        if not self._every:
            # Where the lower planes of all experts do not fit, hot ones are the last to lose theirs.
            stays = {*_keys(layers, at >= highest)}
            self._tier.set_evict_last((stays - demote.keys()) | {*promote})
        wanted_at = dict.fromkeys(self._hottest_first(absent), self._low) | {
            key: self._high_in[key.layer] for key in self._hottest_first(promote)
        }
        self._source.change_levels(demote, wanted_at, rate=self.settings.rate)

    def _moves(self, at: npt.NDArray[np.int64], hot: npt.NDArray[np.bool_]) -> list[Moves]:
        """The changes of each layer's hot set.

        Args:
            at: [layers with experts, experts], the levels now.
            hot: bool of that shape, the experts that are hot now.
        """
        sizes = [self.capacity[layer] for layer in self._layers]
        if self._fixed is None:
            scores = self._trend.ahead(self.scores.values, self.settings.trend)[self._layers]
            return all_moves(scores, hot, at > 0, sizes, self.settings.margin, self.settings.slack)
        targets = [self._fixed.get(layer, set()) if self.capacity[layer] else set() for layer in self._layers]
        scores = np.zeros(hot.shape)
        for row, target in zip(scores, targets, strict=True):
            row[sorted(target)] = 1.0
        return all_moves(scores, hot, at >= 0, list(map(len, targets)), 0.0)

    def _hottest_first(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Experts in the order of their scores, each relative to the best of its layer."""
        best = self.scores.values.max(1)
        relative = self.scores.values / np.where(best > 0, best, 1.0)[:, None]
        return sorted(keys, key=lambda key: (-relative[key], key))


def _keys(layers: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> list[ExpertKey]:
    """The keys of some experts, bool [layers, experts], of layers with these indices."""
    rows, experts = np.nonzero(mask)
    return list(map(ExpertKey, layers[rows].tolist(), experts.tolist()))
