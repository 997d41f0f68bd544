"""Conversion of a checkpoint to a store: on every core, few experts in memory at a time, resumable per layer.

A finished store is not changed, unless it lacks vision modules that are to be stored. Checks that need no weights come
before the first write. The store's bytes do not depend on the number of threads. Peak memory: the largest dense tensor
with its stored form, or two experts per thread, up to 1.5 GB or one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertNames, ExpertWeights
from edgemoe.storage.convert.head_weights import HeadWeights
from edgemoe.storage.convert.records import ExpertRecords
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.convert.source_table import SourceRow
from edgemoe.storage.convert.system_errors import destination_errors, require_unchanged, source_errors
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.dense import VISION_NAME, DenseWeights, VisionTensors
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest
from edgemoe.storage.store.writer import StoreWriter
from edgemoe.storage.threads import in_order, one_core_each, reading_threads

if TYPE_CHECKING:
    import torch

_MEMORY = 1_500_000_000
"""Bytes: limit of all experts that are read, encoded or wait for their write; one is always allowed."""


class Arrivals(Protocol):
    """Source weights that arrive during the conversion: each layer's weights are fetched before it is converted."""

    @property
    def peak_bytes(self) -> int:
        """Bytes of disk that arriving weights need at most at a time, besides the weights that are present."""

    @property
    def contents(self) -> Mapping[str, str]:
        """SHA-256 of the content of arriving files, by name, or what else tells two contents apart."""

    def require(self, layer: int | None) -> None:
        """Makes every weight of a layer readable; None: every weight that was not released.

        Raises:
            EdgemoeError: a weight cannot be fetched.
        """

    def release(self, layer: int | None, keep: Collection[str]) -> None:
        """Marks a layer's experts, or with None all weights, as stored; tensors that `keep` names are read again."""


def convert(
    source: Path,
    destination: Path,
    family: ExpertNames,
    *,
    head: ExpertNames | None = None,
    max_level: int | None,
    layout: Layout,
    dense_bits: int,
    head_bits: int = 8,
    progress: Callable[[int, int], None],
    threads: int | None = None,
    arrivals: Arrivals | None = None,
    vision: Collection[str] = (),
    tell: Callable[[Sequence[SourceRow]], None] = lambda rows: None,
) -> Manifest:
    """Converts a checkpoint, or resumes an interrupted conversion.

    Args:
        source, destination: directories of the checkpoint, and of the store, which is created if necessary.
        family, head: names of the source's model, and of its head for further tokens; None: it has none.
        max_level: 8 or 4, the highest level to store; None: as many bits as each of the source's matrices can fill.
        layout: the order of codes in the records.
        dense_bits, head_bits: bits per weight of other matrices (manifest.DENSE_BITS), and of embedding and head.
        progress: called with bytes of source weights done and in all, from the calling thread.
        threads: threads that read and encode experts; by default two per core, so that one of them computes.
        arrivals: fetches weights before they are needed; by default all weights are present.
        vision: names of a multimodal model's modules outside of its language model that are stored too.
        tell: called after a conversion with what was done with each type of quantized weights.

    Raises:
        ModelRefused, MissingTensor, BadHeader, TruncatedFile: the source cannot be converted.
        DamagedData: a weight is not finite, or the source changed during the conversion.
        UserError, StoreBusy: the destination holds other files, is not this user's, or another process uses it.
        DoesNotFit, ReadFailed, WriteFailed: the disk is too small, or a call was refused, retries included.
    """
    with source_errors(source):
        how = family, max_level, layout, (dense_bits, head_bits), progress, arrivals
        job = _Conversion(Checkpoint.open(source), *how, vision, head)
    return job.into(destination, threads or reading_threads(), tell)


def store_bytes(
    source: Checkpoint,
    family: ExpertNames,
    *,
    max_level: int | None,
    dense_bits: int,
    head_bits: int = 8,
    head: ExpertNames | None = None,
) -> int:
    """Computes the bytes of weights in the store that `convert` would write, without reading weights.

    Raises:
        ModelRefused, MissingTensor: the source cannot be converted.
    """
    experts = ExpertWeights(source, family)
    dense = DenseWeights(source, experts.names, family, dense_bits, head_bits)
    geometry = experts.geometry(max_level)
    records = sum(geometry.of_layer(each).record_bytes for each in experts.layers)
    of_head = HeadWeights(source, head, dense_bits).bytes_with(geometry) if head else 0
    return experts.count * records + dense.nbytes + of_head


