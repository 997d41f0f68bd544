"""Compensators of a store's experts, from the weights that it was converted from: resumable layer by layer.

The files lie in a folder of the store. The index in store.json is written last, so a store has all compensators of one
run or none of them, and it can be read meanwhile. The names of a run's files contain a hash of its options.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edgemoe.errors import StoreBusy
from edgemoe.machine.cgroups import cores
from edgemoe.storage.compensators.computation import Computation
from edgemoe.storage.compensators.files import CompensatorFiles, CompensatorRun
from edgemoe.storage.compensators.index import FOLDER, CompensatorIndex
from edgemoe.storage.compensators.reference import is_of, run_of
from edgemoe.storage.convert.expert_weights import ExpertNames, ExpertWeights
from edgemoe.storage.convert.system_errors import destination_errors, require_unchanged
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.manifest_updates import save_compensators
from edgemoe.storage.store.reader import RecordReader


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

    A store that has these compensators is not changed. Bytes do not depend on the number of threads. Memory: some
    float32 copies of an expert for each thread.

    Args:
        source: a checkpoint's directory or GGUF file; None: the weights of the store's highest level.
        directory: the store.
        family: the names of the source's config; None without a source.
        base_level, rule, mean_rank: see CompensatorRun.
        progress: called with steps done and in all, from the calling thread; every expert takes equally many.
        threads: threads that compute; by default one for each core of this process.

    Returns:
        the store's manifest with the compensators.

    Raises:
        UserError: an option out of range; a store without the level; no store, or one that this user cannot write.
        ModelRefused: another model's weights, or weights that the level keeps exactly.
        StoreBusy: another process writes the store or its compensators.
        DoesNotFit: the disk is too small.
        DamagedData: the source or the store is damaged, or the operating system refused a call.
    """
    manifest = Manifest.load(directory)
    run, weights = run_of(source, directory, family, manifest, base_level, rule, mean_rank)
    return _into_store(run, weights, source, directory, manifest, progress, threads or cores())


def _into_store(
    run: CompensatorRun,
    weights: ExpertWeights | None,
    source: Path | None,
    directory: Path,
    manifest: Manifest,
    progress: Callable[[int, int], None],
    threads: int,
) -> Manifest:
    """Makes the compensators of a run unless the store has them; arguments as for `compensate`."""
    files = CompensatorFiles(run, directory, manifest)
    folder = directory / FOLDER
    with destination_errors(directory):
        folder.mkdir(exist_ok=True)
        with StoreLock(folder, exclusive=True):
            with RecordReader.open(directory, manifest) as reader:
                made = Manifest.load(directory)
                found = made.compensators
                if not (found and is_of(found, run) and files.hold(found)):
                    index = Computation(run, manifest, weights, reader, files, progress).write(threads)
                    if source:
                        require_unchanged(source, run.reference)
                    made = save_compensators(directory, index)
            _remove_others(directory, made)
    return made


def _remove_others(directory: Path, manifest: Manifest) -> None:
    """Removes the files of other and of killed runs, or none while a reader, which may open them, uses the store.

    Files that stay cost disk alone, and the next call removes them.
    """
    assert manifest.compensators
    names = {layer.file for layer in manifest.compensators.layers.values()}
    with suppress(StoreBusy), StoreLock(directory, exclusive=True):
        for path in (directory / FOLDER).iterdir():
            if path.name not in names:
                with suppress(OSError):
                    path.unlink()


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

    Other arguments and errors: see `compensate`.

    Returns:
        the index of the files in `into`.
    """
    manifest = Manifest.load(directory)
    run, weights = run_of(source, directory, family, manifest, base_level, rule, mean_rank)
    with destination_errors(into), RecordReader.open(directory, manifest) as reader:
        (into / FOLDER).mkdir(exist_ok=True)
        files = CompensatorFiles(run, into, manifest)
        return Computation(run, manifest, weights, reader, files, progress).write(cores())
