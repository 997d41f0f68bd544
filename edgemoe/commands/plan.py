"""`edgemoe plan`: how a limit would be divided."""

from __future__ import annotations

import json
from functools import partial

from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.shared import JsonOption, StudyOption
from edgemoe.console.printable import printable
from edgemoe.console.sizes import format_least
from edgemoe.console.width import fitted
from edgemoe.models.options.effects import require_several
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

    Also prints the smallest limit that works, and an estimate of the speed on this machine.

    Loads nothing. Of a model that is not converted yet only the headers are read, and nothing is converted.
    """
    from edgemoe.memory.describe import LABEL, plan_lines
    from edgemoe.models.cache import rates_path
    from edgemoe.models.open import open_store
    from edgemoe.models.plans.division import ChooseSettings
    from edgemoe.models.plans.expected import expected_speed
    from edgemoe.speed.rates import kept_rates

    choose: ChooseSettings = partial(run_settings, **with_studies(levels, study))
    require_several(choose(8, fits=True), plan_options.parallel, "--parallel 8")
    store, plan, settings = open_store(Opening(**vars(plan_options)), choose, convert=False)
    rates = kept_rates(rates_path(), "cuda" if store.device else "cpu")
    expected = expected_speed(store, plan, settings, rates)
    if as_json:
        print(json.dumps(plan.as_json() | {"expected": expected.as_json()}))
    else:
        print(
            *(fitted(printable(line), indent=LABEL) for line in plan_lines(plan, settings)),
            *(fitted(line, indent=LABEL) for line in expected.lines()),
            f"{'smallest limit':<{LABEL}}--vram-limit {format_least(plan.minimum_vram_bytes)}",
            sep="\n",
        )
