"""A store on disk: its manifest, shape and memory plan, before any weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgemoe.errors import DamagedData, ModelRefused, UserError
from edgemoe.families.base import Family
from edgemoe.families.table import family_of
from edgemoe.kernels.native.attention import kernel_fits
from edgemoe.kernels.registry import Compute, compute
from edgemoe.kv.formats import KVFormat
from edgemoe.machine.device import Device
from edgemoe.memory.compensator_bytes import NO_COMPENSATORS, CompensatorBytes
from edgemoe.memory.limits import Limits
from edgemoe.memory.make_plan import make_plan
from edgemoe.memory.model_shape import ModelShape, PlannedModel
from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.conversion.first_use import DENSE_BITS
from edgemoe.models.store_check import check_small_files, check_store, check_vocabulary
from edgemoe.policy.damage import Damage
from edgemoe.policy.settings import RunSettings, format_levels
from edgemoe.storage.base import ResidentForm
from edgemoe.storage.convert.checkpoint import Checkpoint, Config, bounded_config
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.files.header import Spec, read_header, tensor_bytes
from edgemoe.storage.files.untrusted import read_json, refuse_special_files
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.calibration import fitting_calibration
from edgemoe.storage.store.dense import DenseWeights
from edgemoe.storage.store.manifest import DENSE_NAME, Manifest

MOST_PARALLEL = 64
"""Most sequences that run at once; the compiled kernel has as many rows (MOST_ROWS in decode_layers.c)."""

_DEPENDS_ON_LENGTH = ("longrope", "dynamic")
"""Rotary positions that transformers chooses by the largest position of a whole step."""


@dataclass(frozen=True)
class StoreModel:
    """An open store. Frozen; has neither weights nor file descriptors.

    Args:
        directory: of the store.
        manifest: its store.json.
        config: its config.json, bounded.
        shape: sizes for a memory plan.
        form: the form in which experts lie in memory for the kernel here.
        compute: the kernel here.
        device: where the model will be computed; None: on the CPU.
    """

    directory: Path
    manifest: Manifest
    config: dict[str, Any]
    shape: ModelShape
    form: ResidentForm
    compute: Compute
    device: Device | None = None

    @classmethod
    def open(cls, directory: Path, device: Device | None = None) -> StoreModel:
        """Reads store.json, the small files and the dense header, and compares them with each other.

        Raises:
            UserError, DamagedData: with the wrong file or field.
        """
        manifest = Manifest.load(directory)
        refuse_special_files(directory)
        check_small_files(directory, manifest)
        config = bounded_config(read_json(directory, "config.json"))
        family = family_of(config)
        check_store(directory, manifest, config, family)
        tensors = read_header(directory / DENSE_NAME).tensors
        check_vocabulary(directory, config, family, tensors)
        experts = sum(len(layer.records) for layer in manifest.layers.values())
        shape = _shape(config, family, experts, [tensor.spec for tensor in tensors.values()], device)
        kernel = compute(device.place if device else "cpu")
        if manifest.layout != kernel.layout.name:
            logging.getLogger("edgemoe").warning(
                "%s is in layout %s, and the kernel here uses %s: every read converts an expert's layout, "
                "which is several times slower. Convert the model again with --layout %s",
                *(directory, manifest.layout, kernel.layout.name, kernel.layout.name),
            )
        form = kernel.form(manifest.geometry, LAYOUTS[manifest.layout], kernel.layout)
        return cls(directory, manifest, config, shape, form, kernel, device)

    @classmethod
    def planned(cls, checkpoint: Checkpoint, device: Device | None = None) -> StoreModel:
        """Describes the store that a first use would make of a checkpoint: its manifest has no layers and files yet.

        Reads headers alone.

        Raises:
            ModelRefused, MissingTensor: the checkpoint cannot be converted.
        """
        config = checkpoint.config
        family = family_of(config)
        experts = ExpertWeights(checkpoint, family)
        specs = DenseWeights(checkpoint, experts.names, family, DENSE_BITS).specs()
        kernel, geometry = compute(device.place if device else "cpu"), experts.geometry(None)
        manifest = Manifest(
            checkpoint.fingerprint(), kernel.layout.name, "", geometry, DENSE_BITS, layers={}, files={}
        )
        shape = _shape(config, family, len(experts.layers) * experts.count, list(specs.values()), device)
        form = kernel.form(geometry, kernel.layout, kernel.layout)
        return cls(checkpoint.directory, manifest, config, shape, form, kernel, device)

    def with_kv(self, form: KVFormat) -> StoreModel:
        """Returns the store for a model whose keys and values are stored in another format.

        Raises:
            UserError: the device cannot read it, or keys and values differ where both are one latent.
        """
        if self.device and form.quantized:
            name = f"--device {self.device.name}"
            raise UserError(f"a model on the CPU, for --kv-cache {form}", name, "give --device cpu")
        if self.shape.kv.latent and form.keys != form.values:
            wanted = "one format for keys and values, which are one latent in this model"
            raise UserError(wanted, str(form), f"give --kv-cache {form.keys} alone")
        return replace(self, shape=replace(self.shape, kv=replace(self.shape.kv, format=form)))

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes of dense weights that one decoded token reads: all except the embedding's other rows.

        A tied embedding counts whole, since the head reads it.
        """
        if self.config.get("tie_word_embeddings"):
            return self.shape.dense_bytes
        return self.shape.dense_bytes - self.shape.vocab * self.shape.hidden * self.manifest.dense_bits // 8

    def default_context(self) -> int:
        """Tokens of context by default: the model's maximum, at most 4096."""
        return min(self.config.get("max_position_embeddings") or 4096, 4096)

    def plan(
        self,
        *,
        vram_limit: int | None,
        dram_limit: int = 0,
        settings: RunSettings | None = None,
        context: int | None = None,
        parallel: int = 1,
        compensators: CompensatorBytes = NO_COMPENSATORS,
        prefill_rows: int | None = None,
    ) -> MemoryPlan:
        """Divides memory limits (memory.make_plan).

        Args:
            vram_limit: bytes; None: everything resident, or the free memory.
            dram_limit: bytes; 0: no second tier.
            settings: by default every expert at the store's highest level.
            context: tokens of each sequence; by default default_context().
            parallel: sequences that run at once, 1 to MOST_PARALLEL.
            compensators: others than the store's, for which there is room as well.
            prefill_rows: most rows of a prompt in one step; None: as many as the context, where that costs little.

        Raises:
            UserError: settings that this store or device cannot run.
            ModelRefused: several sequences of a model whose positions depend on the longest of them.
            DoesNotFit: with the smallest limit that works.
        """
        settings = settings or RunSettings(levels=(self.manifest.max_level,))
        if settings.levels[0] > self.manifest.max_level:
            raise UserError(
                f"a store with level {settings.levels[0]}",
                f"{self.directory}, converted with --max-level {self.manifest.max_level}",
                "choose a lower level, or convert the model again with a higher one",
            )
        self._require_parallel(parallel)
        if settings.in_place == "off" and not self.device:
            raise UserError("a GPU, for --in-place off", "--device cpu", "leave it out")
        return make_plan(
            PlannedModel(self.shape, self.manifest.geometry, self.form, self.device),
            Limits(vram_limit, context or self.default_context(), dram_limit, parallel, prefill_rows),
            settings,
            compensators=self.compensator_bytes(settings).with_(compensators),
            damage=self.known_damage(settings),
        )

    def known_damage(self, settings: RunSettings) -> Damage | None:
        """What fewer bits of each expert cost, where settings go by it and a calibration lies beside the store."""
        if not (settings.priced and self.manifest.layers):
            return None
        layers = self.manifest.layers
        fits = sorted(layers), max(len(layer.records) for layer in layers.values())
        with suppress(DamagedData):  # the engine names the file
            found = fitting_calibration(self.directory, self.manifest.source, settings.levels[0], *fits)
            return Damage.of(found) if found else None
        return None

    def compensator_bytes(self, settings: RunSettings) -> CompensatorBytes:
        """Bytes of the compensators that settings use.

        Raises:
            UserError: settings that use them where the store, the device or a level has none.
            DoesNotFit: a limit of theirs that is too small.
        """
        if settings.compensation is None:
            return NO_COMPENSATORS
        wanted, found = f"for {settings.compensation.option}", self.manifest.compensators
        if self.device:
            name = f"--device {self.device.name}"
            raise UserError(f"a model on the CPU, {wanted}", name, "give --device cpu")
        if found is None:
            raise UserError(
                f"a store with low-rank compensators, {wanted}",
                f"{self.directory} without them",
                "add them with `edgemoe compensate STORE --reference CHECKPOINT`",
            )
        require_base_level(settings, found.base_level)
        if settings.compensation.end > self.shape.top_k:
            raise UserError(
                f"at most {self.shape.top_k} experts, as many as a token of this model has, {wanted}",
                f"{settings.compensation.end}",
                "give fewer",
            )
        used = settings.compensation.count / self.shape.top_k
        return CompensatorBytes.of(found, used, settings.compensators_limit)

    def _require_parallel(self, parallel: int) -> None:
        if not 1 <= parallel <= MOST_PARALLEL:
            raise UserError(
                f"1 to {MOST_PARALLEL} sequences at once", f"{parallel}", "choose a number of them"
            )
        scaling = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        kind = scaling.get("rope_type") or scaling.get("type") if isinstance(scaling, dict) else None
        if parallel > 1 and kind in _DEPENDS_ON_LENGTH:
            raise ModelRefused(
                "positions that no other sequence of a step changes",
                f"{kind} rotary positions in config.json, and {parallel} sequences at once",
                "run one sequence at a time",
            )


