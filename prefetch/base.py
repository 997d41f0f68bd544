"""Contracts of prefetch: a request for a layer's experts, and the order in which the experts come.

The engine requests a layer's experts and gets leases as they become ready: hits at once, misses as their planes arrive
from a slower tier. Meanwhile it may pass on which experts the next layer will probably request. Between two requests
every resident expert may be computed from directly (`ExpertSource.pinned`).

Threads: one engine thread uses a source. Only calls of the source change the tiers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from edgemoe.cache.base import Lease, Observer
from edgemoe.machine.device import Event
from edgemoe.prefetch.compensators.tier import CompensatorTier
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.launched import LaunchedWork
from edgemoe.storage.base import ExpertKey

MODES = ("off", "base", "full", "auto", "critical")
"""Modes of look-ahead: nothing; the base plane; the predicted level; that level while it pays (lookahead); the
predicted level of the critical experts alone, which the caller chooses."""

SCAN_FRACTION = 0.5
"""Fraction of a layer's experts above which a prompt's request is part of a scan (docs/decisions/0016)."""


def is_scan(count: int, experts: int) -> bool:
    """Whether a prompt that wants so many of a layer's experts goes through all layers' experts in turn.

    >>> is_scan(5, 8), is_scan(4, 8)
    (True, False)
    """
    return count > SCAN_FRACTION * experts


class Request(Iterator[list[Lease]]):
    """The experts of one request, each in exactly one list, in the order in which they become ready.

    Leases of a list, and of its experts' compensators, are valid until the next list is taken or the request ends; the
    request releases them.
    """


class PinnedExperts(ABC):
    """The resident experts of the fastest tier, which may be computed from without a request.

    They are pinned from one call of their source to the next: nothing else evicts, writes or reuses their blocks. An
    observer sees every arrival, change of level and eviction, so a table that it keeps is always the present state.
    """

    launched: LaunchedWork
    """Work that reads them while the source is called: it is settled before blocks of a tier change."""

    @abstractmethod
    def observe(self, observer: Observer) -> None:
        """Calls `observer` for every resident expert now, and at every change (cache.plane_tier.PlaneTier.observe)."""

    @abstractmethod
    def observe_slower(self, observer: Observer) -> None:
        """Does what `observe` does for the experts of the slower tier, where there is one."""

    @abstractmethod
    def arriving(self, keys: Iterable[ExpertKey]) -> list[Event]:
        """Events that are recorded after a device's copies that still fill the blocks of resident experts."""

    @abstractmethod
    def mark_used(self, keys: Sequence[ExpertKey]) -> None:
        """Marks experts of the fastest tier as used, for its eviction; keys that have left it are ignored."""


