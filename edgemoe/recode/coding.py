"""SourceCodes the experts of a store again: Hessians from the sample, then every matrix with error feedback."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TypeVar

import torch

from edgemoe.experts.step import MeasuredLayer
from edgemoe.kernels.native.columns import calibrated_codes
from edgemoe.recode.coding_memory import CodingMemory
from edgemoe.recode.sample import ExpertSample, LayerSample, hessian_of
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.formats.source_codes import Matrix, SourceCodes
from edgemoe.storage.record.encode import assemble, quantize_matrix, squared_error
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.recoded import RecodedLayers
from edgemoe.storage.threads import in_order, one_core_each

_T = TypeVar("_T")

_MEAN = 32
"""Pairs of a token and an expert, as the layer has them on average, that are added to each expert's own."""


class Coding:
    """Codes every layer of a store that has no new file yet.

    Args:
        sample: complete and open.
        experts: the weights of the checkpoint.
        layers: number of a layer -> its experts, for their activation.
        layout: name of the order of codes in the store's records.
        importance: weights of the levels.
        memory: sizes of what is coded.
        progress: called with experts done and in all, from the calling thread; each is counted twice.
    """

    def __init__(
        self,
        sample: ExpertSample,
        experts: ExpertWeights,
        layers: Mapping[int, MeasuredLayer],
        layout: str,
        importance: Mapping[int, float],
        memory: CodingMemory,
        progress: Callable[[int, int], None],
    ) -> None:
        self._sample, self._experts, self._layers = sample, experts, layers
        self._geometry, self._layout, self._importance = memory.geometry, LAYOUTS[layout], importance
        self._memory, self._room = memory, memory.limit
        self._progress, self._done = progress, 0
        self._total = 2 * len(experts.layers) * experts.count

    def write(self, files: RecodedLayers, threads: int) -> None:
        """Writes the files that are missing; prints on stderr how much memory this takes.

        Raises:
            DoesNotFit: less memory is free than a layer with one expert takes, or the disk has too little.
        """
        missing = files.missing()
        if missing:
            self._room = self._memory.room()
        self._advance(2 * self._experts.count * (len(self._experts.layers) - len(missing)))
        files.require_free()
        with one_core_each(threads) as pool:
            for layer in missing:
                error = SourceError()
                records = self._records(layer, pool, error)
                with closing(records):
                    files.write(layer, records, error)

    def _records(self, layer: int, pool: ThreadPoolExecutor, error: SourceError) -> Generator[Bytes]:
        """Yields the records of a layer."""
        sample, count = self._sample.of_layer(layer), self._experts.count
        mean = [sample.hessian(), torch.zeros(0)]
        with closing(in_order(pool, self._tasks(self._down, layer, sample), self._experts_room)) as made:
            for each in made:
                mean[1] = each if not len(mean[1]) else mean[1] + each
                self._advance(1)
        shared = [each.mul_(_MEAN / sample.pairs) for each in mean]
        tasks = self._tasks(partial(self._record, shared=shared), layer, sample)
        with closing(in_order(pool, tasks, self._experts_room)) as records:
            for expert, (record, of_record) in enumerate(records):
                if expert in (0, count // 2):
                    error.add(of_record)
                yield record
                self._advance(1)

    @property
    def _experts_room(self) -> int:
        """Bytes that experts may take next to their layer."""
        return self._room - self._memory.layer

    def _tasks(
        self, call: Callable[[int, int, LayerSample], _T], layer: int, sample: LayerSample
    ) -> Iterator[tuple[int, Callable[[], _T]]]:
        """Yields the memory and the call for each expert of a layer."""
        for expert in range(self._experts.count):
            yield self._memory.expert(sample.rows_of(expert)), partial(call, layer, expert, sample)

    def _read(self, layer: int, expert: int) -> deque[torch.Tensor]:
        """gate_up and down of an expert, float32."""
        return deque(map(_floats, self._experts.read(layer, expert)))

    def _inner(self, layer: int, expert: int, gate_up: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """The inputs of the expert's second matrix for the sampled inputs, float32 [n, I]."""
        return self._layers[layer].inner(expert, inputs @ gate_up.t())

    def _down(self, layer: int, expert: int, sample: LayerSample) -> torch.Tensor:
        """The Hessian of the inputs of the expert's second matrix, float32 [I, I]."""
        inputs, gates = sample.of_expert(expert)
        return hessian_of(self._inner(layer, expert, self._read(layer, expert)[0], inputs), gates)

    def _record(
        self, layer: int, expert: int, sample: LayerSample, *, shared: list[torch.Tensor]
    ) -> tuple[Bytes, SourceError]:
        weights, (inputs, gates) = deque(self._experts.read(layer, expert)), sample.of_expert(expert)
        given = [inputs, self._inner(layer, expert, _floats(weights[0]), inputs)]
        quantized, error, geometry = [], SourceError(), self._geometry.of_layer(layer)
        for spec, rows, mean, bits in zip(
            geometry.matrices, given, shared, geometry.matrix_bits, strict=True
        ):
            weight, level = weights.popleft(), min(spec.limit, geometry.max_level)
            if isinstance(weight, SourceCodes) and weight.bits <= bits:
                made = quantize_matrix(weight, spec, bits, level)  # kept
            else:
                weight = _floats(weight)
                hessian = hessian_of(rows, gates).add_(mean)
                importance = {each: part for each, part in self._importance.items() if each <= level}
                made = calibrated_codes(weight, hessian, spec, importance, bits)
            error.add(SourceError(*squared_error(weight, made, spec, level)))
            quantized.append(made)
        return assemble(geometry, self._layout, quantized), error

    def _advance(self, steps: int) -> None:
        self._done += steps
        self._progress(self._done, self._total)


def _floats(matrix: Matrix) -> torch.Tensor:
    """The weights of a matrix in float32."""
    return matrix.weights() if isinstance(matrix, SourceCodes) else matrix.float()
