"""The description of a model that ollama's clients read: /api/tags and /api/show."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from edgemoe.models.listing import contents_of
from edgemoe.serve.protocol.reply import Shape
from edgemoe.storage.store.manifest import MANIFEST_NAME

if TYPE_CHECKING:
    from edgemoe.models.store_model import StoreModel
    from edgemoe.serve.serving import Serving


def listed(serving: Serving) -> Shape:
    """The entry of /api/tags; before the model is open, with its name alone."""
    entry = {"name": serving.name, "model": serving.name}
    if serving.model is None:
        return {**entry, "modified_at": _time(serving.created), "size": 0, "digest": "", "details": {}}
    store = serving.model.engine.store
    size = sum(path.stat().st_size for path in store.directory.iterdir())
    return {
        **entry,
        "modified_at": _time((store.directory / MANIFEST_NAME).stat().st_mtime),
        "size": size,
        "digest": store.manifest.fingerprint,
        "details": _details(store),
    }


def loaded(serving: Serving) -> Shape:
    """The entry of /api/ps: the model with the memory that its limit gives it. It stays as long as the server runs.

    Raises:
        ApiError: the model is not open yet.
    """
    plan = serving.require().engine.plan
    return {
        **listed(serving),
        "expires_at": _time(_NEVER),
        "size_vram": plan.vram_limit_bytes,
        "context_length": plan.context,
    }


_NEVER = datetime(2318, 1, 1, tzinfo=UTC).timestamp()
"""The end that ollama gives to a model that stays loaded, in seconds."""


def described(serving: Serving) -> Shape:
    """The object of /api/show.

    Raises:
        ApiError: the model is not open yet.
    """
    model = serving.require()
    store, chats = model.engine.store, serving.chats
    found = contents_of(store.directory)
    family = found.family or ""
    return {
        "modelfile": "",
        "parameters": "",
        "template": model.tokenizer.chat_template or "",
        "details": _details(store),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": found.parameters,
            f"{family}.context_length": model.engine.plan.context,
            f"{family}.embedding_length": model.engine.shape.hidden,
        },
        "capabilities": ["completion", *chats.capabilities()],
        "modified_at": _time((store.directory / MANIFEST_NAME).stat().st_mtime),
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
