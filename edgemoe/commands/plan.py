"""`edgemoe plan`: how a limit would be divided."""

from __future__ import annotations

import json
from functools import partial

from edgemoe.commands import options


def plan_command(
    model: options.ModelOption = options.DEMO,
    vram_limit: options.VramOption = None,
    dram_limit: options.DramOption = None,
    device: options.DeviceOption = "auto",
    exact: options.ExactOption = None,
    levels: options.LevelsOption = None,
    retention: options.RetentionOption = None,
    context: options.ContextOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show how a limit would be divided, and the smallest that works. Loads nothing."""
    from edgemoe.models.open import open_store

    choose = partial(options.run_settings, exact=exact, levels=levels, retention=retention)
    _, plan, _ = open_store(
        model, choose, vram_limit=vram_limit, dram_limit=dram_limit, device=device, context=context
    )
    if as_json:
        print(json.dumps(plan.as_json()))
    else:
        print(*plan.lines(), f"smallest limit that works: {plan.minimum_vram_bytes} bytes", sep="\n")
