"""The head for further tokens of a store: its sizes, and what a run that uses it takes of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgemoe.errors import BadManifest
from edgemoe.families.base import Family
from edgemoe.families.head import HeadFamily, head_family, head_of
from edgemoe.kv.shape import KVShape
from edgemoe.memory.limits import decode_rows
from edgemoe.memory.model_shape import ModelShape
from edgemoe.policy.settings import MOST_HEAD_DRAFTS
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import Config
from edgemoe.storage.convert.head_weights import HeadWeights
from edgemoe.storage.files.header import Spec, read_header, tensor_bytes
from edgemoe.storage.store.manifest import HEAD_NAME, MANIFEST_NAME, Manifest

HEAD_TOKENS = 1024
"""Latest tokens of each sequence that the head's keys and values have room for."""

HEAD_STATES = 64
"""Latest states of each sequence that are kept for the head."""

_ACTION = "convert the model again"


@dataclass(frozen=True)
class StoreHead:
    """The head of a store.

    Args:
        family: its names and sizes.
        dense: dtype and shape of each of its dense tensors.
    """

    family: HeadFamily
    dense: tuple[Spec, ...]

    @classmethod
    def read(cls, directory: Path, manifest: Manifest, family: Family, config: Config) -> StoreHead | None:
        """Reads the header of the head's dense weights, and compares its experts with the config.

        Raises:
            BadManifest: with the first field that differs.
            BadHeader, TruncatedFile, MissingTensor: the file of the dense weights is damaged.
        """
        stored = manifest.head
        if stored is None:
            return None
        own, name = head_family(family, config), directory / MANIFEST_NAME
        if own is None:
            found = f"a head, which edgemoe does not run for model_type {config['model_type']}"
            raise BadManifest(f"no head in {name}", found, _ACTION)
        wanted = own.layer, family.experts, True
        values = stored.layer, len(stored.experts.records), HEAD_NAME in manifest.files
        if values != wanted:
            expected = (
                f"a head as layer {wanted[0]}, with {wanted[1]} experts and a file {HEAD_NAME}, in {name}"
            )
            raise BadManifest(expected, f"{values}", _ACTION)
        tensors: Sequence[Spec] = [each.spec for each in read_header(directory / HEAD_NAME).tensors.values()]
        return cls(own, tuple(tensors))

    @classmethod
    def planned(
        cls, checkpoint: Checkpoint, family: Family, config: Config, dense_bits: int
    ) -> StoreHead | None:
        """The head of the store that a checkpoint would become; None: the checkpoint has none that edgemoe runs."""
        own = head_of(family, config, checkpoint.names())
        if own is None:
            return None
        return cls(own, tuple(HeadWeights(checkpoint, own, dense_bits).dense.specs().values()))

    @property
    def dense_bytes(self) -> int:
        """Bytes of its dense weights."""
        return sum(tensor_bytes(*spec) for spec in self.dense)

    def kv(self, of_model: KVShape) -> KVShape:
        """The shape of its keys and values, in the format of the model's."""
        return self.family.kv.stored_as(of_model.format)

    def _row_bytes(self, shape: ModelShape) -> int:
        """Bytes that the compiled kernel keeps for each row of a step of the head (kernels.native.decode_layers)."""
        # Each buffer of its list is what one of its weights, or its experts, writes.
        buffers = 2 * shape.hidden + shape.widest * len(self.dense)
        experts = 4 * shape.experts_per_layer + shape.top_k * (2 * 2 * shape.hidden + 1024)
        return 2 * (shape.vocab + buffers) + experts

    def added(self, shape: ModelShape, parallel: int) -> ModelShape:
        """Returns the sizes of a model together with its head.

        Args:
            shape: the sizes of the model without it.
            parallel: sequences that run at once, whose latest states, keys and values are kept.
        """
        states = (parallel + 1) * 2 * HEAD_STATES * shape.hidden * 2
        own = self.dense_bytes + parallel * self.kv(shape.kv).bytes_for(HEAD_TOKENS) + states
        own += decode_rows(parallel, MOST_HEAD_DRAFTS) * self._row_bytes(shape)
        return replace(
            shape, experts=shape.experts + self.family.experts, dense_bytes=shape.dense_bytes + own
        )