class _Conversion:
    """The conversion of one checkpoint to one store, with its progress."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: ExpertNames,
        max_level: int | None,
        layout: Layout,
        bits: tuple[int, int],
        progress: Callable[[int, int], None],
        arrivals: Arrivals | None,
        vision: Collection[str],
        head: ExpertNames | None,
    ) -> None:
        self._checkpoint, self._layout, self._bits = checkpoint, layout, bits
        self._experts = ExpertWeights(checkpoint, family)
        self._dense = DenseWeights(checkpoint, self._experts.names, family, *bits)
        self._vision = VisionTensors(checkpoint.others, vision)
        self._geometry = self._experts.geometry(max_level)
        self._head = HeadWeights(checkpoint, head, bits[0]) if head else None
        self._max_level = max_level
        self._arrivals, self._known = arrivals, arrivals.contents if arrivals else {}
        self._fingerprint = checkpoint.fingerprint(self._known)
        self._total = checkpoint.nbytes
        self._done, self._progress = 0, progress
        self._records = ExpertRecords(self._experts, self._geometry, layout, max_level)

    def into(self, destination: Path, threads: int, tell: Callable[[Sequence[SourceRow]], None]) -> Manifest:
        """Writes the store, unless it is there; another process may finish it meanwhile."""
        finished = destination / MANIFEST_NAME
        if finished.exists() and self._made(there := Manifest.load(destination)):
            return there
        writer = StoreWriter(
            destination,
            geometry=self._geometry,
            layout=self._layout,
            source=self._fingerprint,
            dense_bits=self._bits[0],
            head_bits=self._bits[1],
        )
        with destination_errors(destination), writer:
            if finished.exists():
                there = self._with_vision(writer, Manifest.load(destination))
                return self._with_head(writer, there, threads)
            self._write(writer, threads)
            if self._head:
                how = self._geometry, self._layout, self._max_level, threads
                writer.write_head(*self._head.write(destination, *how))
                self._add(sum(self._checkpoint[name].nbytes for name in self._head.names))
            require_unchanged(self._checkpoint.directory, self._fingerprint, self._known)
            tell(self._records.table.rows())
            return writer.finish(self._checkpoint.format)

    def _with_head(self, writer: StoreWriter, there: Manifest, threads: int) -> Manifest:
        """Adds the head to a finished store that lacks it; nothing else in it changes."""
        if self._head is None or there.head:
            return there
        self._fetch(writer, self._checkpoint.stored(self._head.names), self._head.bytes_with(self._geometry))
        made = self._head.write(writer.directory, self._geometry, self._layout, self._max_level, threads)
        require_unchanged(self._checkpoint.directory, self._fingerprint, self._known)
        return writer.add_head(*made)

    def _made(self, store: Manifest) -> bool:
        """Whether a finished store is the result of this conversion."""
        found = store.source, store.geometry, store.layout, (store.dense_bits, store.head_bits)
        headed = self._head is None or store.head is not None
        same = headed and found == (self._fingerprint, self._geometry, self._layout.name, self._bits)
        return same and (VISION_NAME in store.files or not self._vision.nbytes)

    def _fetch(self, writer: StoreWriter, stored: Collection[str], nbytes: int) -> None:
        """Makes some tensors readable, and no others, after a check that the disk has room for them."""
        if self._arrivals:
            self._arrivals.release(None, stored)
        writer.require_free(nbytes + (self._arrivals.peak_bytes if self._arrivals else 0))
        if self._arrivals:
            self._arrivals.require(None)

    def _with_vision(self, writer: StoreWriter, store: Manifest) -> Manifest:
        """Adds the vision modules to a finished store that lacks them; nothing else in it changes."""
        if VISION_NAME in store.files or not self._vision.nbytes:
            return store
        self._fetch(writer, self._vision.stored, self._vision.nbytes)
        writer.write_file(VISION_NAME, self._vision.specs(), self._vision.tensors())
        for path in self._checkpoint.processor_files():
            writer.copy(path)
        return writer.add_files()

    def _write(self, writer: StoreWriter, threads: int) -> None:
        """Writes every file except the manifest."""
        self._write_experts(writer, threads)
        if self._arrivals:
            self._arrivals.require(None)
        writer.write_dense(self._dense.specs(), self._tensors())
        companions = self._checkpoint.companions()
        if self._vision.nbytes:
            writer.write_file(VISION_NAME, self._vision.specs(), self._vision.tensors())
            companions += self._checkpoint.processor_files()
        for path in companions:
            writer.copy(path)

    def _write_experts(self, writer: StoreWriter, threads: int) -> None:
        """Writes every unfinished layer, after a check that the rest of the store fits on the disk."""
        arrivals = self._arrivals
        experts, finished = self._experts, writer.finished_layers()
        missing = [layer for layer in experts.layers if layer not in finished]
        for layer in finished:
            self._add(experts.layer_bytes(layer))
            self._release(layer)
        sizes = [self._geometry.of_layer(layer).record_bytes for layer in missing]
        to_come = experts.count * sum(sizes) + self._dense.nbytes + self._vision.nbytes
        if self._head:
            to_come += self._head.bytes_with(self._geometry)
        writer.require_free(to_come + (arrivals.peak_bytes if arrivals else 0))
        # What an expert takes between checkpoint and store: weights, codes and a record.
        memory = experts.layer_bytes(experts.layers[0]) // experts.count + 2 * self._geometry.weights
        limit = min(2 * threads * memory, _MEMORY)
        with one_core_each(threads) as pool:
            # Arriving layers are on disk one at a time; otherwise the next layer is encoded while one is written.
            for layers in [[layer] for layer in missing] if arrivals else [missing]:
                if arrivals:
                    arrivals.require(layers[0])
                places = product(layers, range(experts.count))
                tasks = ((memory, partial(self._records.make, *place)) for place in places)
                with closing(in_order(pool, tasks, limit)) as records:
                    for layer in layers:
                        error = SourceError()
                        writer.write_layer(layer, experts.count, self._counted(layer, records, error), error)
                        self._release(layer)

    def _release(self, layer: int) -> None:
        if self._arrivals:
            kept = self._checkpoint.stored(self._dense.names) | self._vision.stored
            if self._head:
                kept |= self._checkpoint.stored(self._head.names)
            self._arrivals.release(layer, kept)

    def _counted(
        self, layer: int, records: Iterator[tuple[Bytes, SourceError]], error: SourceError
    ) -> Iterator[Bytes]:
        """Yields the records of one layer; adds to `error`, and to the progress after a record is taken."""
        count = self._experts.count
        expert_bytes = self._experts.layer_bytes(layer) // count
        for record, of_record in islice(records, count):
            error.add(of_record)
            yield record
            self._add(expert_bytes)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        sources = self._checkpoint.names()
        for name, tensor in self._dense.tensors():
            yield name, tensor
            if name in sources:
                self._add(self._checkpoint[name].nbytes)

    def _add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)
