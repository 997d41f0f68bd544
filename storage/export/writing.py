"""Writes the files of an export: experts are read and encoded on every core, and written in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path

from edgemoe.storage.export.directory import ExportDirectory
from edgemoe.storage.export.plan import Errors, Made, Plan, PlannedFile
from edgemoe.storage.export.sink import Sink
from edgemoe.storage.files.source_file import read_whole
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.verify import check_file
from edgemoe.storage.threads import in_order, one_core_each

_MEMORY = 100_000_000
"""Bytes: limit of all experts and tensors that are read, encoded or wait for their write; one is always allowed."""


def require_whole(store: Path, manifest: Manifest, name: str) -> None:
    """Compares a file of the store with its checksum."""
    _, damage = check_file(store / name, manifest.files[name])
    if damage:
        raise damage[0]


class Export:
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
            require_whole(self._store, self._manifest, self._manifest.dense_name)
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
