"""Checks that a store's manifest and dense header describe the same model as its config.json.

Kernels take every size from the manifest and the config. A store whose parts contradict each other would make them
read and write past their buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from edgemoe.errors import BadManifest
from edgemoe.families.base import Family
from edgemoe.machine.device import Device
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import Config
from edgemoe.storage.convert.expert_weights import matrix_sides
from edgemoe.storage.files.header import Spec, TensorEntry, read_header, tensor_bytes
from edgemoe.storage.store import dense_shapes
from edgemoe.storage.store.dense import VISION_NAME, VisionTensors
from edgemoe.storage.store.manifest import HEAD_NAME, MANIFEST_NAME, Manifest
from edgemoe.storage.store.verify import check_file
from edgemoe.vision.forms import VisionForm, form_of, lacks_kernel, read_vision_config
from edgemoe.vision.sizes import VisionSize, vision_size

_ACTION = "convert the model again"


def check_store(directory: Path, manifest: Manifest, family: Family) -> None:
    """Compares the experts of a manifest with a family.

    Args:
        directory: the store's, named in messages.
        manifest: its store.json.
        family: the family of its config.json.

    Raises:
        BadManifest: with the first field that differs, and both values.
    """
    layers, experts = list(family.moe_layers), family.experts
    matrices = {name: sides for name, *sides in matrix_sides(family)}
    stored = {matrix.name: [matrix.rows, matrix.cols] for matrix in manifest.geometry.matrices}
    fields = [
        ("layers", layers, sorted(manifest.layers)),
        ("matrices", list(matrices), list(stored)),
        *((f"rows and columns of {name}", sides, stored.get(name)) for name, sides in matrices.items()),
        *(
            (f"experts of layer {i}", experts, len(manifest.layers[i].records))
            for i in layers
            if i in manifest.layers
        ),
    ]
    for field, wanted, found in fields:
        if found != wanted:
            raise BadManifest(
                f"{field} {wanted} in {directory / MANIFEST_NAME}, as config.json has", str(found), _ACTION
            )


def check_vocabulary(
    directory: Path, config: Config, family: Family, dense: Mapping[str, TensorEntry]
) -> None:
    """Compares the rows of the embedding and the head with a config.

    Raises:
        BadManifest: with the tensor and both shapes.
    """
    wanted = config["vocab_size"], config["hidden_size"]
    for name, entry in dense.items():
        if (
            family.in_modules(name) in ("model.embed_tokens.weight", "lm_head.weight")
            and (found := dense_shapes.matrix_shape(entry.spec)) != wanted
        ):
            raise BadManifest(
                f"{name} of {list(wanted)} in the dense weights of {directory}, as config.json has",
                str(list(found)),
                _ACTION,
            )


def check_small_files(directory: Path, manifest: Manifest) -> None:
    """Compares config, tokenizer, template and processor files with their checksums in the manifest.

    Raises:
        BadManifest: the manifest lacks config.json or the dense weights.
        MissingTensor, TruncatedFile, ChecksumMismatch, ReadFailed: with the file.
    """
    for name in ("config.json", manifest.dense_name):
        if name not in manifest.files:
            raise BadManifest(f"{name} among the files of {directory / MANIFEST_NAME}", "none", _ACTION)
    for name, entry in manifest.files.items():
        if name not in (manifest.dense_name, VISION_NAME, HEAD_NAME):
            for damage in check_file(directory / name, entry)[1]:
                raise damage


def vision_of(directory: Path, config: Config, manifest: Manifest) -> VisionSize | None:
    """Returns the bytes of a store's vision tower; None: it has none, or pictures of its family are not taken.

    Raises:
        BadHeader, TruncatedFile, MissingTensor: the tower's file is damaged, or missing.
        ModelRefused: a value of config.json is out of bounds.
    """
    if (form := form_of(config)) is None or VISION_NAME not in manifest.files:
        return None
    found = read_header(directory / VISION_NAME).tensors.values()
    return _vision_size(directory, config, form, [tensor.spec for tensor in found])


def vision_on(size: VisionSize | None, config: Config, device: Device | None) -> VisionSize | None:
    """Returns the bytes of a vision tower where a device computes pictures with it; elsewhere None."""
    return None if lacks_kernel(config, device) else size


def planned_vision(checkpoint: Checkpoint) -> VisionSize | None:
    """Returns the bytes of the vision tower that a conversion would store; None and errors as vision_of."""
    form = form_of(checkpoint.config)
    if form is None or not (specs := VisionTensors(checkpoint.others, form.modules).specs().values()):
        return None
    return _vision_size(checkpoint.directory, checkpoint.config, form, specs)


def _vision_size(directory: Path, config: Config, form: VisionForm, specs: Collection[Spec]) -> VisionSize:
    _, vision = read_vision_config(directory, form)
    return vision_size(vision, config["hidden_size"], sum(tensor_bytes(*spec) for spec in specs))
