"""Writes a checkpoint as a GGUF of 16-bit weights: the file from which llama.cpp makes its own types."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from edgemoe.families.table import family_of
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.run import convert
from edgemoe.storage.export.levels import one_level
from edgemoe.storage.export.run import export
from edgemoe.storage.files.atomic import partial_file
from edgemoe.storage.record.layout import LAYOUTS


def write_gguf(checkpoint: Path, destination: Path) -> None:
    """Writes a GGUF with experts in bf16 and other matrices in F16, unless the file is there already.

    Names, sizes and tokenizer come from edgemoe's own export of the checkpoint; its experts are replaced.

    Args:
        checkpoint: directory of a checkpoint with 16-bit weights, whose layers all have experts.
        destination: the file.

    Raises:
        EdgemoeError: the checkpoint is damaged, or its family has no GGUF export.
    """
    if destination.exists():
        return
    opened = Checkpoint.open(checkpoint)
    family = family_of(opened.config)
    experts = ExpertWeights(opened, family)
    with tempfile.TemporaryDirectory(dir=destination.parent) as name:
        store, exported = Path(name) / "store", Path(name) / "export"
        layout = LAYOUTS["cpu-generic"]
        manifest = convert(
            checkpoint, store, family, max_level=8, layout=layout, dense_bits=16, progress=_show_nothing
        )
        levels = one_level(manifest, manifest.max_level)
        export(store, exported, family, format="gguf", levels=levels, progress=_show_nothing)
        reader = gguf.GGUFReader(next(exported.glob("*.gguf")))
        with partial_file(destination, opened.nbytes) as part:
            _rewrite(reader, experts, part)


def _show_nothing(bytes_read: int, total: int) -> None:
    """Shows no progress: models small enough for a comparison of quality take seconds."""


def _rewrite(reader: gguf.GGUFReader, experts: ExpertWeights, into: Path) -> None:
    """Copies a GGUF's fields and its tensors, experts from a checkpoint."""
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(into, architecture)
    for name, field in reader.fields.items():
        if name == gguf.Keys.General.ARCHITECTURE or name.startswith("GGUF."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        if "_exps." in tensor.name:
            writer.add_tensor(tensor.name, _experts(tensor.name, experts), raw_dtype=Kind.BF16)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _experts(name: str, experts: ExpertWeights) -> NDArray[np.uint8]:
    """The bytes of a layer's gates, ups or downs in bf16, uint8 [E, rows, 2 * cols]."""
    layer, part = int(name.split(".")[1]), name.split(".")[2].split("_")[1]
    out = []
    for expert in range(experts.count):
        gate_up, down = experts.read(layer, expert)
        assert isinstance(gate_up, torch.Tensor)
        assert isinstance(down, torch.Tensor)
        gate, up = gate_up.chunk(2)
        out.append({"gate": gate, "up": up, "down": down}[part])
    joined = torch.stack(out).to(torch.bfloat16).contiguous()
    return joined.view(torch.uint8).numpy()
