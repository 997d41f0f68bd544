"""Export of a store to a directory: on every core, few experts in memory at a time, resumable per file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from edgemoe.errors import UserError
from edgemoe.storage.convert.checkpoint import bounded_config
from edgemoe.storage.convert.run import destination_errors
from edgemoe.storage.export.checkpoint import CheckpointPlan, CompressedPlan, PlanMaker
from edgemoe.storage.export.directory import ExportDirectory
from edgemoe.storage.export.levels import Levels
from edgemoe.storage.export.matrices import StoreExperts
from edgemoe.storage.export.names import ExportNames
from edgemoe.storage.export.plan import Errors, Made, Plan, PlannedFile
from edgemoe.storage.export.sink import Sink
from edgemoe.storage.files.source_file import read_whole
from edgemoe.storage.files.untrusted import read_json
from edgemoe.storage.store.manifest import DENSE_NAME, Manifest
from edgemoe.storage.store.verify import check_file
from edgemoe.storage.threads import cores, in_order, one_core_each

_MEMORY = 100_000_000
"""Bytes: limit of all experts and tensors that are read, encoded or wait for their write; one is always allowed."""


def _gguf(*arguments: Any) -> Plan:
    # Imported here: only GGUF files need the gguf package.
    from edgemoe.storage.export.gguf_plan import GgufPlan

    return GgufPlan(*arguments)


FORMATS: dict[str, PlanMaker] = {
    "compressed-tensors": CompressedPlan,
    "gguf": _gguf,
    "safetensors": CheckpointPlan,
}
"""Name of a format -> its plan."""


def export(
    store: Path,
    destination: Path,
    family: ExportNames,
    *,
    format: str,
    levels: Levels,
    progress: Callable[[int, int], None],
    threads: int | None = None,
) -> Errors:
    """Exports a store, or resumes an interrupted export; a finished export of the same content is not changed.

    All checks that need no weights come before the first write. The files' bytes do not depend on the number of
    threads, nor on interruptions. Peak memory: 100 MB, or more where the largest dense tensor with its exported form or
    one expert takes more; and an expert per thread.

    Args:
        store: directory of the store.
        destination: directory to write, created if necessary.
        family: of the store's config.
        format: a key of FORMATS.
        levels: of every expert.
        progress: called with bytes of weights written and in all, from the calling thread.
        threads: number of threads that read and encode experts; by default two per core of this process, so that
            one computes while the other waits for the disk.

    Returns:
        The errors of the exported weights, over the first and the middle expert of every layer.

    Raises:
        UserError: the format cannot hold these levels or this model, or the destination holds other files.
        StoreBusy: another process writes the store or uses the destination.
        DoesNotFit: the disk is too small.
        DamagedData: the store's bytes differ from its checksums.
    """
    if destination.resolve() == store.resolve():
        raise UserError("a directory for the export", f"the store {store}", "choose another directory")
    manifest = Manifest.load(store)
    with StoreExperts(store, manifest) as experts:
        for name in manifest.files.keys() - {DENSE_NAME}:
            _require_whole(store, manifest, name)
        plan = FORMATS[format](experts, family, bounded_config(read_json(store, "config.json")), levels)
        content = {"store": manifest.fingerprint, "format": format, "levels": _digest(levels)}
        with (
            destination_errors(destination, "an export"),
            ExportDirectory(destination, content, _layout_of(plan)) as out,
        ):
            job = _Export(store, manifest, plan, out, progress)
            if out.finished and not job.is_whole():
                out.reopen()
            if not out.finished:
                job.write(threads or 2 * cores())
                out.finish()
            return job.errors()


def _layout_of(plan: Plan) -> str:
    """A digest of all names, headers, regions and small files: files of another layout do not belong together."""
    digest = xxhash.xxh3_128()
    for file in plan.files:
        digest.update(repr((file.name, file.header, file.regions)).encode())
    digest.update(repr((sorted(plan.small_files.items()), sorted(plan.copied))).encode())
    return digest.hexdigest()


def _require_whole(store: Path, manifest: Manifest, name: str) -> None:
    """Compares a file of the store with its checksum."""
    _, damage = check_file(store / name, manifest.files[name])
    if damage:
        raise damage[0]


def _digest(levels: Levels) -> Any:
    """The one level of all experts, or a digest of a map."""
    found = {level for layer in levels.values() for level in layer}
    return (
        found.pop() if len(found) == 1 else xxhash.xxh3_128_hexdigest(repr(sorted(levels.items())).encode())
    )


class _Export:
    """The export of one store, with its progress."""

    def __init__(
        self,
        store: Path,
        manifest: Manifest,
        plan: Plan,
        out: ExportDirectory,
        progress: Callable[[int, int], None],
    ) -> None:
        self._store, self._manifest, self._plan, self._out = store, manifest, plan, out
        self._total = sum(sum(file.regions) for file in plan.files)
        self._done, self._progress = 0, progress

    def errors(self) -> Errors:
        """The sums of all files, of this and earlier runs."""
        out = Errors()
        for file in self._plan.files:
            out.add(Errors(**self._out.note(file.name)))
        return out

    def is_whole(self) -> bool:
        """Whether the directory has every file."""
        names = [file.name for file in self._plan.files]
        return all(map(self._out.has, (*names, *self._plan.copied, *self._plan.small_files)))

    def write(self, threads: int) -> None:
        """Writes every missing file."""
        missing = [file for file in self._plan.files if not self._out.has(file.name)]
        self._add(self._total - sum(sum(file.regions) for file in missing))
        self._out.require_free(sum(sum(file.regions) for file in missing))
        if missing:
            _require_whole(self._store, self._manifest, DENSE_NAME)
        work = (each for file in missing for unit in file.units for each in unit.work)
        with (
            one_core_each(threads) as pool,
            closing(in_order(pool, ((each.nbytes, each.run) for each in work), _MEMORY)) as made,
        ):
            for file in missing:
                self._out.write(file.name, file.regions, partial(self._fill, file, made))
        for name in self._plan.copied:
            self._out.write_bytes(name, read_whole(self._store / name))
        for name, content in self._plan.small_files.items():
            self._out.write_bytes(name, content)

    def _fill(self, file: PlannedFile, results: Iterator[Made], sink: Sink) -> dict[str, float]:
        """Writes a file's regions from the next results. Returns the fields of its errors."""
        errors = Errors()
        sink.write(0, memoryview(file.header))
        self._add(len(file.header))
        first = 1
        for unit in file.units:
            for made in islice(results, len(unit.work)):
                errors.add(made.errors)
                for region, data in made.parts:
                    sink.write(first + region, data)
                    self._add(data.nbytes)
            first += len(unit.regions)
        return asdict(errors)

    def _add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)
