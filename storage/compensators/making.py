"""Compensators of a store's experts, from the weights that it was converted from: resumable layer by layer.

The files lie in a folder of the store. The index in store.json is written last, so a store has all compensators of one
run or none of them, and it can be read meanwhile. The names of a run's files contain a hash of its options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from edgemoe.errors import ModelRefused, UserError
from edgemoe.storage.base import PLANES_OF_LEVEL, ExpertKey, Plane
from edgemoe.storage.compensators.files import CompensatorFiles, CompensatorRun
from edgemoe.storage.compensators.index import (
    FOLDER,
    PROJECTIONS,
    CompensatorGeometry,
    CompensatorIndex,
    LayerCompensators,
    Ranks,
    check_choices,
)
from edgemoe.storage.compensators.low_rank import compensator, error_ranks, kurtosis, kurtosis_ranks, spectrum
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertNames, ExpertWeights
from edgemoe.storage.convert.run import destination_errors, require_unchanged, source_errors
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.files.unbuffered import aligned
from edgemoe.storage.formats.base import FourBit
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.manifest import Manifest, save_compensators
from edgemoe.storage.store.reader import RecordReader
from edgemoe.storage.threads import cores, one_core_each

_MOST_DIFFERENT = {8: 0.1, 4: 0.4, 2: 0.9}
"""Level -> largest relative error of a store's expert against another checkpoint of the same model."""


def compensate(
    source: Path | None,
    directory: Path,
    family: ExpertNames | None,
    *,
    base_level: int,
    rule: str,
    mean_rank: int,
    progress: Callable[[int, int], None],
    threads: int | None = None,
) -> Manifest:
    """Adds compensators to a store, or replaces its present ones; resumes an interrupted call.

    A store that has these compensators is not changed. The store can be read meanwhile. Bytes do not depend on the
    number of threads. Memory: some float32 copies of an expert for each thread.

    Args:
        source: directory of the checkpoint with the weights, or a GGUF file; None: the weights are those of the store's
            highest level.
        directory: of the store.
        family: of the source's config; None without a source.
        base_level, rule, mean_rank: as for CompensatorRun.
        progress: called with steps done and in all, from the calling thread; every expert takes equally many.
        threads: that compute; by default one for each core of this process.

    Returns:
        the store's manifest with the compensators.

    Raises:
        UserError: an option out of range; a store without the level; no store, or one that this user cannot write.
        ModelRefused: a source with another model's weights, or weights that the level keeps exactly: 4-bit codes at
            level 4, or the store's own highest level.
        StoreBusy: another process writes the store or its compensators.
        DoesNotFit: the disk is too small.
        DamagedData: the source or the store is damaged, or the operating system refused a call.
    """
    manifest = Manifest.load(directory)
    run, weights = _run_of(source, directory, family, manifest, base_level, rule, mean_rank)
    files = CompensatorFiles(run, directory, manifest)
    folder = directory / FOLDER
    with destination_errors(directory):
        folder.mkdir(exist_ok=True)
        with StoreLock(folder, exclusive=True):
            with RecordReader.open(directory, manifest) as reader:
                made = Manifest.load(directory)
                found = made.compensators
                if not (found and _is_of(found, run) and files.hold(found)):
                    job = _Compensation(run, manifest, weights, reader, files, progress)
                    index = job.write(threads or cores())
                    if source:
                        require_unchanged(source, run.reference)
                    made = save_compensators(directory, index)
            files.remove_others(made)
    return made


def compensators_beside(
    source: Path,
    directory: Path,
    family: ExpertNames,
    into: Path,
    *,
    base_level: int,
    rule: str,
    mean_rank: int,
    progress: Callable[[int, int], None],
) -> CompensatorIndex:
    """Writes compensators of a store into another directory, which must exist; the store stays as it is.

    Other arguments and errors are those of `compensate`.

    Returns:
        the index of the files in `into`.
    """
    manifest = Manifest.load(directory)
    run, weights = _run_of(source, directory, family, manifest, base_level, rule, mean_rank)
    with destination_errors(into), RecordReader.open(directory, manifest) as reader:
        (into / FOLDER).mkdir(exist_ok=True)
        files = CompensatorFiles(run, into, manifest)
        return _Compensation(run, manifest, weights, reader, files, progress).write(cores())


