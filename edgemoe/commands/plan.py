"""`edgemoe plan`: how a limit would be divided."""

from __future__ import annotations

import json
from functools import partial

from edgemoe.commands.options import (
    DEMO,
    ContextOption,
    DeviceOption,
    DramOption,
    ExactOption,
    JsonOption,
    LevelsOption,
    ModelOption,
    RetentionOption,
    VramOption,
    run_settings,
)


def plan_command(
    model: ModelOption = DEMO,
    vram_limit: VramOption = None,
    dram_limit: DramOption = None,
    device: DeviceOption = "auto",
    exact: ExactOption = None,
    levels: LevelsOption = None,
    retention: RetentionOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a limit would be divided, and the smallest that works. Loads nothing."""
    from edgemoe.models.open import open_store

    choose = partial(run_settings, exact=exact, levels=levels, retention=retention)
    _, plan, _ = open_store(
        model, choose, vram_limit=vram_limit, dram_limit=dram_limit, device=device, context=context
    )
    if as_json:
        print(json.dumps(plan.as_json()))
    else:
        print(*plan.lines(), f"smallest limit that works: {plan.minimum_vram_bytes} bytes", sep="\n")
