"""Which settings are compared: the table, and the studies behind the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence

from edgemoe.evaluate.arms import PHASES, TABLE, Arm
from edgemoe.policy.settings import DEPTHS, SIGNALS, RunSettings
from storage.errors import UserError

TABLE_LEVELS: tuple[tuple[int, ...], ...] = (
    (8,),
    (4,),
    (2,),
    (4, 2),
    (4, 0),
    (8, 4),
    (8, 4, 2, 0),
)
"""Of the paper's Tables 1 and 2, and what it has not: 8 bits, and four levels at once."""

TABLE_RETENTIONS = (0.75, 0.9, 1.0)

TASK_LEVELS: tuple[tuple[int, ...], ...] = ((8,), (4,), (2,), (4, 2), (4, 0))
TASK_RETENTIONS = (0.75,)
"""Where only tasks are asked, which take longer than a text."""

STUDIED_LEVELS = ((4, 2), (4, 0))
FOUR_LEVELS = (8, 4, 2, 0)
SIGNAL_RETENTIONS = (0.5, 0.75, 0.9)
DEPTH_RETENTION = 0.75
LAYER_RETENTION = 0.5

STUDIES = ("signals", "depth", "layers", "skipping")


def table_arms(levels: Sequence[tuple[int, ...]], retentions: Sequence[float], *, reuse: bool) -> list[Arm]:
    """Every levels at every retention; uniform levels, which have no retention, once.

    `reuse` adds each mixed setting once more, using higher planes where they are resident.
    """
    arms = []
    for each in levels:
        for share in retentions if len(each) > 1 else (1.0,):
            settings = RunSettings(levels=each, retention=share, exact=True)
            arms.append(Arm(settings, PHASES, TABLE))
            if reuse and len(each) > 1:
                arms.append(Arm(settings.with_(exact=False), PHASES, TABLE))
    return arms


def study_arms(study: str, layers: Sequence[int], top: int) -> list[Arm]:
    """The settings of one study.

    - signals: what ranks experts in prefill, at the same ratio (DyMoE figure 3);
    - depth: equal or cosine retention over the layers (DyMoE figure 3, section 3.2);
    - skipping: with and without scaling the other gate weights up where experts are skipped;
    - layers: one layer at a time loses its less important half to 2 bits, or altogether, while all others keep
      `top` bits (DyMoE figure 5).

    Args:
        study: one of STUDIES.
        layers: that have experts.
        top: highest level of the store.

    Raises:
        UserError: no such study.
    """
    if study == "signals":
        return [
            Arm(
                RunSettings(levels=levels, retention=share, exact=True, importance=signal),
                ("prefill",),
                study,
            )
            for levels in STUDIED_LEVELS
            for share in SIGNAL_RETENTIONS
            for signal in SIGNALS
        ]
    if study == "depth":
        return [
            Arm(RunSettings(levels=levels, retention=DEPTH_RETENTION, exact=True, depth=depth), PHASES, study)
            for levels in (*STUDIED_LEVELS, FOUR_LEVELS)
            for depth in DEPTHS
        ]
    if study == "skipping":
        return [
            Arm(
                RunSettings(levels=levels, retention=DEPTH_RETENTION, exact=True, renormalise=scaled),
                PHASES,
                study,
            )
            for levels in ((4, 0), FOUR_LEVELS)
            for scaled in (False, True)
        ]
    if study == "layers":
        half = RunSettings(levels=(top,), retention=LAYER_RETENTION, exact=True, depth="equal")
        return [
            Arm(half.with_(levels=(top, low), only_layer=layer), ("prefill",), study)
            for low in (2, 0)
            for layer in layers
        ]
    raise UserError("a study was wanted", f"got {study!r}", f"Choose one of {', '.join(STUDIES)}")