def _run_of(
    source: Path | None,
    directory: Path,
    family: ExpertNames | None,
    manifest: Manifest,
    base_level: int,
    rule: str,
    mean_rank: int,
) -> tuple[CompensatorRun, ExpertWeights | None]:
    """Checks the options; returns the run, and the weights as _weights_of."""
    _check_options(directory, manifest, base_level, rule, mean_rank)
    reference, weights = _weights_of(source, family, directory, manifest, base_level)
    return CompensatorRun(manifest.fingerprint, reference, base_level, rule, mean_rank), weights


def _weights_of(
    source: Path | None, family: ExpertNames | None, directory: Path, manifest: Manifest, base_level: int
) -> tuple[str, ExpertWeights | None]:
    """Opens the weights that the base level is compared with, and refuses what it keeps exactly.

    Returns:
        the run's reference; the weights, None for those of the store's highest level.
    """
    if source and family:
        with source_errors(source):
            checkpoint = Checkpoint.open(source)
            experts = ExpertWeights(checkpoint, family)
            reference = checkpoint.fingerprint()
        _check_source(checkpoint, experts, directory, manifest, base_level)
        return reference, experts
    if base_level == manifest.max_level:
        raise ModelRefused(
            f"weights of more than {base_level} bits to compensate level {base_level} of {directory}",
            "a store without a higher level",
            "give --reference the checkpoint that it was converted from",
        )
    return f"level {manifest.max_level}", None


def _check_source(
    checkpoint: Checkpoint, experts: ExpertWeights, directory: Path, manifest: Manifest, base_level: int
) -> None:
    """Refuses a checkpoint of another shape than the store's, and 4-bit codes where level 4 keeps them."""
    if experts.has_codes and base_level == 4:
        raise ModelRefused(
            f"a checkpoint with weights of more than 4 bits to compensate level 4 of {directory}",
            f"4-bit codes ({checkpoint.format}) in {checkpoint.directory}",
            "give --reference the checkpoint that this one was quantized from, or choose --residual 2",
        )
    fields = {
        "layers with experts": (sorted(manifest.layers), sorted(experts.layers)),
        "experts a layer": ({len(layer.records) for layer in manifest.layers.values()}, {experts.count}),
        "shapes of an expert": (
            *([[m.rows, m.cols] for m in g.matrices] for g in (manifest.geometry, experts.geometry(None))),
        ),
    }
    for field, (wanted, found) in fields.items():
        if wanted != found:
            raise ModelRefused(
                f"{field} {wanted} in {checkpoint.directory}, as {directory} has",
                str(found),
                "give --reference the checkpoint that the store was converted from",
            )


def _check_options(directory: Path, manifest: Manifest, base_level: int, rule: str, mean_rank: int) -> None:
    check_choices(base_level, rule)
    if base_level > manifest.max_level:
        raise UserError(
            f"level {base_level} in {directory}",
            f"a store up to level {manifest.max_level}",
            f"choose --residual {manifest.max_level}",
        )
    most = CompensatorGeometry.of(manifest.geometry, (0, 0, 0)).most
    if not 1 <= mean_rank <= most:
        raise UserError(
            f"a mean rank from 1 to {most}, the smaller side of an expert's matrices",
            str(mean_rank),
            "choose another",
        )


def _is_of(index: CompensatorIndex, run: CompensatorRun) -> bool:
    """Whether compensators are the result of a run on their store."""
    found = (index.reference, index.base_level, index.rule, index.mean_rank)
    return found == (run.reference, run.base_level, run.rule, run.mean_rank)


class _Compensation:
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
        self._geometry, self._layout = manifest.geometry, LAYOUTS[manifest.layout]
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
        """What the rule assigns the ranks of gate, up and down by: kurtosis, or the spectrum of the error."""
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
        """What the base level of an expert lacks: of gate [I, H], up [I, H] and down [H, I], float32."""
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
        return [m.weights() if isinstance(m, FourBit) else m.float() for m in matrices]

    def _stored(self, layer: int, expert: int, level: int) -> list[torch.Tensor]:
        """The matrices of an expert of the store at a level."""
        record = aligned(self._geometry.prefix_bytes(level))
        last = Plane(PLANES_OF_LEVEL[level] - 1)
        self._reader.read(ExpertKey(layer, expert), Plane.BASE, last, [record.data])
        return decode(record, self._geometry, self._layout, level)

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
