"""An engine for tests: adds up what its steps leave until a test takes it, and shows its parts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from edgemoe.engine.engine import Engine
from edgemoe.experts.records import StepTotals


class CountedEngine(Engine):
    """An Engine whose counts a test takes after any number of steps."""

    def __init__(self, *args, **options) -> None:
        self._recording = ExitStack()
        super().__init__(*args, **options)
        self._moved = self._recording.enter_context(self.recorded())
        self._used = self._recording.enter_context(self.recorded())

    def take_counts(self):
        """Counts of moves between tiers since the last call."""
        total = StepTotals.of(self._moved).transfers
        self._moved.clear()
        return total

    def take_use(self):
        """The levels that experts were computed at since the last call."""
        total = StepTotals.of(self._used).use
        self._used.clear()
        return total

    def watch(self, note) -> None:
        """Calls `note` with every layer and its router's choice, int64 [T, k], from the next step on."""
        self._study = replace(self._study, watch=note)

    def by_modules(self):
        """Leaves the steps that follow to transformers' modules; returns the engine."""
        self._study = replace(self._study, modules=True)
        return self

    @property
    def model(self):
        """The model's modules."""
        return self._parts.model

    @property
    def runner(self):
        """The runner of its steps."""
        return self._parts.runner

    @property
    def source(self):
        """The source of its experts."""
        return self._source

    @property
    def held(self):
        """Where the planes of each expert lie."""
        return self._parts.expert_places

    @property
    def compensators(self):
        """The compensators of the steps that follow."""
        return self._study.compensators
