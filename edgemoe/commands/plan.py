"""`edgemoe plan`: how a limit would be divided."""

from __future__ import annotations

import json
from functools import partial

from edgemoe.commands import options
from edgemoe.commands.options.groups import grouped
from edgemoe.console.printable import printable
from edgemoe.console.sizes import format_least
from edgemoe.console.width import fitted


@grouped
def plan_command(
    *,
    model: options.ModelOption = options.DEMO,
    limits: options.LimitOptions,
    kv: options.KVOptions,
    levels: options.LevelOptions,
    context: options.ContextOption = None,
    prefill_rows: options.PrefillRowsOption = None,
    parallel: options.ParallelOption = 1,
    as_json: options.JsonOption = False,
) -> None:
    """Show how a limit would be divided, and the smallest that works.

    Loads nothing. Of a model that is not converted yet only the headers are read, and nothing is converted.
    """
    from edgemoe.models.open import open_store

    choose = partial(options.run_settings, **vars(levels))
    _, plan, settings = open_store(
        model,
        choose,
        context=context,
        parallel=parallel,
        prefill_rows=prefill_rows,
        convert=False,
        **vars(limits),
        **vars(kv),
    )
    if as_json:
        print(json.dumps(plan.as_json()))
    else:
        print(
            *options.describe_levels(levels, settings),
            *(fitted(printable(line)) for line in plan.lines()),
            f"smallest limit that works: --vram-limit {format_least(plan.minimum_vram_bytes)}",
            sep="\n",
        )
