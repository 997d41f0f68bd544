"""Engines for the settings of an evaluation: one for each plan."""

from __future__ import annotations

from itertools import groupby

from edgemoe.console.progress import CountProgress
from edgemoe.console.width import say
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.evaluate.arm import Arm
from edgemoe.evaluate.arm_rows import ArmRows
from edgemoe.evaluate.compensation.arms import equal_arms
from edgemoe.evaluate.compensation.making import compensated
from edgemoe.evaluate.observations import Observations, observe
from edgemoe.evaluate.request import EvalRequest
from edgemoe.evaluate.rows import EvalRow
from edgemoe.evaluate.score import Windows
from edgemoe.evaluate.table import finding
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings


class SettingsRuns:
    """Runs the settings of each plan through an engine of its own.

    Args:
        store: the store of the model.
        request: the request, with the reference and the studies.
        arm_rows: measures each setting.

    Attributes:
        damage: the text on which the damage of fewer bits was measured; None where no setting needs it.
    """

    def __init__(self, store: StoreModel, request: EvalRequest, arm_rows: ArmRows) -> None:
        self._store, self._request, self._measured = store, request, arm_rows
        self.damage: str | None = None

    def run(self, plan: MemoryPlan, arms: list[Arm]) -> list[EvalRow]:
        """Returns a row for every arm and phase."""
        rows: list[EvalRow] = []
        settings = RunSettings.uniform(plan.levels[0])
        if arms and arms[0].settings.hotness:
            settings = arms[0].settings.with_(compensation=None)
        with Engine(self._store, plan, settings) as engine:
            if any(_goes_by_damage(arm) for arm in arms):
                engine.require_damage()  # while no sequence has its memory
                self.damage = engine.rules.damage.origin if engine.rules.damage else None
            for made, some in groupby(enumerate(arms, 1), key=lambda numbered: numbered[1].compensators):
                with compensated(engine, self._request.reference, made):
                    for number, arm in some:
                        found = self._measured.rows(engine, arm, f"{arm.name} ({number} of {len(arms)})")
                        rows += found
                        for row in found:
                            say(finding(row))
            for arm in equal_arms(rows, plan.levels[0]):
                rows += self._measured.rows(engine, arm, arm.name)
        return rows

    def observe(self, plan: MemoryPlan, windows: Windows) -> Observations | None:
        """Returns what routers choose and see, where a study wants it."""
        if not {"routing", "similarity"} & set(self._request.observed):
            return None
        with (
            Engine(self._store, plan, RunSettings.uniform(plan.levels[0])) as engine,
            CountProgress("routers: text", len(windows)) as progress,
        ):
            return observe(engine, engine.sequences.new(), windows, progress.advance)


def _goes_by_damage(arm: Arm) -> bool:
    """Whether an arm's levels, or the levels that it is compared with, depend on the damage of fewer bits."""
    static = arm.variation is not None and arm.variation.static is not None
    return arm.settings.priced or static or (arm.compensators is not None and not arm.settings.hotness)
