"""The compensators of one request: leased together with their experts, and read where they are not in memory."""

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

    A read begins once its expert's blocks are leased or reserved, after the expert's own read, so a compensator that
    waits for room waits for experts that can be computed.

    Args:
        transfers: transfers into the tier of compensators.
        levels: `compensated` of StepExperts.request.
        counts: the counters of the step.
        scan: see StepExperts.request.
    """

    def __init__(
        self,
        transfers: Transfers,
        levels: Mapping[ExpertKey, int],
        counts: TransferCounts,
        *,
        scan: bool = False,
    ) -> None:
        self._transfers, self._wanted, self._scan = transfers, levels, scan
        self._counts = counts
        self._leases: dict[ExpertKey, Lease] = {}
        self._missing: deque[ExpertKey] = deque()
        self._brought: list[ExpertKey] = []

    @property
    def under_way(self) -> Mapping[ExpertKey, Transfer]:
        """The reads under way, by expert; none where the request wants no compensator."""
        return self._transfers.under_way if self._wanted else {}

    def begin(self) -> None:
        """Leases the compensators that are in memory, so that no read evicts them."""
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
        known = key in self._leases or key in self._missing or key in self._transfers.under_way
        if not known and self._needs(key, level):
            self._missing.append(key)
            self.advance()

    def advance(self) -> None:
        """Starts reads, in the order in which they were wanted, as far as bytes are free or can be freed.

        One whose lease was given up, and whose bytes were not taken, is leased again.
        """
        while self._missing:
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
        for transfer in [each for each in self.under_way.values() if each.done]:
            if lease := self._transfers.end_transfer(transfer):
                self._leases[transfer.key] = lease
            if transfer.error:
                return transfer.error
        return None

    def release(self, experts: Collection[Lease]) -> None:
        """Ends the leases of experts that were computed."""
        found = [self._leases.pop(lease.key) for lease in experts if lease.key in self._leases]
        self._transfers.vram.release(*found)

    def start_alone(self) -> None:
        """Starts the first missing read where no other expert can be computed before, so that no lease is of use.

        Raises:
            DoesNotFit: the tier is smaller than the compensator.
        """
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
        self._missing.clear()
        begun = [each for each in list(self.under_way.values()) if not self._transfers.cancel(each)]
        if begun:
            with GivingUp():
                for transfer in begun:
                    self._transfers.await_done((transfer,))
                    if lease := self._transfers.end_transfer(transfer):
                        self._transfers.vram.release(lease)
        self._release_all()
        if self._scan and self._brought:
            self._transfers.vram.mark_evict_first(self._brought)
        self._brought = []

    def _needs(self, key: ExpertKey, level: int) -> bool:
        return key in self._wanted and self._wanted[key] in (0, level)

    def _release_all(self) -> None:
        self._transfers.vram.release(*self._leases.values())
        self._leases = {}