def _shape(
    config: Config, family: Family, experts: int, dense: Sequence[Spec], device: Device | None
) -> ModelShape:
    """The sizes of a model with so many experts in all and these dense tensors."""
    vocab, matrices = config["vocab_size"], [shape for _, shape in dense if len(shape) == 2]
    heads, kv = config["num_attention_heads"], family.kv(config)
    plain = device is None and family.fused_gqa is not None
    return ModelShape(
        layers=config["num_hidden_layers"],
        experts=experts,
        experts_per_layer=family.experts(config),
        top_k=config[family.top_k_key],
        hidden=config["hidden_size"],
        intermediate=config[family.intermediate_key],
        heads=heads,
        kv=kv,
        widest=max((max(shape) for shape in matrices if shape[0] != vocab), default=0),
        vocab=vocab,
        dense_bytes=sum(tensor_bytes(*spec) for spec in dense),
        compiled_attention=plain and kernel_fits(heads, kv.heads, kv.key_dim, config.get("clip_qkv")),
    )


def require_base_level(settings: RunSettings, base_level: int) -> None:
    """Raises UserError for settings that compensate a level which they do not have."""
    if settings.compensation and base_level not in settings.levels:
        raise UserError(
            f"levels with {base_level}, whose errors the compensators are of, for {settings.compensation.option}",
            f"levels {format_levels(settings.levels)}",
            "give --levels 4/2" if base_level == 2 else "give --levels 8/4",
        )
