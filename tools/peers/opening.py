"""Opens edgemoe's store and plans its memory as a request of tools/peers/compare.py says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgemoe.engine.engine import StoreModel
from edgemoe.kernels.registry import select
from edgemoe.kv.formats import KVFormat
from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.cache import kernels_directory
from edgemoe.models.options.run_settings import run_settings
from edgemoe.policy.settings import RunSettings
from tools.peers.together import most_tokens


def opened(request: dict[str, Any]) -> tuple[StoreModel, MemoryPlan, RunSettings]:
    """Opens the store of a request and plans for its prompts and answers; selects its kernel where it names one.

    Raises:
        UserError: the store or the settings are unusable.
        DoesNotFit: the limit is too small.
    """
    if "kernel" in request:
        select(request["kernel"], kernels_directory())
    store = StoreModel.open(Path(request["model"]))
    if request.get("kv_cache"):
        store = store.with_kv(KVFormat(request["kv_cache"], request["kv_cache"]))
    settings = run_settings(store.manifest.max_level, **request["settings"])
    prompts = request["prompts"]
    longest = max(map(len, [*prompts, *request["warm_up"]]))
    plan = store.plan(
        vram_limit=request["vram_limit"],
        settings=settings,
        context=request.get("context") or longest + most_tokens(prompts, request["new_tokens"]),
        parallel=len(prompts),
    )
    return store, plan, settings
