"""The head for further tokens of a checkpoint (multi-token prediction): one layer with experts of its own.

A store keeps its experts as records of one more layer, and its other weights at 8 bits at most in a file of their own:
what it guesses never changes an answer.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertNames, ExpertWeights
from edgemoe.storage.convert.records import ExpertRecords
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.store.dense import DenseWeights
from edgemoe.storage.store.dense_file import write_dense_file
from edgemoe.storage.store.layer_file import head_shard_name, write_records_of
from edgemoe.storage.store.manifest import HEAD_NAME
from edgemoe.storage.store.manifest_entries import FileEntry
from edgemoe.storage.store.stored_head import StoredHead
from edgemoe.storage.threads import in_order, one_core_each

MOST_BITS = 8
"""Most bits of the head's dense weights."""


class HeadWeights:
    """The weights of a checkpoint's head.

    Args:
        checkpoint: the checkpoint.
        names: sizes and names of the head: one layer with experts, and nothing else of the model.
        dense_bits: bits of the store's dense weights.

    Attributes:
        layer: number of its layer, which follows the model's layers.
        experts, dense: its experts, and its other weights.

    Raises:
        MissingTensor, ModelRefused: as ExpertWeights and DenseWeights.
    """

    def __init__(self, checkpoint: Checkpoint, names: ExpertNames, dense_bits: int) -> None:
        self.experts = ExpertWeights(checkpoint, names)
        (self.layer,) = self.experts.layers
        self.dense = DenseWeights(checkpoint, self.experts.names, names, min(dense_bits, MOST_BITS))

    @property
    def names(self) -> set[str]:
        """Names of all its tensors."""
        return self.experts.names | set(self.dense.names)

    def bytes_with(self, geometry: RecordGeometry) -> int:
        """Bytes of its weights in a store with this geometry."""
        return self.experts.count * geometry.of_layer(self.layer).record_bytes + self.dense.nbytes

    def write(
        self, directory: Path, geometry: RecordGeometry, layout: Layout, max_level: int | None, threads: int
    ) -> tuple[StoredHead, FileEntry]:
        """Writes the files of the head into the directory of a store.

        Args:
            directory: the directory.
            geometry, layout: sizes of the store's records, and the order of codes in them.
            max_level: the conversion's highest level; None: what the source justifies.
            threads: threads that read and encode experts.

        Raises:
            DamagedData, DoesNotFit, WriteFailed: as storage.convert.run.convert.
        """
        records = ExpertRecords(self.experts, geometry, layout, max_level)
        memory = self.experts.layer_bytes(self.layer) // self.experts.count + 2 * geometry.weights
        path, error = directory / head_shard_name(self.layer), SourceError()
        tasks = ((memory, partial(records.make, self.layer, each)) for each in range(self.experts.count))
        with one_core_each(threads) as pool, closing(in_order(pool, tasks, 2 * threads * memory)) as made:
            rows = (record for record, _ in made)
            stored = write_records_of(path, self.layer, geometry, self.experts.count, rows, error)
        dense = write_dense_file(directory / HEAD_NAME, self.dense.specs(), self.dense.tensors())
        return StoredHead(self.layer, stored), dense
