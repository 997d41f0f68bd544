"""A fetcher whose step lasts as long as a test: the fetcher has the methods of its only step."""

from __future__ import annotations

from dataclasses import fields, replace

from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.fetcher import Fetcher


class OneStepFetcher(Fetcher):
    """A Fetcher with the methods of its one step."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.step = self.begin()

    @property
    def transfers(self):
        """Its transfers under way, and its moves."""
        return self._transfers

    @property
    def changes(self):
        """The changes of level that wait or are under way."""
        return self._transitions

    @property
    def predicting(self):
        return self.step.predicting

    def use_compensators(self, where):
        super().use_compensators(where)
        self.step.end()
        self.step = self.begin()

    def request(self, *args, **options):
        return self.step.request(*args, **options)

    def read_ahead(self, *args, **options):
        return self.step.read_ahead(*args, **options)

    def count_hits(self, *args, **options):
        return self.step.count_hits(*args, **options)

    def count_computed(self, *args):
        return self.step.count_computed(*args)

    def count_predictions(self, *args):
        return self.step.count_predictions(*args)

    def promote(self, levels):
        return super().promote(levels, self.step.counts)

    def advance_changes(self, **options):
        return super().advance_changes(self.step.counts, **options)

    def take_counts(self) -> TransferCounts:
        """Returns what has moved since the last call, and sets the step's counters to 0."""
        counts, fresh = self.step.counts, TransferCounts()
        taken = replace(counts) + self._between
        taken.read_retries += self._transfers.new_retries()
        for field in fields(counts):
            setattr(counts, field.name, getattr(fresh, field.name))
        self._between = TransferCounts()
        return taken
