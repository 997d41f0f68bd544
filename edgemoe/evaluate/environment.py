"""Conditions of an evaluation, and the facts about program and model that reports of speed have too."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from edgemoe import __version__
from edgemoe.engine.engine import StoreModel
from edgemoe.evaluate.request import EvalRequest
from edgemoe.evaluate.score import Windows


def program_and_model(store: StoreModel) -> dict[str, Any]:
    """Returns versions, and what the store was made of."""
    return {
        "edgemoe": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": store.directory.name,
        "source": store.manifest.source,
        "store": store.manifest.fingerprint,
        "codes": str(store.manifest.codes) if store.manifest.codes else None,
        "dense_bits": store.manifest.dense_bits,
        "head_bits": 16 if store.manifest.dense_bits == 16 else store.manifest.head_bits,
        "dense_choice": str(store.manifest.dense_choice) if store.manifest.dense_choice else None,
        "kv_cache": str(store.shape.kv.format),
    }


def conditions(store: StoreModel, request: EvalRequest, windows: Windows) -> dict[str, Any]:
    """Returns the environment of a report. Sizes in bytes."""
    return program_and_model(store) | {
        "reference": request.reference.name if request.reference else None,
        "text": request.text.name if request.text else None,
        "tokens": sum(map(len, windows)),
        "window": request.window,
        "windows": len(windows),
        "task_count": request.task_count,
        "seed": request.seed,
        "vram_limit_bytes": request.vram_limit,
        "dram_limit_bytes": request.dram_limit,
    }
