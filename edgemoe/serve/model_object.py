"""A model as /v1/models and llama.cpp's /models show it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edgemoe.serve.slot import Slot


def model_object(slot: Slot) -> dict[str, Any]:
    """The entry of a model: its name and whether it is loaded; once they are known its context and vocabulary, and
    whether it takes pictures."""
    serving = slot.serving
    value = slot.state if slot.state in ("loaded", "loading") else "unloaded"
    if value == "unloaded" and slot.waiting:
        value = "loading"  # in its turn
    entry: dict[str, Any] = {
        "id": serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "edgemoe",
        "status": {"value": value} | ({"failed": True} if slot.failed else {}),
    }
    if serving.about is None:
        return entry
    context = serving.about.context
    meta = {"n_ctx": context, "n_vocab": serving.about.store.shape.vocab}
    inputs = ["text", "image"] if serving.about.store.shape.vision else ["text"]
    architecture = {"input_modalities": inputs, "output_modalities": ["text"]}
    return entry | {"max_model_len": context, "meta": meta, "architecture": architecture}


def model_list(slots: Iterable[Slot]) -> dict[str, Any]:
    """The list of all models, as OpenAI's server and llama.cpp's router have it."""
    return {"object": "list", "data": [model_object(slot) for slot in slots]}
