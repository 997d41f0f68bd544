"""KL of each token of a domain of text, with hot sets that are static or follow use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.engine.engine import Engine
from edgemoe.evaluate.metrics import kl_of
from edgemoe.evaluate.reference import LogitFile
from edgemoe.evaluate.score import Windows
from edgemoe.experts.step import Study
from edgemoe.experts.use import ChoiceCounts
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.hotness import SIGNALS, Hotness
from edgemoe.policy.settings import RunSettings

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Domain:
    """A text: windows that are counted, windows that are measured, and the bf16 model's logits of these."""

    name: str
    counted: Windows
    measured: Windows
    logits: LogitFile


class DomainQuality:
    """Measures domains through one engine with every expert in memory.

    Args:
        engine: its settings are replaced.
        levels: bits of hot experts, and of the others.
        advance: called after every window.
    """

    def __init__(self, engine: Engine, levels: tuple[int, int], advance: Callable[[], None]) -> None:
        self._engine, self._levels, self._done = engine, levels, advance
        self._sequence = engine.sequences.new()
        self._layers = sorted(engine.store.manifest.layers)

    def counted(self, windows: Windows) -> Floats:
        """The gate mass of windows at the high level, float64 [layers, experts]."""
        self._start(RunSettings.uniform(self._levels[0]))
        choices = ChoiceCounts(self._engine.shape.layers, self._engine.shape.experts_per_layer)
        with self._engine.studied(Study(choices=True)), self._engine.recorded() as records:
            self._run(windows)
        for record in records:
            assert record.choices
            choices.merge(record.choices)
        return choices.mass[self._layers]

    def uniform(self, level: int, domain: Domain) -> Floats:
        """KL of each token with every expert at a level, in nats, float64 [tokens]."""
        self._start(RunSettings.uniform(level))
        return self._kl(domain)

    def static(self, scores: Floats, hot: int, domain: Domain) -> Floats:
        """KL of each token with a fixed hot set, in nats, float64 [tokens].

        Args:
            scores: float64 [layers, experts].
            hot: experts with the best scores of each layer that have the high level.
            domain: the text.
        """
        self._follow(SIGNALS[0], hot)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :hot].tolist()
        assert self._engine.rules.hot
        self._engine.rules.hot.fix({layer: {*row} for layer, row in zip(self._layers, best, strict=True)})
        return self._kl(domain)

    def online(self, signal: str, hot: int, domains: Sequence[Domain]) -> list[Floats]:
        """KL of each token of domains one after another, with hot sets that follow use."""
        self._follow(signal, hot)
        return [self._kl(domain) for domain in domains]

    def _follow(self, signal: str, hot: int) -> None:
        self._start(
            RunSettings(levels=self._levels, hotness=Hotness(signal=signal, experts=hot, settled=True))
        )

    def _start(self, settings: RunSettings) -> None:
        self._engine.configure(settings)
        self._engine.forget_experts()

    def _kl(self, domain: Domain) -> Floats:
        kept = []
        for number, ours in enumerate(self._run(domain.measured)):
            theirs = domain.logits.read(number).float().log_softmax(-1)
            kept.append(kl_of(ours.log_softmax(-1), theirs)[:-1])
        return torch.cat(kept).numpy()

    def _run(self, windows: Windows) -> list[torch.Tensor]:
        """The logits of each window, token by token, float32 [tokens, vocab]."""
        logits = []
        for window in windows:
            self._sequence.crop(0)
            rows = [self._engine.step(Step((Segment(self._sequence, (token,)),))) for token in window]
            logits.append(torch.cat(rows))
            self._done()
        return logits
