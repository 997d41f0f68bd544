"""The description of a model that ollama's clients read: /api/tags, /api/ps and /api/show."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from edgemoe.models.listing import contents_of
from edgemoe.serve.errors import not_loaded
from edgemoe.serve.protocol.reply import Shape
from edgemoe.storage.store.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from edgemoe.models.store_model import StoreModel
    from edgemoe.serve.serving import Serving
    from edgemoe.serve.slot import Slot

_NEVER = datetime(2318, 1, 1, tzinfo=UTC).timestamp()
"""The end that ollama gives to a model that stays loaded, in seconds."""


def listed(slots: Sequence[Slot]) -> list[Shape]:
    """The entries of /api/tags; a model of which nothing is known yet has its name alone."""
    return [_entry(slot.serving) for slot in slots]


def _entry(serving: Serving) -> Shape:
    entry = {"name": serving.name, "model": serving.name}
    if serving.about is None:
        return {**entry, "modified_at": _time(serving.created), "size": 0, "digest": "", "details": {}}
    store = serving.about.store
    size = sum(path.stat().st_size for path in store.directory.iterdir())
    return {
        **entry,
        "modified_at": _time((store.directory / MANIFEST_NAME).stat().st_mtime),
        "size": size,
        "digest": store.manifest.fingerprint,
        "details": _details(store),
    }


def loaded(models: Sequence[tuple[Slot, float | None]]) -> list[Shape]:
    """The entries of /api/ps: loaded models, with the memory that limits give them.

    Args:
        models: each with the seconds until it is unloaded; None: it stays.
    """
    entries = list[Shape]()
    for slot, seconds in models:
        if model := slot.serving.model:
            plan, ends = model.engine.plan, _NEVER if seconds is None else time.time() + seconds
            times = {"expires_at": _time(min(ends, _NEVER))}
            sizes = {"size_vram": plan.vram_limit_bytes, "context_length": plan.context}
            entries.append({**_entry(slot.serving), **times, **sizes})
    return entries


def described(serving: Serving) -> Shape:
    """The object of /api/show. A model that is not loaded stays so.

    Raises:
        ApiError: the server starts.
    """
    from edgemoe.api.chat_prompt import capabilities_of
    from edgemoe.models.tokenizer import load_tokenizer

    about, model = serving.about, serving.model
    if about is None:
        raise not_loaded()
    tokenizer = model.tokenizer if model else load_tokenizer(about.store.directory)
    contents = contents_of(about.store.directory)
    family = contents.family or ""
    return {
        "modelfile": "",
        "parameters": "",
        "template": tokenizer.chat_template or "",
        "details": _details(about.store),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": contents.parameters,
            f"{family}.context_length": about.context,
            f"{family}.embedding_length": about.store.shape.hidden,
        },
        "capabilities": [
            "completion",
            *(["vision"] if about.store.shape.vision else []),
            *capabilities_of(tokenizer),
        ],
        "modified_at": _time((about.store.directory / MANIFEST_NAME).stat().st_mtime),
    }


def _details(store: StoreModel) -> Shape:
    found = contents_of(store.directory)
    family = found.family or ""
    return {
        "parent_model": "",
        "format": "edgemoe",
        "family": family,
        "families": [family],
        "parameter_size": _amount(found.parameters or 0),
        "quantization_level": f"{found.levels[0]} bits",
    }


def _amount(parameters: int) -> str:
    """A number of weights as ollama writes it: 30.5B, 3.1M."""
    unit, letter = (10**9, "B") if parameters >= 10**9 else (10**6, "M")
    return f"{parameters / unit:.1f}{letter}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
