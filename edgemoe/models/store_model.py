"""A store on disk: its manifest, shape and memory plan, before any weight is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.errors import UserError
from edgemoe.kernels.registry import Compute, compute
from edgemoe.kv.formats import KVFormat
from edgemoe.memory.compensator_bytes import NO_COMPENSATORS, CompensatorBytes
from edgemoe.memory.limits import Limits
from edgemoe.memory.make_plan import make_plan
from edgemoe.memory.model_shape import ModelShape, PlannedModel
from edgemoe.models.calibration import damage_of
from edgemoe.models.parts import StoreParts
from edgemoe.models.plans.requirements import (
    compensators_for,
    require_drafts,
    require_parallel,
    require_settings,
)
from edgemoe.models.store_head import StoreHead
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import ResidentForm
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.reader import with_head

if TYPE_CHECKING:
    from edgemoe.machine.device import Device
    from edgemoe.memory.plan import MemoryPlan
    from edgemoe.policy.damage import Damage
    from edgemoe.storage.convert.checkpoint import Checkpoint
    from edgemoe.storage.store.manifest import Manifest
    from edgemoe.vision.sizes import VisionSize


@dataclass(frozen=True)
class StoreModel:
    """An open store. Frozen; has neither weights nor file descriptors.

    Args:
        directory: the directory of the store.
        manifest: its store.json.
        config: its config.json, bounded.
        shape: sizes for a memory plan.
        form: the form in which experts lie in memory for the kernel here.
        compute: the kernel here.
        device: where the model will be computed; None: on the CPU.
        vision: bytes of its vision tower, which a plan counts with `with_vision`; None: it has none, or the device
            computes no pictures with it.
        head: the head for further tokens; None: the store has none. Shape and manifest are without it.
    """

    directory: Path
    manifest: Manifest
    config: dict[str, Any]
    shape: ModelShape
    form: ResidentForm
    compute: Compute
    device: Device | None = None
    vision: VisionSize | None = None
    head: StoreHead | None = None

    @classmethod
    def open(cls, directory: Path, device: Device | None = None) -> StoreModel:
        """Reads store.json, the small files and the dense header, and compares them with each other.

        Raises:
            UserError, DamagedData: with the wrong file or field.
        """
        kernel = compute(device.place if device else "cpu")
        store = cls._of(directory, StoreParts.read(directory), kernel, device)
        if store.manifest.layout != kernel.layout.name:
            logging.getLogger("edgemoe").warning(
                "%s is in layout %s, and the kernel here uses %s: every read converts an expert's layout, "
                "which is several times slower. Convert the model again with --layout %s",
                *(directory, store.manifest.layout, kernel.layout.name, kernel.layout.name),
            )
        return store

    @classmethod
    def planned(cls, checkpoint: Checkpoint, device: Device | None = None) -> StoreModel:
        """Describes the store that a first use would make of a checkpoint: its manifest has no layers and files yet.

        Reads headers alone.

        Raises:
            ModelRefused, MissingTensor: the checkpoint cannot be converted.
        """
        kernel = compute(device.place if device else "cpu")
        parts = StoreParts.planned(checkpoint, kernel.layout.name)
        return cls._of(checkpoint.directory, parts, kernel, device)

    @classmethod
    def _of(cls, directory: Path, parts: StoreParts, kernel: Compute, device: Device | None) -> StoreModel:
        manifest = parts.manifest
        form = kernel.form(manifest.geometry, LAYOUTS[manifest.layout], kernel.layout)
        further = parts.vision_on(device), parts.head
        return cls(directory, manifest, parts.config, parts.shape(device), form, kernel, device, *further)

    def with_manifest(self, manifest: Manifest) -> StoreModel:
        """Returns the store with other files of weights in its directory, which a manifest describes.

        Raises:
            UserError, DamagedData: as `open`.
        """
        return self._of(self.directory, StoreParts.read(self.directory, manifest), self.compute, self.device)

    def for_run(self, settings: RunSettings, parallel: int) -> StoreModel:
        """Returns the store as a run with these settings has it in memory: with its head, where they use it.

        Args:
            settings: the settings of the run.
            parallel: sequences that run at once.
        """
        if settings.drafts != "mtp" or self.head is None:
            return replace(self, head=None)
        return replace(self, shape=self.head.added(self.shape, parallel))

    @property
    def records(self) -> Manifest:
        """The manifest with all experts that a run reads (for_run): of the model's layers, and of a head it uses."""
        return with_head(self.manifest) if self.head else self.manifest

    def with_kv(self, form: KVFormat) -> StoreModel:
        """Returns the store for a model whose keys and values are stored in another format.

        Raises:
            UserError: keys and values differ where both are one latent.
        """
        if self.shape.kv.latent and form.keys != form.values:
            wanted = "one format for keys and values, which are one latent in this model"
            raise UserError(wanted, str(form), f"give --kv-cache {form.keys} alone")
        return replace(self, shape=replace(self.shape, kv=self.shape.kv.stored_as(form)))

    def with_vision(self) -> StoreModel:
        """Returns the store for a model that takes pictures, where it has a tower; otherwise the store itself."""
        return replace(self, shape=replace(self.shape, vision=self.vision)) if self.vision else self

    def guessing(self, settings: RunSettings) -> StoreModel:
        """Returns the store for sequences with space for the guesses of some settings."""
        kv = self.shape.kv.guessing(settings.most_drafts)
        return replace(self, shape=replace(self.shape, kv=kv))

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes of dense weights that one decoded token reads: all except the embedding's other rows.

        A tied embedding counts whole, since the head reads it.
        """
        if self.config.get("tie_word_embeddings"):
            return self.shape.dense_bytes
        # Groups of 64 weights have 4 bytes more.
        bits = 6.5 if self.manifest.head_bits == 6 else max(self.manifest.dense_bits, 8)
        embedding = int(self.shape.vocab * self.shape.hidden * bits) // 8
        return self.shape.dense_bytes - embedding

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts in memory, at their highest levels."""
        return self.bytes_of_all(self.manifest.max_level)

    def bytes_of_all(self, level: int) -> int:
        """Bytes of all experts in memory at a level, or at their layer's highest level if that is lower."""
        return self._planned.bytes_of_all(level)

    @property
    def record_bytes(self) -> int:
        """Bytes of all experts on disk, also of a store that is foreseen."""
        geometry, shape = self.manifest.geometry, self.shape
        limited = [geometry.of_layer(layer).record_bytes for layer in geometry.layer_numbers]
        others = shape.experts - len(limited) * shape.experts_per_layer
        return shape.experts_per_layer * sum(limited) + others * geometry.record_bytes

    @property
    def _planned(self) -> PlannedModel:
        return PlannedModel(self.shape, self.manifest.geometry, self.form, self.device)

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
            settings: None: every expert at the store's highest level.
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
        require_settings(settings, self.directory, self.manifest, self.device)
        require_drafts(settings, self.config, self.device, has_head=self.head is not None)
        require_parallel(self.config, parallel, context or self.default_context())
        return make_plan(
            self.guessing(settings).for_run(settings, parallel)._planned,
            Limits(vram_limit, context or self.default_context(), dram_limit, parallel, prefill_rows),
            settings,
            compensators=self.compensator_bytes(settings).with_(compensators),
            damage=self.known_damage(settings),
        )

    def known_damage(self, settings: RunSettings) -> Damage | None:
        """The damage of fewer bits of each expert, where settings need it and the store has a calibration."""
        return damage_of(self.directory, self.manifest, settings)

    def compensator_bytes(self, settings: RunSettings) -> CompensatorBytes:
        """Bytes of the compensators that settings use; raises as requirements.compensators_for."""
        return compensators_for(settings, self.directory, self.manifest, self.shape.top_k, self.device)
