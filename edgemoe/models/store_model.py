"""A store of a model as it lies on disk, and what can be known of it before anything is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgemoe.families.table import family_of
from edgemoe.kernels.registry import Compute, compute
from edgemoe.memory.plan import MemoryPlan, ModelShape, make_plan
from edgemoe.policy.settings import RunSettings
from storage.base import ResidentForm
from storage.checkpoint import bounded_config
from storage.device import Device
from storage.errors import UserError
from storage.header import read_header
from storage.layout import LAYOUTS
from storage.manifest import Manifest
from storage.untrusted import read_json


@dataclass(frozen=True)
class StoreModel:
    """A store as found on disk, before anything is loaded."""

    directory: Path
    manifest: Manifest
    config: dict[str, Any]
    shape: ModelShape
    form: ResidentForm
    compute: Compute
    device: Device | None = None
    """Where it will be computed; None: on the CPU."""

    @classmethod
    def open(cls, directory: Path, device: Device | None = None) -> StoreModel:
        """Reads store.json, config.json and the dense header.

        Raises:
            UserError, BadManifest, BadHeader, ModelRefused: naming what is wrong.
        """
        manifest = Manifest.load(directory)
        config = bounded_config(read_json(directory, "config.json"))
        family = family_of(config)
        shape = ModelShape(
            layers=config["num_hidden_layers"],
            experts=sum(len(layer.records) for layer in manifest.layers.values()),
            experts_per_layer=family.experts(config),
            top_k=config[family.top_k_key],
            hidden=config["hidden_size"],
            intermediate=config[family.intermediate_key],
            heads=config["num_attention_heads"],
            kv=family.kv(config),
            widest=widest_matrix(directory / "dense.safetensors", config["vocab_size"]),
            vocab=config["vocab_size"],
            dense_bytes=dense_bytes(directory / "dense.safetensors"),
        )
        way = compute(device.place if device else "cpu")
        if manifest.layout != way.layout.name:
            logging.getLogger("edgemoe").warning(
                "%s is in layout %s, and the kernel here wants %s: every expert is re-laid out as it is read, "
                "which is several times slower. Convert the model again with --layout %s",
                directory,
                manifest.layout,
                way.layout.name,
                way.layout.name,
            )
        form = way.form(manifest.geometry, LAYOUTS[manifest.layout], way.layout)
        return cls(directory, manifest, config, shape, form, way, device)

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes of dense weights that one decoded token reads: all but the embedding's other rows.

        A tied embedding is read whole, as the head.
        """
        if self.config.get("tie_word_embeddings"):
            return self.shape.dense_bytes
        return self.shape.dense_bytes - self.shape.vocab * self.shape.hidden * self.manifest.dense_bits // 8

    def default_context(self) -> int:
        """Tokens of context where none was asked: what the model was made for, at most 4096."""
        return min(int(self.config.get("max_position_embeddings", 4096)), 4096)

    def plan(
        self,
        *,
        vram_limit: int | None,
        dram_limit: int = 0,
        settings: RunSettings | None = None,
        context: int | None = None,
    ) -> MemoryPlan:
        """See plan.make_plan; settings default to everything at the store's highest level, context to the model's."""
        settings = settings or RunSettings(levels=(self.manifest.max_level,))
        if settings.levels[0] > self.manifest.max_level:
            raise UserError(
                f"level {settings.levels[0]} was wanted",
                f"{self.directory} was converted with --max-level {self.manifest.max_level}",
                "Ask for a lower level, or convert the model again with a higher one",
            )
        return make_plan(
            self.shape,
            self.manifest.geometry,
            self.form,
            vram_limit=vram_limit,
            dram_limit=dram_limit,
            settings=settings,
            context=context or self.default_context(),
            device=self.device,
        )


def dense_bytes(path: Path) -> int:
    """Bytes of memory that the tensors of dense.safetensors take."""
    return sum(tensor.range.length for tensor in read_header(path).tensors.values())


def widest_matrix(path: Path, vocab: int) -> int:
    """Largest side of a matrix in dense.safetensors, except matrices with a row for each of `vocab` tokens."""
    shapes = (tensor.shape for tensor in read_header(path).tensors.values())
    return max((max(shape) for shape in shapes if len(shape) == 2 and shape[0] != vocab), default=0)
