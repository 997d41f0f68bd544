"""The parts of a store before any weight is loaded: read from its files, or foreseen from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.families.base import Family
from edgemoe.families.table import family_of
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention import kernel_fits
from edgemoe.memory.model_shape import ModelShape
from edgemoe.models.conversion.dense_default import DENSE_BITS
from edgemoe.models.store_check import (
    check_small_files,
    check_store,
    check_vocabulary,
    planned_vision,
    vision_of,
    vision_on,
)
from edgemoe.models.store_head import StoreHead
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.files.header import Spec, read_header, tensor_bytes
from edgemoe.storage.files.untrusted import read_json, refuse_special_files
from edgemoe.storage.store.dense import DenseWeights
from edgemoe.storage.store.dense_shapes import matrix_shape
from edgemoe.storage.store.manifest import Manifest

if TYPE_CHECKING:
    from edgemoe.machine.device import Device
    from edgemoe.vision.sizes import VisionSize


@dataclass(frozen=True)
class StoreParts:
    """The parts of a store.

    Args:
        manifest: its store.json.
        config: its config.json, bounded.
        family: the family of the config.
        experts: number of experts in all layers.
        dense: dtype and shape of each dense tensor.
        vision: bytes of its vision tower; None: it has none.
        head: the head for further tokens; None: it has none.
    """

    manifest: Manifest
    config: dict[str, Any]
    family: Family
    experts: int
    dense: list[Spec]
    vision: VisionSize | None = None
    head: StoreHead | None = None

    @classmethod
    def read(cls, directory: Path, manifest: Manifest | None = None) -> StoreParts:
        """Reads store.json, the small files and the dense header, and compares them with each other.

        Args:
            directory: directory of the store.
            manifest: a manifest to take instead of store.json.

        Raises:
            UserError, DamagedData: with the wrong file or field.
        """
        manifest = manifest or Manifest.load(directory)
        refuse_special_files(directory)
        check_small_files(directory, manifest)
        config = bounded_config(read_json(directory, "config.json"))
        family = family_of(config, directory)
        check_store(directory, manifest, family)
        tensors = read_header(directory / manifest.dense_name).tensors
        check_vocabulary(directory, config, family, tensors)
        experts = sum(len(layer.records) for layer in manifest.layers.values())
        dense, vision = [tensor.spec for tensor in tensors.values()], vision_of(directory, config, manifest)
        head = StoreHead.read(directory, manifest, family, config)
        return cls(manifest, config, family, experts, dense, vision, head)

    def vision_on(self, device: Device | None) -> VisionSize | None:
        """Returns the bytes of the vision tower; None: there is none, or the device computes no pictures with it."""
        return vision_on(self.vision, self.config, device)

    @classmethod
    def planned(cls, checkpoint: Checkpoint, layout: str) -> StoreParts:
        """The parts of the store that a first use would make in a layout: no layers and files yet.

        Raises:
            ModelRefused, MissingTensor: the checkpoint cannot be converted.
        """
        config = checkpoint.config
        family = family_of(config)
        experts = ExpertWeights(checkpoint, family)
        specs = DenseWeights(checkpoint, experts.names, family, DENSE_BITS).specs()
        geometry = experts.geometry(None)
        manifest = Manifest("", layout, "", geometry, DENSE_BITS, layers={}, files={})
        every, vision = len(experts.layers) * experts.count, planned_vision(checkpoint)
        head = StoreHead.planned(checkpoint, family, config, DENSE_BITS)
        return cls(manifest, config, family, every, list(specs.values()), vision, head)

    def shape(self, device: Device | None) -> ModelShape:
        """The sizes for a memory plan on a device; None: on the CPU."""
        config, family = self.config, self.family
        vocab, shapes = config["vocab_size"], map(matrix_shape, self.dense)
        matrices = [shape for shape in shapes if len(shape) == 2]
        heads = max(config.get("num_attention_heads_per_layer") or [config["num_attention_heads"]])
        kv = family.kv.moving() if device else family.kv
        return ModelShape(
            layers=config["num_hidden_layers"],
            experts=self.experts,
            experts_per_layer=family.experts,
            top_k=family.top_k,
            hidden=max(family.hidden, config["hidden_size"]),
            intermediate=family.intermediate,
            heads=heads,
            kv=kv,
            widest=max((max(shape) for shape in matrices if shape[0] != vocab), default=0),
            vocab=vocab,
            dense_bytes=sum(tensor_bytes(*spec) for spec in self.dense),
            compiled_attention=device is None
            and all(kernel_fits(heads, part.heads, part.key_dim) for part in kv.parts),
            compiled_states=device is None and native.available(),
            index_topk=config.get("index_topk") or 0 if kv.index else 0,
            attention_copies=4 if kv.linear or kv.latent else 2,
            up_to_four=len(self.manifest.geometry.level_limits) * family.experts,
        )
