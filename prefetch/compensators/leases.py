"""The compensators of one request: leased beside their experts, and read where they are not in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from edgemoe.cache.base import Lease
from edgemoe.errors import DoesNotFit
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.transfers import Transfer, Transfers
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.compensators.reader import LEVEL
from edgemoe.storage.files.retry import GivingUp
from edgemoe.storage.sizes import format_size


class CompensatorLeases:
    """The leases and reads of a request's compensators. Used by the engine's thread.

    A read begins once its expert's blocks are leased or reserved, behind the expert's own read, so a compensator that
    waits for room waits for experts that can be computed.

    Args:
        transfers: into the tier of compensators; None: there is none.
        wanted: `compensated` of StepExperts.request.
        counts: the counters of the step.
        scan: as in StepExperts.request.

    Raises:
        ValueError: some are wanted where there is no tier of them.
    """

    def __init__(
        self,
        transfers: Transfers | None,
        wanted: Mapping[ExpertKey, int],
        counts: TransferCounts,
        *,
        scan: bool = False,
    ) -> None:
        if wanted and transfers is None:
            raise ValueError(f"expected a tier of compensators for {len(wanted)} experts, got none")
        self._transfers, self._wanted, self._scan = transfers, wanted if transfers else {}, scan
        self._counts = counts
        self._leases: dict[ExpertKey, Lease] = {}
        self._missing: deque[ExpertKey] = deque()
        self._brought: list[ExpertKey] = []

    @property
    def any(self) -> bool:
        """Whether the request wants a compensator."""
        return bool(self._wanted)

    @property
    def under_way(self) -> Collection[Transfer]:
        """The reads under way."""
        return self._transfers.under_way.values() if self._transfers and self._wanted else ()

    def begin(self) -> None:
        """Leases the compensators that are in memory, so that no read evicts them."""
        if self._transfers is None:
            return
        if not self._scan:
            self._transfers.vram.clear_evict_first()
        if self._wanted:
            found = self._transfers.vram.acquire_all(dict.fromkeys(self._wanted, LEVEL))
            self._leases = {lease.key: lease for lease in found.hits}

    def has(self, expert: Lease) -> bool:
        """Whether a leased expert may be computed: it has its compensator, or is computed without one."""
        return expert.key in self._leases or not self._needs(expert.key, expert.level)

    def want(self, key: ExpertKey, level: int) -> None:
        """Starts the read of a missing compensator whose expert has its blocks, or their reservation, at a level."""
        assert self._transfers
        known = key in self._leases or key in self._missing or key in self._transfers.under_way
        if not known and self._needs(key, level):
            self._missing.append(key)
            self.advance()

    def advance(self) -> None:
        """Starts reads, in the order in which they were wanted, as far as bytes are free or can be freed.

        One whose lease was given up, and whose bytes were not taken, is leased again.
        """
        while self._missing and self._transfers:
            key = self._missing[0]
            if lease := self._transfers.vram.acquire(key, LEVEL):
                self._leases[key] = lease
            elif self._transfers.start(key, LEVEL, self._counts):
                self._brought.append(key)
            else:
                return
            self._missing.popleft()

    def collect(self) -> BaseException | None:
        """Ends every read that is done. Returns the error of one that failed."""
        assert self._transfers
        for transfer in self._transfers.done():
            if lease := self._transfers.end(transfer):
                self._leases[transfer.key] = lease
            if transfer.error:
                return transfer.error
        return None

    def release(self, experts: Collection[Lease]) -> None:
        """Ends the leases of experts that were computed."""
        if self._transfers:
            found = [self._leases.pop(lease.key) for lease in experts if lease.key in self._leases]
            self._transfers.vram.release(*found)

    def start_alone(self) -> None:
        """Starts the first missing read where no other expert can be computed before, so that no lease is of use.

        Raises:
            DoesNotFit: the tier is smaller than the compensator.
        """
        assert self._transfers
        key = self._missing[0]
        self._missing.extend(self._leases)
        self._release_all()
        self.advance()
        if not self.under_way:
            size = self._transfers.form.bytes_at(LEVEL)
            raise DoesNotFit(
                f"{format_size(size)} for the compensator of expert {key.expert} of layer {key.layer}",
                "a tier that is smaller",
                "raise --compensators-limit",
                minimum=size,
            )

    def finish(self) -> None:
        """Ends every lease and read; reads that have not begun never do. Idempotent."""
        if self._transfers is None:
            return
        self._missing.clear()
        begun = [transfer for transfer in list(self.under_way) if not self._transfers.cancel(transfer)]
        if begun:
            with GivingUp():
                for transfer in begun:
                    self._transfers.await_done((transfer,))
                    if lease := self._transfers.end(transfer):
                        self._transfers.vram.release(lease)
        self._release_all()
        if self._scan and self._brought:
            self._transfers.vram.mark_evict_first(self._brought)
        self._brought = []

    def _needs(self, key: ExpertKey, level: int) -> bool:
        return key in self._wanted and self._wanted[key] in (0, level)

    def _release_all(self) -> None:
        assert self._transfers
        self._transfers.vram.release(*self._leases.values())
        self._leases = {}
