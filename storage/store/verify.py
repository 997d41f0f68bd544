"""Verification of a store against its checksums."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from edgemoe.errors import BadHeader, ChecksumMismatch, DamagedData, TruncatedFile
from edgemoe.storage.base import ByteRange, ExpertKey, Plane
from edgemoe.storage.compensators.index import FOLDER, CompensatorIndex, compensator_name
from edgemoe.storage.compensators.reader import RECALCULATE, CompensatorReader
from edgemoe.storage.files.header import read_header
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.files.retry import open_regular, read_errors
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.manifest_entries import FileEntry, tensor_name
from edgemoe.storage.store.reader import RecordReader, with_head

_PIECE = 1 << 20
_ACTION = "convert the model again"


@dataclass(frozen=True)
class VerifyReport:
    """The result of verify.

    Args:
        bytes_read: bytes read from disk.
        damage: one error for each plane or file that differs from its checksum, in the store's order.
    """

    bytes_read: int
    damage: tuple[DamagedData, ...]


def verify(directory: Path, progress: Callable[[int, int], None]) -> VerifyReport:
    """Reads every byte that has a checksum in the manifest, and every header. Continues after damage.

    Args:
        directory: the directory of the store.
        progress: called with (bytes done, bytes in all), ascending until both are equal.

    Raises:
        UserError, BadManifest: from Manifest.load.
        StoreBusy: another process is writing the store.
    """
    manifest = with_head(Manifest.load(directory))
    compensators = manifest.compensators.nbytes if manifest.compensators else 0
    total = manifest.expert_bytes + compensators + sum(entry.size for entry in manifest.files.values())
    damage: list[DamagedData] = []
    done = read = 0
    buffer = memoryview(mmap.mmap(-1, manifest.geometry.record_bytes))
    with StoreLock(directory, exclusive=False):
        for size, bytes_read, found in _checks(directory, manifest, buffer):
            done += size
            read += bytes_read
            damage += found
            progress(done, total)
    return VerifyReport(read, tuple(damage))


_Check = tuple[int, int, list[DamagedData]]
"""(bytes of the store that were checked, bytes read, damage)."""


def _checks(directory: Path, manifest: Manifest, buffer: memoryview) -> Iterator[_Check]:
    for layer in sorted(manifest.layers):
        yield from _check_layer(directory, manifest, layer, buffer)
    for name, entry in sorted(manifest.files.items()):
        yield entry.size, *check_file(directory / name, entry)
    if manifest.compensators:
        for layer in sorted(manifest.compensators.layers):
            yield from _check_compensators(directory, manifest.compensators, layer)


def _check_layer(directory: Path, manifest: Manifest, layer: int, buffer: memoryview) -> Iterator[_Check]:
    records = manifest.layers[layer]
    geometry = manifest.geometry.of_layer(layer)
    expected = {
        tensor_name(layer, expert): ByteRange(record.offset, geometry.record_bytes)
        for expert, record in enumerate(records.records)
    }
    header_damage = _header_damage(directory / records.file, expected, _ACTION)
    if header_damage:
        yield 0, 0, header_damage
    try:
        reader = RecordReader.open(directory, replace(manifest, layers={layer: records}))
    except DamagedData as error:
        # A file that is too short is reported once, although its header check fails as well.
        yield len(records.records) * geometry.record_bytes, 0, [] if header_damage else [error]
        return
    with reader:
        for expert in range(len(records.records)):
            before = reader.bytes_read
            found = _record_damage(reader, ExpertKey(layer, expert), manifest, buffer)
            yield geometry.record_bytes, reader.bytes_read - before, found


def _check_compensators(directory: Path, index: CompensatorIndex, layer: int) -> Iterator[_Check]:
    found = index.layers[layer]
    expected = {
        compensator_name(layer, e): ByteRange(entry.offset, entry.length)
        for e, entry in enumerate(found.entries)
    }
    header_damage = _header_damage(directory / FOLDER / found.file, expected, RECALCULATE)
    if header_damage:
        yield 0, 0, header_damage
    try:
        reader = CompensatorReader(directory, replace(index, layers={layer: found}))
    except DamagedData as error:
        lost = sum(entry.length for entry in found.entries)
        yield lost, 0, [] if header_damage else [error]
        return
    with reader:
        for expert, entry in enumerate(found.entries):
            before, damage = reader.bytes_read, list[DamagedData]()
            try:
                reader.load(ExpertKey(layer, expert))
            except DamagedData as error:
                damage.append(error)
            yield entry.length, reader.bytes_read - before, damage


def _header_damage(path: Path, expected: Mapping[str, ByteRange], action: str) -> list[DamagedData]:
    """Compares a file's tensors with the names and ranges that the manifest has."""
    try:
        tensors = read_header(path).tensors
    except DamagedData as error:
        return [error]
    if {name: entry.range for name, entry in tensors.items()} != expected:
        wanted = f"{len(expected)} records in {path}"
        return [BadHeader(wanted, "a header with other names or places", action)]
    return []


def _record_damage(
    reader: RecordReader, key: ExpertKey, manifest: Manifest, buffer: memoryview
) -> list[DamagedData]:
    """Reads a record with one call, and plane by plane if it is damaged, to report every damaged plane."""
    planes = manifest.geometry.of_layer(key.layer).planes
    try:
        reader.read(key, Plane.BASE, Plane(len(planes) - 1), [buffer[: planes[-1].end]])
    except DamagedData:
        found = []
        for index, plane in enumerate(planes):
            try:
                reader.read(key, Plane(index), Plane(index), [buffer[: plane.length]])
            except DamagedData as error:
                found.append(error)
        return found
    return []


def check_file(path: Path, entry: FileEntry) -> tuple[int, list[DamagedData]]:
    """Compares a whole file with its size and checksum in the manifest. Returns the bytes read, and the damage."""
    wanted = f"{path} of {entry.size} bytes with checksum {entry.checksum:016x}"
    digest, read = xxhash.xxh3_64(), 0
    try:
        with read_errors(wanted, _ACTION), open_regular(path) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                read += len(piece)
    except DamagedData as error:
        return read, [error]
    if read < entry.size:
        return read, [TruncatedFile(wanted, f"{read} bytes", _ACTION)]
    if digest.intdigest() != entry.checksum:
        found = f"{read} bytes with checksum {digest.hexdigest()}"
        return read, [ChecksumMismatch(wanted, found, _ACTION)]
    return read, []
