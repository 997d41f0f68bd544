"""Writes a checkpoint as a GGUF of 16-bit weights: the file from which llama.cpp makes its own types."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType as Kind

from edgemoe.families.table import family_of
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.run import convert
from edgemoe.storage.export.levels import one_level
from edgemoe.storage.export.run import export
from edgemoe.storage.files.atomic import partial_file
from edgemoe.storage.record.layout import LAYOUTS
from tools.peers.rewrite_gguf import Replaced, rewrite


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
            rewrite(
                reader, part, lambda each: _experts(each.name, experts) if _is_expert(each.name) else None
            )


def _show_nothing(bytes_read: int, total: int) -> None:
    """Shows no progress: models small enough for a comparison of quality take seconds."""


def _is_expert(name: str) -> bool:
    """Whether a tensor of a GGUF has the experts of a layer."""
    return "_exps." in name


def _experts(name: str, experts: ExpertWeights) -> Replaced:
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
    return joined.view(torch.uint8).numpy(), Kind.BF16
