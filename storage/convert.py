"""From a checkpoint to a store: a few experts in memory at a time, on every core, resumable layer by layer."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice, product
from pathlib import Path
from typing import Protocol

import torch

from storage.checkpoint import Checkpoint
from storage.dense import DenseWeights
from storage.encode import assemble, quantize_matrix, squared_error
from storage.errors import DamagedData, ReadFailed, UserError, WriteFailed
from storage.expert_weights import ExpertNames, ExpertWeights
from storage.layout import Layout
from storage.manifest import MANIFEST_NAME, Manifest
from storage.planes import Bytes
from storage.source_error import SourceError
from storage.writer import StoreWriter

_MEMORY = 1_500_000_000
"""Bytes that all experts being read, encoded or waiting to be written may take; one is always begun."""

_REQUEST = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
"""Refusals that are the user's to mend, not the disk's."""


class Arrivals(Protocol):
    """Weights that are not all there at once: each layer's are fetched before it is converted."""

    @property
    def room(self) -> int:
        """Bytes of disk that they take at most at a time, besides what is there."""

    def require(self, layer: int | None) -> None:
        """Makes every weight of a layer readable; None: every weight that was not released.

        Raises:
            EdgemoeError: they cannot be had.
        """

    def release(self, layer: int, keep: Collection[str]) -> None:
        """The layer's experts are in the store. Of its tensors only those named in `keep` will be read again."""


def convert(
    source: Path,
    destination: Path,
    family: ExpertNames,
    *,
    max_level: int | None,
    layout: Layout,
    dense_bits: int,
    progress: Callable[[int, int], None],
    threads: int | None = None,
    arrivals: Arrivals | None = None,
) -> Manifest:
    """Converts a checkpoint, or what an earlier, interrupted call has left of it.

    A finished store of the same source and options is left as it is. The store's bytes do not depend on the
    number of threads. Peak memory: the largest dense tensor and what it becomes, or two experts a thread, which
    take no more than 1.5 GB or one expert. Whatever can be checked without reading weights is, before anything
    is written.

    Args:
        source: the checkpoint's directory.
        destination: the store's; made if need be.
        family: of the source's config.
        max_level: 8 or 4, the highest level stored; None: 4 if every expert has 4-bit codes, otherwise 8.
        layout: of the records.
        dense_bits: 16 or 8, of the matrices that are no expert's.
        progress: called with bytes of source weights done and in all, from this thread.
        threads: that read and encode experts; by default two for each core this process may use, so that one
            computes while the other waits for the disk.
        arrivals: told which weights are needed, and which no more; by default all are there.

    Raises:
        ModelRefused, MissingTensor, BadHeader, TruncatedFile: the source; see Checkpoint.open, ExpertWeights.
        DamagedData: a weight is not finite, or the source has changed meanwhile.
        UserError: the destination holds something else, or may not be written.
        StoreBusy: another process is using the destination.
        DoesNotFit: the disk is too small.
        ReadFailed, WriteFailed: the operating system kept refusing.
    """
    with _source_errors(source):
        job = _Conversion(Checkpoint.open(source), family, max_level, layout, dense_bits, progress)
    if (destination / MANIFEST_NAME).exists() and job.made(there := Manifest.load(destination)):
        return there
    with (
        _destination_errors(destination),
        StoreWriter(
            destination, geometry=job.geometry, layout=layout, source=job.fingerprint, dense_bits=dense_bits
        ) as writer,
    ):
        job.write(writer, threads or 2 * cores(), arrivals)
        _require_unchanged(source, job.fingerprint)
        return writer.finish(job.format)


def _require_unchanged(source: Path, fingerprint: str) -> None:
    """Raises DamagedData if a checkpoint is not what it was: parts of two would be in the store."""
    with _source_errors(source):
        now = Checkpoint.open(source).fingerprint()
    if now != fingerprint:
        raise DamagedData(
            f"{source} unchanged during its conversion",
            "changed files",
            "remove the destination, and convert again while no process writes to the checkpoint",
        )


def store_bytes(source: Checkpoint, family: ExpertNames, *, max_level: int | None, dense_bits: int) -> int:
    """Bytes of weights in the store that `convert` would make of a checkpoint. Reads none.

    Raises:
        ModelRefused, MissingTensor: as convert.
    """
    experts = ExpertWeights(source, family)
    dense = DenseWeights(source, experts.names, family, dense_bits)
    return len(experts.layers) * experts.count * experts.geometry(max_level).record_bytes + dense.nbytes


@contextmanager
def _source_errors(source: Path) -> Iterator[None]:
    """Gives an error of the operating system while a checkpoint's small files are read its place in the tree."""
    try:
        yield
    except OSError as error:
        raise ReadFailed(f"the checkpoint {source}", str(error), "check the disk, then try again") from error


