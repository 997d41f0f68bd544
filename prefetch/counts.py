"""Counters of what moved between tiers, and of how good predictions were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields


@dataclass
class LookaheadCounts:
    """How good the predictions of one layer were, and what became of the reads that they started."""

    predicted: int = 0
    """Experts predicted, resident or not."""
    wanted: int = 0
    """Experts then requested, in steps for which the layer was predicted."""
    right: int = 0
    """Experts that were predicted and requested."""
    hidden_bytes: int = 0
    """Bytes read or copied before the request for an expert that was then used."""
    wasted_bytes: int = 0
    """Bytes read or copied ahead of experts that the next request did not want, or that were evicted before it."""
    hidden_s: float = 0.0
    """Seconds of transfers done before the requests for their experts."""

    @property
    def recall(self) -> float | None:
        """Fraction of the wanted experts that was predicted; None where none was wanted."""
        return self.right / self.wanted if self.wanted else None

    @property
    def precision(self) -> float | None:
        """Fraction of the predicted experts that was wanted; None where none was predicted."""
        return self.right / self.predicted if self.predicted else None

    def compare(self, predicted: Sequence[int], requests: Sequence[int]) -> None:
        """Counts a layer's prediction against its request."""
        self.predicted += len(predicted)
        self.wanted += len(requests)
        self.right += len(set(predicted) & set(requests))

    def __add__(self, other: LookaheadCounts) -> LookaheadCounts:
        """Adds two counts up."""
        return LookaheadCounts(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


@dataclass
class TransferCounts:
    """Bytes and experts that a step has moved between tiers.

    >>> (TransferCounts(levels={4: 1}) + TransferCounts(levels={4: 2, 2: 1})).levels
    {4: 3, 2: 1}

    Every expert read ahead ends as used, cancelled, wasted or failed; until then it counts in `speculated` only.
    """

    ssd_bytes: int = 0
    """Bytes read from disk, ahead or not."""
    compensator_bytes: int = 0
    """Bytes read from disk for compensators; part of ssd_bytes."""
    dram_bytes: int = 0
    """Bytes copied from the DRAM tier into the VRAM tier."""
    read_retries: int = 0
    """Attempts after failures, of reads from disk that succeeded in the end."""
    spilled_bytes: int = 0
    """Bytes copied from the VRAM tier into the DRAM tier on eviction."""
    vram_hits: int = 0
    """Experts found in the VRAM tier at the requested level or above, experts read ahead in time included."""
    dram_hits: int = 0
    """Experts that needed no disk read, but came from the DRAM tier, or were read there."""
    requests: int = 0
    """Experts requested; level 0 is never requested."""
    levels: dict[int, int] = field(default_factory=dict)
    """Requested level -> experts."""
    speculated: int = 0
    """Experts for which a transfer was queued ahead."""
    speculated_used: int = 0
    """Experts that were read ahead and requested next, in time or still on their way; part of `speculated`."""
    speculated_cancelled: int = 0
    """Transfers that were queued ahead and cancelled before they began; part of `speculated`."""
    auto_off: int = 0
    """Times that mode `auto` turned the look-ahead off."""
    auto_resting: int = 0
    """Layers that ran while mode `auto` had it turned off."""
    promoted: int = 0
    """Experts that were brought to more bits, or into the tier, by transitions.Transitions."""
    demoted: int = 0
    """Experts whose upper planes transitions.Transitions freed."""
    deferred: int = 0
    """Promotions of transitions.Transitions that found no free block, and were tried again later."""
    moved_bytes: int = 0
    """Bytes read from disk or copied between tiers for these promotions; part of ssd_bytes and dram_bytes."""
    lookahead: dict[int, LookaheadCounts] = field(default_factory=dict)
    """Layer -> counts of its predictions."""

    @property
    def transitions(self) -> dict[str, int]:
        """The counts of transitions.Transitions, by name."""
        names = ("promoted", "demoted", "deferred", "moved_bytes")
        return {name: getattr(self, name) for name in names}

    @property
    def hidden_bytes(self) -> int:
        """LookaheadCounts.hidden_bytes, over all layers."""
        return sum(counts.hidden_bytes for counts in self.lookahead.values())

    @property
    def wasted_bytes(self) -> int:
        """LookaheadCounts.wasted_bytes, over all layers."""
        return sum(counts.wasted_bytes for counts in self.lookahead.values())

    @property
    def hidden_s(self) -> float:
        """LookaheadCounts.hidden_s, over all layers."""
        return sum(counts.hidden_s for counts in self.lookahead.values())

    def of_layer(self, layer: int) -> LookaheadCounts:
        """The counts of a layer's predictions, to be added to."""
        return self.lookahead.setdefault(layer, LookaheadCounts())

    def __add__(self, other: TransferCounts) -> TransferCounts:
        """Adds two counts up."""
        numbers = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name not in ("levels", "lookahead")
        }
        levels, layers = self.levels | other.levels, self.lookahead | other.lookahead
        return TransferCounts(
            **numbers,
            levels={level: self.levels.get(level, 0) + other.levels.get(level, 0) for level in levels},
            lookahead={layer: self._predictions(layer) + other._predictions(layer) for layer in layers},
        )

    def _predictions(self, layer: int) -> LookaheadCounts:
        """The counts of a layer's predictions, which may have had none."""
        return self.lookahead.get(layer, LookaheadCounts())
