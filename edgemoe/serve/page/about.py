"""The model of a server and how it runs, for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import edgemoe
from edgemoe.memory.describe import plan_parts
from edgemoe.serve.serving import Serving


def about(serving: Serving) -> dict[str, Any]:
    """Describes the model, the parts of its memory and its settings.

    Returns:
        `model`, `family`, `device`, counts, `plan`: pairs of a part's name and its text, and `settings`: the fields of
        RunSettings.

    Raises:
        ApiError: the model is not open yet.
    """
    engine = serving.require().engine
    shape, plan = engine.shape, engine.plan
    return {
        "version": edgemoe.__version__,
        "model": serving.name,
        "family": engine.store.config["model_type"],
        "device": engine.device.name if engine.device else "CPU",
        "layers": shape.layers,
        "experts_per_layer": shape.experts_per_layer,
        "experts_per_token": shape.top_k,
        "vocabulary": shape.vocab,
        "context": plan.context,
        "parallel": plan.parallel,
        "plan": plan_parts(plan, engine.settings),
        "settings": asdict(engine.settings),
    }
