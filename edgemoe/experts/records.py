"""The counts that steps leave for answers, metrics and benchmarks: a record of each, and sums over several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from edgemoe.experts.use import ChoiceCounts, ExpertUse
from edgemoe.prefetch.counts import TransferCounts


@dataclass
class StepRecord:
    """The record of a step, for answers, metrics, benchmarks and hotness alike.

    Args:
        decodes: the step had a new token of each sequence; otherwise it had tokens of prompts.
        sequences, rows: number of sequences, and of token rows.
        drafted, accepted: rows that were guesses, and how many of them were right, once tokens have been chosen.
        transfers: bytes and experts moved between tiers.
        use: the levels at which experts were computed.
        active: layer -> distinct experts that the routers chose.
        choices: how often routers chose each expert; None: no setting counts them.
        seconds: time that the step took, without steps that ran between its layers.
    """

    decodes: bool
    sequences: int
    rows: int
    transfers: TransferCounts = field(default_factory=TransferCounts)
    use: ExpertUse = field(default_factory=ExpertUse)
    active: dict[int, int] = field(default_factory=dict)
    choices: ChoiceCounts | None = None
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the step has appended to its sequences."""
        return self.rows - self.drafted + self.accepted


@dataclass(frozen=True)
class StepTotals:
    """Sums over the records of several steps.

    >>> StepTotals.of([StepRecord(True, 2, 2), StepRecord(True, 1, 1)]).rows
    3
    """

    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    transfers: TransferCounts = field(default_factory=TransferCounts)
    use: ExpertUse = field(default_factory=ExpertUse)
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the steps have appended to their sequences."""
        return self.rows - self.drafted + self.accepted

    @classmethod
    def of(cls, records: Iterable[StepRecord]) -> StepTotals:
        """Sums up records."""
        total = cls()
        for record in records:
            total = total.plus(record)
        return total

    def plus(self, record: StepRecord) -> StepTotals:
        """Returns the sums with one more record."""
        sums = (record.rows, record.seconds, record.transfers, record.use, record.drafted, record.accepted)
        return self + StepTotals(1, *sums)

    @property
    def drafts(self) -> dict[str, int]:
        """Guesses that steps checked, and how many of them were right, by name."""
        return {"drafted": self.drafted, "accepted": self.accepted}

    def accepting(self, accepted: int) -> StepTotals:
        """Returns the sums with more guesses that were right, of steps that are counted already."""
        return replace(self, accepted=self.accepted + accepted)

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(
            self.steps + other.steps,
            self.rows + other.rows,
            self.seconds + other.seconds,
            self.transfers + other.transfers,
            self.use + other.use,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )
