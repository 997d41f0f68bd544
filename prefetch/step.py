"""The experts of one step: its requests, the prediction of its next layer, and what it has moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from edgemoe.prefetch.base import StepExperts
from edgemoe.prefetch.compensators.leases import CompensatorLeases
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.layer_request import LayerRequest
from edgemoe.prefetch.lookahead import Lookahead
from edgemoe.prefetch.ordered_request import OrderedRequest
from edgemoe.prefetch.speculation import Speculation
from edgemoe.prefetch.transfers import Transfer, Transfers
from edgemoe.storage.base import ExpertKey


class FetcherStep(StepExperts):
    """Implements StepExperts over a Fetcher's transfers. Used by the engine's thread.

    Args:
        transfers: transfers of experts.
        compensators: transfers of compensators; None: requests want none.
        lookahead: the mode, gate and list that all steps' predictions share.
        counts: moves since the last step ended; this step adds its own to them.
        leftovers: unwanted reads that an earlier step left under way.
        on_end: called at the end with the unwanted reads still under way, which are `leftovers` of the next step.
    """

    def __init__(
        self,
        transfers: Transfers,
        compensators: Transfers | None,
        lookahead: Lookahead,
        counts: TransferCounts,
        leftovers: Iterable[Transfer],
        on_end: Callable[[Sequence[Transfer]], None],
    ) -> None:
        self.counts = counts
        self._transfers, self._compensators = transfers, compensators
        self._lookahead, self._ended = lookahead, on_end
        self._speculation = Speculation(transfers, lookahead, counts)
        self._speculation.take_over(leftovers)
        lookahead.predictions.append(self._speculation)
        self._request: LayerRequest | None = None

    @property
    def predicting(self) -> bool:
        """Whether a prediction waits for the next layer's request or hits."""
        return bool(self._speculation.predicted or self._speculation.flying)

    def request(
        self,
        levels: Mapping[ExpertKey, int],
        *,
        scan: bool = False,
        ordered: bool = False,
        compensated: Mapping[ExpertKey, int] | None = None,
    ) -> LayerRequest:
        """Brings the experts of `levels`. Ctrl-C within the context is raised when the next list is taken, or by its
        end.

        Raises:
            ValueError: the source is closed, or lacks a tier of the wanted compensators. Entering and iterating raise
                as StepExperts.request.
        """
        if self._transfers.workers.closed:
            raise ValueError("expected an open fetcher, got a closed one")
        if self._transfers.launched.waits:
            self._transfers.launched.settle()
        compensators = None
        if self._compensators:
            compensators = CompensatorLeases(self._compensators, compensated or {}, self.counts, scan=scan)
        elif compensated:
            raise ValueError(f"expected a tier of compensators for {len(compensated)} experts, got none")
        self._request = (OrderedRequest if ordered else LayerRequest)(
            self._transfers,
            self._lookahead,
            self._speculation,
            self.counts,
            levels,
            scan=scan,
            compensators=compensators,
        )
        return self._request

    def read_ahead(self, predicted: Mapping[ExpertKey, int], *, scan: bool = False) -> None:
        """Starts reading predicted experts. Without effect unless `looks_ahead`, or `scans_ahead` in a scan."""
        if self._request is None or not self._request.open:
            raise ValueError("expected an open request to read ahead in, got none")
        self._speculation.predict(predicted, scan=scan)
        self._request.advance()

    def count_hits(
        self,
        layers: Sequence[Sequence[tuple[ExpertKey, int]]],
        *,
        scan: bool = False,
        compensated: Sequence[ExpertKey] = (),
    ) -> None:
        """Counts experts that were computed without a request."""
        if self._transfers.path.asynchronous:
            self._transfers.path.computed()
        passed = len(layers)
        if self.predicting:
            self._speculation.resolve(dict(layers[0]))
            passed -= 1
        self._speculation.pass_layers(passed)
        experts = [expert for layer in layers for expert in layer]
        self.counts.requests += len(experts)
        for _, level in experts:
            self.counts.levels[level] = self.counts.levels.get(level, 0) + 1
        self.counts.vram_hits += len(experts)
        tier = self._transfers.vram
        if not scan:
            tier.clear_evict_first()
        # A request leases them in the order of their keys.
        tier.mark_used([key for layer in layers for key, _ in sorted(layer)])
        if self._compensators:
            if not scan:
                self._compensators.vram.clear_evict_first()
            self._compensators.vram.mark_used(compensated)

    def count_computed(self, levels: Mapping[tuple[int, int], int], layers: int) -> None:
        """Counts experts that were computed without a request, in the fastest tier or read in the slower one."""
        counts, bytes_at = self.counts, self._transfers.form.bytes_at
        for (own, wanted), experts in levels.items():
            counts.requests += experts
            counts.levels[wanted] = counts.levels.get(wanted, 0) + experts
            if own >= wanted:
                counts.vram_hits += experts
            else:
                counts.dram_hits += experts
                counts.dram_bytes += experts * (bytes_at(wanted) - (bytes_at(own) if own else 0))
        self._speculation.pass_layers(layers)
        self._transfers.vram.clear_evict_first()

    def count_predictions(self, layers: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> None:
        """Counts predictions for which there was nothing to read."""
        for layer, predicted, wanted in layers:
            self.counts.of_layer(layer).compare(predicted, wanted)

    def end(self) -> None:
        """Ends the prediction, counts repeated reads, and leaves reads that cannot be cancelled to the next step."""
        if self._speculation not in self._lookahead.predictions:
            return
        self._lookahead.predictions.remove(self._speculation)
        self.counts.read_retries += self._transfers.new_retries()
        if self._compensators:
            self.counts.read_retries += self._compensators.new_retries()
        self._ended(self._speculation.leave())
