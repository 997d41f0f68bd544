"""The computation of a store's compensators, layer by layer: errors of a level, ranks, and factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from edgemoe.errors import ModelRefused
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.compensators.files import CompensatorFiles, CompensatorRun
from edgemoe.storage.compensators.geometry import CompensatorGeometry, Ranks
from edgemoe.storage.compensators.index import PROJECTIONS, CompensatorIndex, LayerCompensators
from edgemoe.storage.compensators.low_rank import compensator, spectrum
from edgemoe.storage.compensators.ranks import error_ranks, kurtosis, kurtosis_ranks
from edgemoe.storage.compensators.reference import stored_weights
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.formats.source_codes import SourceCodes
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.reader import RecordReader
from edgemoe.storage.threads import one_core_each

_MOST_DIFFERENT = {8: 0.1, 4: 0.4, 2: 0.9}
"""Level -> largest relative error of a store's expert against another checkpoint of the same model."""


class Computation:
    """The computation of one run, with its progress."""

    def __init__(
        self,
        run: CompensatorRun,
        manifest: Manifest,
        experts: ExpertWeights | None,
        reader: RecordReader,
        files: CompensatorFiles,
        progress: Callable[[int, int], None],
    ) -> None:
        self._run, self._manifest, self._experts, self._reader = run, manifest, experts, reader
        self._files, self._progress = files, progress
        self._geometry = manifest.geometry
        self._passes = 1 if run.rule == "uniform" else 2
        self._counts = {layer: len(found.records) for layer, found in sorted(manifest.layers.items())}
        self._done, self._total = 0, self._passes * sum(self._counts.values())
        self._error = SourceError()

    def write(self, threads: int) -> CompensatorIndex:
        """Writes the file of every layer that has none yet."""
        layers, run = dict[int, LayerCompensators](), self._run
        for layer, count in self._counts.items():
            if found := self._files.finished(layer):
                layers[layer], error = found
                self._error.add(error)
                self._advance(self._passes * count)
        missing = [layer for layer in self._counts if layer not in layers]
        self._files.require_free(missing)
        with one_core_each(threads) as pool:
            for layer in missing:
                layers[layer] = self._write_layer(layer, pool)
        return CompensatorIndex(
            run.base_level, run.rule, run.mean_rank, run.reference, self._error.relative, layers
        )

    def _write_layer(self, layer: int, pool: ThreadPoolExecutor) -> LayerCompensators:
        ranks, error = self._ranks(layer, pool), SourceError()

        def made() -> Iterator[Bytes]:
            experts = range(self._counts[layer])
            for raw, of_expert in pool.map(lambda e: self._compensator(layer, e, ranks[e]), experts):
                error.add(of_expert)
                yield raw
                self._advance(1)

        found = self._files.write(layer, ranks, made(), error)
        self._error.add(error)
        return found

    def _ranks(self, layer: int, pool: ThreadPoolExecutor) -> list[Ranks]:
        """Assigns the ranks of a layer's projections."""
        count, mean = self._counts[layer], self._run.mean_rank
        if self._run.rule == "uniform":
            return [(mean,) * 3] * count
        found: list[list[torch.Tensor]] = []
        for measures in pool.map(lambda e: self._measures(layer, e), range(count)):
            found.append(measures)
            self._advance(1)
        if self._run.rule == "error":
            spectra = torch.stack([torch.stack(measures) for measures in found])
            assigned = error_ranks(
                spectra, lambda ranks: self._shape((ranks[0], ranks[1], ranks[2])).nbytes, mean
            )
            return [(gate, up, down) for gate, up, down in assigned]
        values = [float(measure) for measures in found for measure in measures]
        flat = kurtosis_ranks(values, mean, self._shape((0, 0, 0)).most)
        return [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), len(PROJECTIONS))]

    def _measures(self, layer: int, expert: int) -> list[torch.Tensor]:
        """The measures of gate, up and down by which the rule assigns ranks: kurtosis, or the error's spectrum."""
        if self._run.rule == "kurtosis":
            gate_up, down = self._weights(layer, expert)
            return [torch.tensor(kurtosis(weight)) for weight in (*gate_up.chunk(2), down)]
        return [spectrum(error) for error in self._errors(layer, expert)]

    def _compensator(self, layer: int, expert: int, ranks: Ranks) -> tuple[Bytes, SourceError]:
        errors = self._errors(layer, expert)
        before = sum(float(error.square().sum(dtype=torch.float64)) for error in errors)
        raw, left = compensator(errors, self._shape(ranks))
        return raw, SourceError(left, before)

    def _errors(self, layer: int, expert: int) -> tuple[torch.Tensor, ...]:
        """The weights minus the base level of an expert: gate [I, H], up [I, H] and down [H, I], float32."""
        weights = self._weights(layer, expert)
        if self._experts and self._run.reference != self._manifest.source:
            self._check_weights(layer, expert, weights)
        gate_up, down = (
            w.sub_(s) for w, s in zip(weights, self._stored(layer, expert, self._run.base_level), strict=True)
        )
        return (*gate_up.chunk(2), down)

    def _weights(self, layer: int, expert: int) -> list[torch.Tensor]:
        """gate_up and down of an expert, float32."""
        if self._experts is None:
            return self._stored(layer, expert, self._manifest.max_level)
        matrices = self._experts.read(layer, expert)
        return [m.weights() if isinstance(m, SourceCodes) else m.float() for m in matrices]

    def _stored(self, layer: int, expert: int, level: int) -> list[torch.Tensor]:
        return stored_weights(self._reader, self._manifest, ExpertKey(layer, expert), level)

    def _check_weights(self, layer: int, expert: int, weights: Sequence[torch.Tensor]) -> None:
        """Compares weights of another checkpoint than the store's with the store's highest level."""
        level = self._manifest.max_level
        found = SourceError()
        for weight, stored in zip(weights, self._stored(layer, expert, level), strict=True):
            found.add(SourceError(float((stored - weight).square().sum()), float(weight.square().sum())))
        if found.relative > _MOST_DIFFERENT[level]:
            raise ModelRefused(
                "the weights that the store was converted from",
                f"others in layer {layer}, expert {expert}: they differ by {found.relative:.2f} of their size",
                "give --reference the checkpoint that the store was converted from",
            )

    def _shape(self, ranks: Ranks) -> CompensatorGeometry:
        return CompensatorGeometry.of(self._geometry, ranks)

    def _advance(self, steps: int) -> None:
        self._done += steps
        self._progress(self._done, self._total)
