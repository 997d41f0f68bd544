"""Export of a store to a directory: on every core, few experts in memory at a time, resumable per file.

The files' bytes do not depend on the number of threads, nor on interruptions. Peak memory: 100 MB, or more where the
largest dense tensor with its exported form or one expert takes more; and an expert per thread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from edgemoe.errors import UserError
from edgemoe.storage.convert.config import WRAPPED_IN, Config, bounded_config
from edgemoe.storage.convert.system_errors import destination_errors
from edgemoe.storage.export.directory import ExportDirectory
from edgemoe.storage.export.levels import Levels
from edgemoe.storage.export.matrices import StoreExperts
from edgemoe.storage.export.names import ExportNames
from edgemoe.storage.export.plan import Errors, Plan
from edgemoe.storage.export.plans import FORMATS
from edgemoe.storage.export.writing import Export, require_whole
from edgemoe.storage.files.untrusted import read_json
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.threads import reading_threads


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

    All checks that need no weights come before the first write.

    Args:
        store: directory of the store.
        destination: directory to write, created if necessary.
        family: the names of the store's config.
        format: a key of plans.FORMATS.
        levels: the level of every expert.
        progress: called with bytes of weights written and in all, from the calling thread.
        threads: threads that read and encode experts; by default two per core: one computes while another reads.

    Returns:
        The errors of the exported weights, over the first and the middle expert of every layer.

    Raises:
        UserError: the format cannot hold these levels or this model, or the destination holds other files.
        StoreBusy, DoesNotFit: another process writes the store or uses the destination; the disk is too small.
        DamagedData: the store's bytes differ from its checksums.
    """
    if destination.resolve() == store.resolve():
        raise UserError("a directory for the export", f"the store {store}", "choose another directory")
    manifest = _gated(Manifest.load(store))
    with StoreExperts(store, manifest) as experts:
        for name in manifest.files.keys() - {manifest.dense_name}:
            require_whole(store, manifest, name)
        plan = FORMATS[format](experts, family, _config_of(store), levels)
        content = {"store": manifest.fingerprint, "format": format, "levels": _digest(levels)}
        return _write(store, manifest, plan, destination, content, progress, threads or reading_threads())


def _gated(manifest: Manifest) -> Manifest:
    """Returns a manifest; raises UserError where experts have no gate, as the formats of exports have one."""
    if not manifest.geometry.gated:
        wanted = "a model whose experts have a gate, for an export"
        raise UserError(wanted, "experts without one", "keep the checkpoint")
    return manifest


def _write(
    store: Path,
    manifest: Manifest,
    plan: Plan,
    destination: Path,
    content: dict[str, Any],
    progress: Callable[[int, int], None],
    threads: int,
) -> Errors:
    """Writes what a directory lacks of a plan's files; `content` says which export they belong to."""
    with (
        destination_errors(destination, "an export"),
        ExportDirectory(destination, content, _layout_of(plan)) as out,
    ):
        job = Export(store, manifest, plan, out, progress)
        if out.finished and not job.is_whole():
            out.reopen()
        if not out.finished:
            job.write(threads)
            out.finish()
        return job.errors()


def _config_of(store: Path) -> Config:
    """The config of a store; raises UserError for a multimodal model's."""
    config = bounded_config(read_json(store, "config.json"))
    if WRAPPED_IN in config:
        raise UserError(
            f"a model of text alone in {store}",
            f"the language model of a {config[WRAPPED_IN]}, whose other parts a store does not have",
            "export from the checkpoint with another tool",
        )
    return config


def _layout_of(plan: Plan) -> str:
    """A digest of all names, headers, regions and small files: files of another layout do not belong together."""
    digest = xxhash.xxh3_128()
    for file in plan.files:
        digest.update(repr((file.name, file.header, file.regions)).encode())
    digest.update(repr((sorted(plan.small_files.items()), sorted(plan.copied))).encode())
    return digest.hexdigest()


def _digest(levels: Levels) -> Any:
    """The one level of all experts, or a digest of a map."""
    found = {level for layer in levels.values() for level in layer}
    return (
        found.pop() if len(found) == 1 else xxhash.xxh3_128_hexdigest(repr(sorted(levels.items())).encode())
    )
