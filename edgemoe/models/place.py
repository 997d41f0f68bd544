"""Finds the store of a model by its name or path: where it lies in the cache, or will lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgemoe.console.loading import spinner
from edgemoe.errors import UserError
from edgemoe.families.table import require_known
from edgemoe.hub.name import HubModel
from edgemoe.models.cache import aliases, cached_names, file_name, find_layout, is_name, stores_directory
from edgemoe.models.conversion.download import choose_layout
from edgemoe.models.conversion.named import hub_model
from edgemoe.models.published.announced import known_repository
from edgemoe.storage.convert.checkpoint import Checkpoint, find_gguf
from edgemoe.storage.store.manifest import MANIFEST_NAME


@dataclass(frozen=True)
class Place:
    """Where the store of a model lies or will lie.

    Args:
        store: its directory.
        name: the model's name, for people.
        hub: the model on the Hub; None for a directory.
        checkpoint: the checkpoint to convert, its headers read; None for a store that is used in place and on the Hub.
    """

    store: Path
    name: str
    hub: HubModel | None = None
    checkpoint: Checkpoint | None = None

    @property
    def finished(self) -> bool:
        """Whether the store is complete."""
        return (self.store / MANIFEST_NAME).exists()


def locate(model: Path, layout: str, keep_source: bool) -> Place:
    """Finds the place of a model's store.

    Args:
        model: a short name, a model of the Hub, a directory, a GGUF file, or the name of a store in the cache.
        layout: the name of a record layout, or auto.
        keep_source: whether the download of a model of the Hub stays after its conversion.

    Raises:
        UserError: as resolve_store.
    """
    hub = hub_model(model, keep_source)
    if not hub:
        model = by_name(model, layout)
        hub = hub_model(model, keep_source)
    if (model / MANIFEST_NAME).exists():
        return Place(model, str(model))
    if hub:
        return Place(_cached(hub.slug, layout), hub.name, hub)
    if (model / "config.json").exists() or find_gguf(model):
        require_known(model)
        checkpoint, name = Checkpoint.open(model), model.resolve().name
        with spinner(f"comparing {name} with what was converted before"):
            store = _cached(f"{file_name(name)}-{checkpoint.fingerprint()[:16]}", layout)
        return Place(store, name, None, checkpoint)
    if (model / "adapter_config.json").exists():
        raise UserError(
            f"a whole model at {model}", "a LoRA adapter", "merge it into its model, and give the result"
        )
    found = "a file that is no GGUF" if model.exists() else "no such file or directory"
    raise UserError(
        f"a model at {model}",
        "a directory with neither store.json nor config.json" if model.is_dir() else found,
        "give a checkpoint directory, a GGUF file, a store made by `edgemoe convert`, or org/name for a model of the "
        "Hub",
    )


def by_name(model: Path, layout: str = "auto") -> Path:
    """The store in the cache that a name stands for, or the name on the Hub of an unfinished one; else `model`.

    A short name, and a name of models.published that the cache does not have, stand for their models on the Hub.
    Of several layouts of a model the given one is taken, or the one that was used last.

    Raises:
        UserError: no model or several models match, or a conversion of a directory is unfinished.
    """
    if model.exists() or not is_name(model):
        return model
    if known := known_repository(model, [each.directory for each in cached_names()]):
        return known
    found = find_layout(str(model), choose_layout(layout).name)
    if (found.paths[0] / MANIFEST_NAME).exists():
        return found.paths[0]
    on_hub = aliases(found.directory)[0]
    if HubModel.parse(on_hub):
        return Path(on_hub)
    raise UserError(
        f"a finished conversion of {found.short}",
        "an unfinished one",
        "give its checkpoint's directory: the conversion resumes",
    )


def _cached(name: str, layout: str) -> Path:
    """The path of a model's store in the cache, whether it exists or not."""
    return stores_directory() / f"{name}-{choose_layout(layout).name}"
