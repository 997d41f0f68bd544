"""From a checkpoint to a store: one expert in memory at a time, resumable layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from storage.checkpoint import Checkpoint
from storage.dense import DenseWeights
from storage.encode import encode
from storage.errors import DamagedData
from storage.expert_weights import ExpertNames, ExpertWeights
from storage.header import tensor_bytes
from storage.layout import Layout
from storage.manifest import MANIFEST_NAME, Manifest
from storage.planes import Bytes
from storage.writer import StoreWriter


def convert(
    source: Path,
    destination: Path,
    family: ExpertNames,
    *,
    max_level: int,
    layout: Layout,
    dense_bits: int,
    progress: Callable[[int, int], None],
) -> Manifest:
    """Converts a checkpoint, or what an earlier, interrupted call has left of it.

    A finished store of the same source and options is left as it is. Peak memory: the largest tensor, what
    it becomes, and a few experts. Whatever can be checked without reading weights is, before anything is
    written.

    Args:
        source: the checkpoint's directory.
        destination: the store's; made if need be.
        family: of the source's config.
        max_level: 8 or 4, the highest level stored.
        layout: of the records.
        dense_bits: 16 or 8, of the matrices that are no expert's.
        progress: called with bytes of source weights done and in all, from this thread.

    Raises:
        ModelRefused, MissingTensor, BadHeader, TruncatedFile: the source; see Checkpoint.open, ExpertWeights.
        DamagedData: a weight is not finite, or the source has changed meanwhile.
        UserError: the destination holds something else.
        StoreBusy: another process is using the destination.
        DoesNotFit: the disk is too small.
    """
    checkpoint = Checkpoint.open(source)
    job = _Conversion(checkpoint, family, max_level, layout, dense_bits, progress)
    if (destination / MANIFEST_NAME).exists() and job.made(there := Manifest.load(destination)):
        return there
    with StoreWriter(
        destination,
        geometry=job.geometry,
        layout=layout,
        source=job.fingerprint,
        dense_bits=dense_bits,
    ) as writer:
        job.write_experts(writer)
        job.write_dense(writer)
        for path in checkpoint.companions():
            writer.copy(path)
        if Checkpoint.open(source).fingerprint() != job.fingerprint:
            raise DamagedData(
                f"{source} was wanted as it was when its conversion began",
                "its files have changed since",
                "Remove the destination, and convert again while nothing writes to the checkpoint",
            )
        return writer.finish()


class _Conversion:
    """One checkpoint on its way to one store, and how far it is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: ExpertNames,
        max_level: int,
        layout: Layout,
        dense_bits: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._checkpoint, self._layout, self._dense_bits = checkpoint, layout, dense_bits
        self._experts = ExpertWeights(checkpoint, family)
        self._dense = DenseWeights(checkpoint, self._experts.names, family, dense_bits)
        self.geometry = self._experts.geometry(max_level)
        self.fingerprint = checkpoint.fingerprint()
        self._total = sum(checkpoint.nbytes(name) for name in checkpoint.names())
        self._done, self._progress = 0, progress

    def made(self, store: Manifest) -> bool:
        """Whether a finished store is what this would make."""
        found = (store.source, store.geometry, store.layout, store.dense_bits)
        return found == (self.fingerprint, self.geometry, self._layout.name, self._dense_bits)

    def write_experts(self, writer: StoreWriter) -> None:
        """Writes every layer that is not finished yet, if the disk has room for all that is to come."""
        experts, finished = self._experts, writer.finished_layers()
        missing = [layer for layer in experts.layers if layer not in finished]
        dense_bytes = sum(tensor_bytes(*spec) for spec in self._dense.specs().values())
        writer.require_free(len(missing) * experts.count * self.geometry.record_bytes + dense_bytes)
        for layer in finished:
            self._add(experts.layer_bytes(layer))
        for layer in missing:
            writer.write_layer(layer, experts.count, self._records(layer))

    def write_dense(self, writer: StoreWriter) -> None:
        """Writes everything that is no expert's."""
        writer.write_dense(self._dense.specs(), self._tensors())

    def _records(self, layer: int) -> Iterator[Bytes]:
        share = self._experts.layer_bytes(layer) // self._experts.count
        for expert in range(self._experts.count):
            yield encode(self.geometry, self._layout, self._experts.read(layer, expert))
            self._add(share)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        sources = self._checkpoint.names()
        for name, tensor in self._dense.tensors():
            yield name, tensor
            if name in sources:
                self._add(self._checkpoint.nbytes(name))

    def _add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)