class StepExperts(ABC):
    """The experts of one step: its requests, its prediction of the next layer, and what it has moved.

        step = source.begin()
        with step.request({ExpertKey(0, 3): 4, ExpertKey(0, 5): 2}) as request:
            step.read_ahead({ExpertKey(1, 2): 4})
            for leases in request:
                compute(leases)
        step.end()

    Attributes:
        counts: bytes and experts moved for this step so far, and between the previous step and this one.
    """

    counts: TransferCounts

    @abstractmethod
    def request(
        self,
        levels: Mapping[ExpertKey, int],
        *,
        scan: bool = False,
        ordered: bool = False,
        compensated: Mapping[ExpertKey, int] | None = None,
    ) -> AbstractContextManager[Request]:
        """Brings the experts of `levels` (key -> level, above 0).

        Hits come first, unless ordered. A tier of any size works as long as one expert fits: an expert without free
        blocks waits until leases end. Leaving the context early (an error, Ctrl-C) waits for reads under way and leaves
        the tiers whole.

        An expert that was read ahead and is requested now is used, even if its read is not complete. A read ahead of
        any other expert is cancelled, unless it has begun.

        Args:
            levels: see above.
            scan: the request is one of many that say nothing about later use: the experts that it brings are evicted
                first, from its end until a request that is no scan.
            ordered: experts come in the order of their keys, whatever is resident. Where blocks are few, an expert that
                waits for its turn may leave them to one whose turn it is, and come again.
            compensated: expert -> level at which its lease comes with its compensator, read where it is not in memory;
                0: at any level. A lease at another level comes without its compensator.

        Raises:
            DamagedData: a read failed; every other transfer of the request has ended then.
            DoesNotFit: the tier cannot hold one expert at its level, or the compensators' tier one compensator.
        """

    @property
    @abstractmethod
    def predicting(self) -> bool:
        """Whether a prediction waits for the next layer's request or hits."""

    @abstractmethod
    def read_ahead(self, predicted: Mapping[ExpertKey, int], *, scan: bool = False) -> None:
        """Starts reading experts that the next layer will probably request, after every demanded read.

        Called within a request, at most once for a layer; calls add up. A read that fails is no error, unless its
        expert is requested and fails again.

        Args:
            predicted: key -> level, above 0, the likeliest first. A resident expert costs nothing.
            scan: they are most of the next layer's experts, and are read in the order of their keys, the order on disk,
                many at a time; whether predictions have paid so far does not matter.

        Raises:
            ValueError: there is no open request.
        """

    @abstractmethod
    def count_hits(
        self,
        layers: Sequence[Sequence[tuple[ExpertKey, int]]],
        *,
        scan: bool = False,
        compensated: Sequence[ExpertKey] = (),
    ) -> None:
        """Counts experts that were computed without a request, as a request of each layer would have.

        Called after a device's kernels were launched, and before the next call of the source.

        Args:
            layers: (key, level) pairs of each layer, in the order in which they ran; every key is resident.
            scan: see `request`.
            compensated: experts whose compensators were used, in this order.
        """

    @abstractmethod
    def count_computed(self, levels: Mapping[tuple[int, int], int], layers: int) -> None:
        """Counts experts that a device computed where they lie, as requests. The experts' use is not marked.

        Args:
            levels: (level in the fastest tier, 0 where absent; requested level, above 0) -> number of experts.
            layers: number of layers.
        """

    @abstractmethod
    def count_predictions(self, layers: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> None:
        """Counts (layer, experts predicted, experts wanted) of predictions for which there was nothing to read."""

    @abstractmethod
    def end(self) -> None:
        """Ends the prediction with the step: `counts` is complete. Idempotent.

        Reads ahead that no layer wanted, and that cannot be cancelled any more, count in the next step.
        """


class ExpertSource(ABC):
    """Brings experts into the fastest tier and leases them out, to one step at a time (StepExperts).

    A source can wrap another one, to measure it: callers use this contract alone.
    """

    @abstractmethod
    def configure(self, look_ahead: str) -> None:
        """Sets what the requests that follow read ahead (one of MODES).

        Raises:
            ValueError: no such mode.
        """

    @abstractmethod
    def use_compensators(self, where: CompensatorTier | None) -> None:
        """Sets the tier of the compensators of the requests that follow, at first none. Called between two requests."""

    @abstractmethod
    def begin(self) -> StepExperts:
        """Begins a step. Others may begin and end before it ends, between two of its requests."""

    @property
    @abstractmethod
    def pinned(self) -> PinnedExperts:
        """The experts that may be computed from without a request."""

    @property
    @abstractmethod
    def looks_ahead(self) -> bool:
        """Whether `read_ahead` has an effect now."""

    @property
    @abstractmethod
    def scans_ahead(self) -> bool:
        """Whether `read_ahead` has an effect in a scan now."""

    @abstractmethod
    def fill(self, keys: Sequence[ExpertKey], levels: Sequence[int], go_on: Callable[[], bool]) -> None:
        """Reads experts into free blocks of the tiers, the fastest first, between two requests.

        While the fastest tier has free blocks, it evicts none.

        An expert that cannot be read ends the call without an error. Moved bytes are not counted. It may run on another
        thread while no caller uses the source.

        Args:
            keys: the experts, the most urgent first.
            levels: high to low; each is used while blocks for it are free.
            go_on: called before every batch and after every expert; False ends it with the reads under way.

        Raises:
            ValueError: the source is closed, or a request is open.
        """

    @abstractmethod
    def promote(self, levels: Mapping[ExpertKey, int], counts: TransferCounts) -> None:
        """Copies experts that the slower tier has into the fastest one, between two requests. Evicts others.

        Counts the bytes, and no requests. Copies wait for launched kernels; for copies see PinnedExperts.arriving.

        Args:
            levels: key -> level, which the slower tier has.
            counts: the counters that the bytes are added to.

        Raises:
            ValueError: as `request`.
        """

    @abstractmethod
    def change_levels(
        self, demote: Mapping[ExpertKey, int], promote: Mapping[ExpertKey, int], *, rate: float | None
    ) -> None:
        """Sets which experts of the fastest tier change their level in the background; replaces changes that wait.

        Args:
            demote: key -> the level that the expert keeps, above 0.
            promote: key -> its level, the most urgent first. Free blocks alone are used; nothing is evicted.
            rate: bytes per second that promotions may take on average; None: no limit.
        """

    @abstractmethod
    def advance_changes(self, counts: TransferCounts, *, start: bool = True, settle: bool = False) -> None:
        """Publishes the experts that change_levels has brought so far, and starts more reads. Called between two steps.

        Args:
            counts: the counters to which the moves are added.
            start: False starts nothing: a prompt follows.
            settle: starts every waiting change, and waits for all of them.
        """

    @abstractmethod
    def release_pins(self) -> None:
        """Ends everything that pins blocks between two requests: predictions, changes of level, reads and leases.

        For a caller that changes the tiers. Cancels reads that have not begun, waits for the others, counts them as
        wasted.

        Raises:
            ValueError: a request is open.
        """

    @abstractmethod
    def resize(self, capacity: Mapping[str, int]) -> None:
        """Changes the number of blocks of the fastest tier, between two requests (cache.plane_tier.PlaneTier.resize).

        Releases pins before. Experts that leave go to the slower tier, where that has blocks for them.

        Args:
            capacity: block kind's name -> blocks, at most as many as the tier began with.

        Raises:
            ValueError: a request is open.
        """

    @abstractmethod
    def close(self) -> None:
        """Waits for reads under way and ends the threads. Idempotent."""