@contextmanager
def _destination_errors(destination: Path) -> Iterator[None]:
    """The same for what StoreWriter asks of the operating system outside of its files."""
    try:
        yield
    except OSError as error:
        wanted, found = f"a store in {destination}", str(error)
        if error.errno in _REQUEST:
            raise UserError(wanted, found, "choose a directory that you may write to") from error
        raise WriteFailed(wanted, found, "check the disk, then convert again to resume") from error


class _Conversion:
    """One checkpoint on its way to one store, and how far it is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: ExpertNames,
        max_level: int | None,
        layout: Layout,
        dense_bits: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._checkpoint, self._layout, self._dense_bits = checkpoint, layout, dense_bits
        self._experts = ExpertWeights(checkpoint, family)
        self._dense = DenseWeights(checkpoint, self._experts.names, family, dense_bits)
        self.geometry = self._experts.geometry(max_level)
        self.fingerprint, self.format = checkpoint.fingerprint(), checkpoint.format
        self._total = sum(checkpoint.nbytes(name) for name in checkpoint.names())
        self._done, self._progress = 0, progress

    def made(self, store: Manifest) -> bool:
        """Whether a finished store is what this would make."""
        found = (store.source, store.geometry, store.layout, store.dense_bits)
        return found == (self.fingerprint, self.geometry, self._layout.name, self._dense_bits)

    def write(self, writer: StoreWriter, threads: int, arrivals: Arrivals | None) -> None:
        """Writes everything but the manifest."""
        self._write_experts(writer, threads, arrivals)
        if arrivals:
            arrivals.require(None)
        writer.write_dense(self._dense.specs(), self._tensors())
        for path in self._checkpoint.companions():
            writer.copy(path)

    def _write_experts(self, writer: StoreWriter, threads: int, arrivals: Arrivals | None) -> None:
        """Writes every layer that is not finished yet, if the disk has room for all that is to come."""
        experts, finished = self._experts, writer.finished_layers()
        missing = [layer for layer in experts.layers if layer not in finished]
        for layer in finished:
            self._add(experts.layer_bytes(layer))
            self._release(layer, arrivals)
        to_come = len(missing) * experts.count * self.geometry.record_bytes + self._dense.nbytes
        writer.require_free(to_come + (arrivals.room if arrivals else 0))
        limit = min(2 * threads, max(_MEMORY // self._expert_memory(), 1))
        with _one_core_each(threads) as pool:
            # What arrives layer by layer has one layer on disk at a time; else the next begins before one is written.
            for layers in [[layer] for layer in missing] if arrivals else [missing]:
                if arrivals:
                    arrivals.require(layers[0])
                with closing(self._records(layers, pool, limit)) as records:
                    for layer in layers:
                        error = SourceError()
                        writer.write_layer(layer, experts.count, self._counted(layer, records, error), error)
                        self._release(layer, arrivals)

    def _expert_memory(self) -> int:
        """Bytes that an expert takes at most between its checkpoint and its store: weights, codes and a record."""
        experts = self._experts
        return experts.layer_bytes(experts.layers[0]) // experts.count + 2 * self.geometry.weights

    def _release(self, layer: int, arrivals: Arrivals | None) -> None:
        if arrivals:
            arrivals.release(layer, self._checkpoint.stored(self._dense.names))

    def _records(
        self, layers: Sequence[int], pool: ThreadPoolExecutor, limit: int
    ) -> Generator[tuple[Bytes, SourceError]]:
        """All records of these layers in order, of which threads of the pool have begun `limit`."""
        begun: deque[Future[tuple[Bytes, SourceError]]] = deque()
        try:
            for layer, expert in product(layers, range(self._experts.count)):
                begun.append(pool.submit(self._record, layer, expert))
                if len(begun) == limit:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()

    def _counted(
        self, layer: int, records: Iterator[tuple[Bytes, SourceError]], error: SourceError
    ) -> Iterator[Bytes]:
        """The next layer's worth of records. Adds to `error`, and to what is done once a record was taken."""
        count = self._experts.count
        share = self._experts.layer_bytes(layer) // count
        for record, of_record in islice(records, count):
            error.add(of_record)
            yield record
            self._add(share)

    def _record(self, layer: int, expert: int) -> tuple[Bytes, SourceError]:
        weights, quantized = deque(self._experts.read(layer, expert)), []
        error = SourceError()
        for spec in self.geometry.matrices:
            weight = weights.popleft()  # given up before the next is quantized: some experts have gigabytes
            made = quantize_matrix(weight, spec)
            if expert in (0, self._experts.count // 2):
                error.add(SourceError(*squared_error(weight, made, spec, self.geometry.max_level)))
            quantized.append(made)
        del weight
        return assemble(self.geometry, self._layout, quantized), error

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        sources = self._checkpoint.names()
        for name, tensor in self._dense.tensors():
            yield name, tensor
            if name in sources:
                self._add(self._checkpoint.nbytes(name))

    def _add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _one_core_each(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool whose threads compute on one core each; torch would give each of them all cores."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "encode", initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)
