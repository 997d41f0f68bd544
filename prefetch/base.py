"""Contracts of prefetch: which experts a layer needs, and in what order they come.

The engine asks for a layer's experts and gets leases back as they become ready: hits at once, misses as
their planes arrive from a slower tier. Meanwhile it may say what the next layer will probably want. Sees
the cache's interface only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import TypeVar

from cache.base import Lease
from storage.base import ExpertKey

MODES = ("off", "base", "full", "auto")
"""What is read ahead: nothing; the base plane; the level predicted; that, for as long as it pays (judge.Judge)."""

Split = Callable[[Sequence[int]], int]
"""Levels of experts that only have to be moved, the most important first -> how many of the last are not moved, but
handed out in the slower tier."""


@dataclass
class LookaheadCounts:
    """How good the guesses about one layer were, and what became of the reads they caused."""

    predicted: int = 0
    """Experts predicted, whether or not they were resident."""
    wanted: int = 0
    """Experts then asked for, in passes that were predicted."""
    right: int = 0
    """Experts that were both."""
    hidden_bytes: int = 0
    """Read from disk, or handed to a device's copies from DRAM, before they were asked for, and then used."""
    wasted_bytes: int = 0
    """Read or handed over ahead, and not wanted by the very next stream, or gone again by then."""
    hidden_s: float = 0.0
    """Seconds of transfers done before their experts were asked for, of experts then used."""

    @property
    def recall(self) -> float | None:
        """Share of the wanted that was predicted; None where nothing was wanted."""
        return self.right / self.wanted if self.wanted else None

    @property
    def precision(self) -> float | None:
        """Share of the predicted that was wanted; None where nothing was predicted."""
        return self.right / self.predicted if self.predicted else None

    def __add__(self, other: LookaheadCounts) -> LookaheadCounts:
        """Both together."""
        return LookaheadCounts(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


@dataclass
class TransferCounts:
    """What moved since the counters were last taken. Bytes and experts.

    Every expert read ahead ends as used, cancelled, wasted or failed; until it has, it is in `speculated` only.
    """

    ssd_bytes: int = 0
    """Read from disk; all of it, ahead or not."""
    dram_bytes: int = 0
    """Copied from the DRAM tier into the VRAM tier."""
    spilled_bytes: int = 0
    """Copied from the VRAM tier back into the DRAM tier on eviction."""
    vram_hits: int = 0
    """Experts found in the VRAM tier at the asked level or above, those read ahead in time among them."""
    dram_hits: int = 0
    """Experts that needed no disk read, but came from the DRAM tier when they were asked for, or were left there."""
    left_below: int = 0
    """Of these, handed out in the DRAM tier, to be computed by the CPU."""
    requests: int = 0
    """Experts asked for; level 0 is never asked for."""
    levels: dict[int, int] = field(default_factory=dict)
    """Asked level -> experts."""
    speculated: int = 0
    """Experts for which a transfer was queued ahead."""
    speculated_used: int = 0
    """Of these, wanted then, and there or on their way."""
    speculated_cancelled: int = 0
    """Of these, taken back before they began."""
    auto_off: int = 0
    """Times that mode `auto` turned the look-ahead off."""
    auto_resting: int = 0
    """Streams passed while mode `auto` had it turned off."""
    lookahead: dict[int, LookaheadCounts] = field(default_factory=dict)
    """Layer -> what was guessed about it."""

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

    def ask(self, levels: Sequence[int]) -> None:
        """Counts experts asked for at these levels."""
        self.requests += len(levels)
        for level in levels:
            self.levels[level] = self.levels.get(level, 0) + 1

    def of_layer(self, layer: int) -> LookaheadCounts:
        """The counts of a layer's guesses, to be added to."""
        return self.lookahead.setdefault(layer, LookaheadCounts())

    def __add__(self, other: TransferCounts) -> TransferCounts:
        """Both together."""
        numbers = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in fields(self)
            if f.name not in ("levels", "lookahead")
        }
        return TransferCounts(
            **numbers,
            levels=_summed(self.levels, other.levels, 0),
            lookahead=_summed(self.lookahead, other.lookahead, LookaheadCounts()),
        )


_Count = TypeVar("_Count", int, LookaheadCounts)


def _summed(mine: dict[int, _Count], theirs: dict[int, _Count], nothing: _Count) -> dict[int, _Count]:
    return {key: mine.get(key, nothing) + theirs.get(key, nothing) for key in mine | theirs}


class Leases(Iterator[Lease]):
    """The experts of one stream, each handed out once, in the order they get ready."""

    @abstractmethod
    def ready(self) -> list[Lease]:
        """Further experts that are ready now, without waiting; they live as long as the one that came before.

        Raises:
            DamagedData: as the iterator itself.
        """


class ExpertSource(ABC):
    """Brings experts into the fastest tier and hands them out. Used by one engine thread."""

    @abstractmethod
    def stream(
        self, wanted: Mapping[ExpertKey, int], *, passing: bool = False
    ) -> AbstractContextManager[Leases]:
        """The experts of `wanted` (key -> level, level > 0), each exactly once, in the order they get ready.

        A lease is valid until the next one is asked for (ready() does not ask) or the context ends; leases
        are released by this, not by the caller. Hits come first. What the source leaves in the slower tier (Split),
        the last of `wanted`, comes alone, and its lease says where it lies. Works however small the tier is, as long
        as one expert fits: what finds no room waits until a lease ends. Leaving the context early (an error, Ctrl-C)
        waits for reads under way and leaves the tiers whole.

        What was read ahead and is wanted is used, whole or half-way; what is not wanted and has not begun
        is cancelled.

        Args:
            wanted: see above.
            passing: whether more such streams will come, which say nothing of who is wanted again: what has to be
                brought is evicted before all others, once the context ends and until a stream that is not.

        Raises:
            DamagedData: when a read fails; every other transfer of the call is waited for first.
        """

    @property
    @abstractmethod
    def looks_ahead(self) -> bool:
        """Whether `speculate` would do anything now: without it nobody need predict."""

    @abstractmethod
    def speculate(self, predicted: Mapping[ExpertKey, int]) -> None:
        """Starts reading what the next layer will probably want, behind every read that is demanded.

        Called while a stream is open; the guess is held against what the next one wants. A second call
        within the same stream adds to it. A read that fails is not an error, unless its expert is wanted
        and fails again.

        Args:
            predicted: key -> level, level > 0, the likeliest first. What is resident costs nothing.

        Raises:
            ValueError: no stream is open.
        """

    @abstractmethod
    def hold(self, key: ExpertKey, level: int) -> Lease | None:
        """A lease on an expert that lasts until `settle` or `close`; between two streams.

        None where the source is not roomy, and where the expert is not resident at `level`.
        """

    @property
    @abstractmethod
    def roomy(self) -> bool:
        """Whether the fastest tier has room for every expert that will ever be asked for."""

    @abstractmethod
    def count_held(self, levels: Sequence[int]) -> None:
        """Counts experts that were wanted at these levels and are held: hits that no stream was asked for."""

    @property
    @abstractmethod
    def holds(self) -> int:
        """Changes when held leases end."""

    @abstractmethod
    def settle(self) -> None:
        """Ends every lease that is held, and all reading ahead: cancels what has not begun, waits for the rest, counts
        it as wasted.

        For whoever is about to change the tiers between two streams. Without effect if there is none.

        Raises:
            ValueError: a stream is open.
        """

    @abstractmethod
    def take_counts(self) -> TransferCounts:
        """The counters since the last call, and starts them anew."""

    @abstractmethod
    def close(self) -> None:
        """Stops the workers. Idempotent; waits for reads under way."""
