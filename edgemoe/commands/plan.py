"""`edgemoe plan`: how a limit would be divided."""

from __future__ import annotations

import json
from functools import partial

from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.shared import JsonOption, StudyOption
from edgemoe.console.printable import printable
from edgemoe.console.sizes import format_least
from edgemoe.console.width import fitted
from edgemoe.models.options.groups import Opening, PlanOptions
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.options.settings import LevelOptions
from edgemoe.models.options.study import with_studies


@grouped
def plan_command(
    *,
    plan_options: PlanOptions,
    levels: LevelOptions,
    study: StudyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a memory limit is divided.

    Also prints the smallest limit that works.

    Loads nothing. Of a model that is not converted yet only the headers are read, and nothing is converted.
    """
    from edgemoe.memory.describe import LABEL, plan_lines
    from edgemoe.models.open import open_store

    choose = partial(run_settings, **with_studies(levels, study))
    _, plan, settings = open_store(Opening(**vars(plan_options)), choose, convert=False)
    if as_json:
        print(json.dumps(plan.as_json()))
    else:
        print(
            *(fitted(printable(line), indent=LABEL) for line in plan_lines(plan, settings)),
            f"{'smallest limit':<{LABEL}}--vram-limit {format_least(plan.minimum_vram_bytes)}",
            sep="\n",
        )
