"""Routers' choices and inputs, layer by layer: experts of heavy hitters, likeness of adjacent layers' states.

DyMoE's figures 4 and 6. One run of a text's windows shows both, with every expert at the plan's highest level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch

from edgemoe.engine.engine import Engine
from edgemoe.evaluate.score import Windows
from edgemoe.evaluate.studies import SIGNAL_SHARES
from edgemoe.experts.step import ExpertProbe, Routed, Study
from edgemoe.kv.sequence import SequenceKV
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import LEVELS


@dataclass(frozen=True)
class RoutingRow:
    """How a layer's tokens and its heavy hitters are spread over experts. Field names are the JSON's."""

    layer: int
    heavy_hitters: float
    """Fraction of a window's tokens that are heavy hitters: they received most attention in this layer."""
    correlation: float | None
    """Pearson's r of experts' loads by heavy hitters and their loads by all tokens, mean over windows. None: no
    window in which both differ between experts."""
    correlation_rest: float | None
    """Correlation with the loads by all other tokens: no token is in both."""
    correlation_windows: float | None
    """Correlation of experts' loads by heavy hitters in two consecutive windows, mean over the pairs."""
    load: list[int]
    """Expert -> tokens in all windows."""
    heavy_load: list[int]
    """Expert -> heavy hitters among them."""
    study: str = "routing"


@dataclass(frozen=True)
class SimilarityRow:
    """How alike the inputs of two adjacent layers' routers are. Field names are the JSON's."""

    layer: int
    next_layer: int
    """The next layer that has experts."""
    similarity: float
    """Cosine of the two states of a token, mean over tokens."""
    std: float
    """Standard deviation over tokens."""
    tokens: int
    study: str = "similarity"


class RouterProbe(ExpertProbe):
    """Keeps what the routers of one window have seen and chosen.

    Attributes:
        routings: layer -> its router's choice and input, of the last step.
    """

    def __init__(self) -> None:
        self.routings: dict[int, Routed] = {}

    def routed(self, layer: int, routing: Routed, out: torch.Tensor) -> None:
        """Keeps a layer's choice; its tensors live no longer than the step."""
        ranks = None if routing.ranks is None else routing.ranks.clone()
        self.routings[layer] = Routed(
            routing.hidden.float().cpu(), routing.choice.clone(), routing.gates.clone(), ranks
        )


class Observations:
    """Loads and likenesses of windows.

    Args:
        experts: number of experts in a layer.
    """

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._loads: dict[int, list[torch.Tensor]] = {}
        self._heavy: dict[tuple[int, float], list[torch.Tensor]] = {}
        self._cosines: dict[tuple[int, int], list[torch.Tensor]] = {}

    def add(self, routings: dict[int, Routed]) -> None:
        """Adds a window; a layer without attention has no heavy hitters and is left out of `routing`."""
        for layer, routed in routings.items():
            if routed.ranks is None:
                continue
            self._loads.setdefault(layer, []).append(self._load(routed.choice))
            for share in SIGNAL_SHARES:
                heavy = self._load(routed.choice[routed.ranks < share])
                self._heavy.setdefault((layer, share), []).append(heavy)
        for layer, after in pairwise(sorted(routings)):
            cosines = torch.cosine_similarity(routings[layer].hidden, routings[after].hidden, dim=1)
            self._cosines.setdefault((layer, after), []).append(cosines)

    def routing(self) -> list[RoutingRow]:
        """Returns a row for every layer and fraction of heavy hitters."""
        return [
            _routing_row(layer, share, self._loads[layer], heavy)
            for (layer, share), heavy in sorted(self._heavy.items())
        ]

    def similarity(self) -> list[SimilarityRow]:
        """Returns a row for every layer but the last."""
        joined = {pair: torch.cat(parts) for pair, parts in sorted(self._cosines.items())}
        return [
            SimilarityRow(*pair, float(all_.mean()), float(all_.std(correction=0)), len(all_))
            for pair, all_ in joined.items()
        ]

    def _load(self, choice: torch.Tensor) -> torch.Tensor:
        return torch.bincount(choice.reshape(-1), minlength=self._experts)


def observe(
    engine: Engine, sequence: SequenceKV, windows: Windows, advance: Callable[[], None]
) -> Observations:
    """Runs windows as prompts, and observes their routers.

    Args:
        engine: its settings are replaced.
        sequence: a sequence with free blocks for a window; its content is discarded.
        windows: token ids of each window.
        advance: called after every window.
    """
    top = engine.plan.levels[0]
    # Two levels, of which r = 1 leaves the higher alone: only a ranking by attention has attention counted.
    levels = (top, next(level for level in LEVELS if level < top))
    engine.configure(RunSettings(levels=levels, retention=1.0, importance="heavy-hitters", exact=True))
    engine.forget_experts()
    observed = Observations(engine.shape.experts_per_layer)
    for window in windows:
        sequence.crop(0)
        probe = RouterProbe()
        with engine.studied(Study(probe=probe)):
            engine.all_logits(sequence, window, decode=False)
        observed.add(probe.routings)
        advance()
    sequence.crop(0)
    return observed


def _routing_row(
    layer: int, share: float, loads: Sequence[torch.Tensor], heavy: Sequence[torch.Tensor]
) -> RoutingRow:
    """Makes a row of the loads [E] of each window, by all tokens and by the heavy hitters among them."""
    return RoutingRow(
        layer=layer,
        heavy_hitters=share,
        correlation=_mean_correlation(zip(heavy, loads, strict=True)),
        correlation_rest=_mean_correlation((h, load - h) for h, load in zip(heavy, loads, strict=True)),
        correlation_windows=_mean_correlation(pairwise(heavy)),
        load=torch.stack(tuple(loads)).sum(0).tolist(),
        heavy_load=torch.stack(tuple(heavy)).sum(0).tolist(),
    )


def _mean_correlation(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """The mean of Pearson's r over pairs of loads, both of which differ between experts; None: there is none."""
    found = [
        float(torch.corrcoef(torch.stack(pair).double())[0, 1])
        for pair in pairs
        if all(bool((load != load[0]).any()) for load in pair)
    ]
    return fmean(found) if found else None
