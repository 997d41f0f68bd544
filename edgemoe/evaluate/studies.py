"""The settings that are measured: the table, and the studies of the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from edgemoe.errors import UserError
from edgemoe.evaluate.arm import COMPENSATION, PHASES, TABLE, Arm, Made, Phase
from edgemoe.evaluate.cache_front import DRAM, front_arms
from edgemoe.evaluate.lynx.arms import (
    FOUR_LEVELS,
    MOST_RANKS,
    lynx_arms,
    residency_arms,
    sensitivity_arms,
    task_arms,
)
from edgemoe.evaluate.static_levels import static_arms
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.hotness import Hotness
from edgemoe.policy.importance import needs_attention
from edgemoe.policy.settings import CRITICAL, DEPTHS, SIGNALS, RunSettings

DOMAINS = ("hotness", "hotness-change")
"""Studies of precision by hotness with several texts, and with one text after another."""

OBSERVED = ("layers", "routing", "similarity", *DOMAINS)
"""Studies of the bf16 model with one layer lowered, of what routers choose and see (DyMoE figures 5, 4 and 6), and of
several texts."""

PAPERS_TABLE = "papers-table"
"""The study of TABLE_LEVELS at TABLE_RETENTIONS."""

STUDIES = (
    PAPERS_TABLE,
    *("signals", "depth", "critical", "skipping", "lynx", "lynx-sensitivity", "lynx-tasks", "residency"),
    *("cache-front", "cache-front-dram", "static-levels"),
    *(COMPENSATION, *OBSERVED),
)


SHORT_LEVELS: tuple[tuple[int, ...], ...] = ((8,), (4,), (4, 2), FOUR_LEVELS)
"""Levels that are measured where none are named."""

TABLE_LEVELS: tuple[tuple[int, ...], ...] = ((8,), (4,), (2,), (4, 2), (4, 0), (8, 4), FOUR_LEVELS)
"""Levels of the paper's Tables 1 and 2, then 8 bits and four levels at once, which the paper does not have."""

SHORT_RETENTIONS = (0.9,)
TABLE_RETENTIONS = (0.75, 0.9, 1.0)

STUDIED_LEVELS = ((4, 2), (4, 0))
SIGNAL_RETENTIONS = (0.5, 0.75, 0.9)
SIGNAL_SHARES = (0.05, 0.1, 0.2, 0.5)
"""Fractions of heavy hitters, for signals that count them."""

COMPENSATORS = sorted(
    product((2, 4), (8, 16, 32), ("uniform", "kurtosis", "error")), key=(2, 16, "uniform").__ne__
)
"""(base level, mean rank, rule) of the study of compensators; of the first, all counts and the first places alone."""

COMPENSATED_PLACES, COMPENSATED_COUNTS = 4, (1, 4, 8)

DEPTH_RETENTION = 0.75
CRITICAL_RETENTIONS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.9)

LOWERED = 2
"""Level of the one layer that the study of layers lowers."""


def table_arms(
    levels: Sequence[tuple[int, ...]],
    retentions: Sequence[float],
    ranking: Mapping[str, Any] | None = None,
    bits: Sequence[float] = (),
    *,
    reuse: bool,
) -> list[Arm]:
    """Returns the arms of the table: mixed levels at every retention, uniform levels once.

    Args:
        levels: bits per expert, high to low, of each setting.
        retentions: mean fraction of critical experts, above 0, at most 1.
        ranking: other fields of the settings that rank experts; None: their defaults.
        bits: mean bits per weight of settings of three or more levels, in place of retentions.
        reuse: adds each mixed setting once more, with resident planes above the scheduled level used.
    """
    arms = []
    for each in levels:
        varied: list[dict[str, Any]] = [{"retention": r} for r in (retentions if len(each) > 1 else (1.0,))]
        if bits and len(each) > 2:
            varied = [{"bits": wanted} for wanted in bits]
        for changes in varied:
            settings = RunSettings(levels=each, exact=True, **changes, **ranking or {})
            arms.append(Arm(settings, PHASES, TABLE))
            if reuse and len(each) > 1:
                arms.append(Arm(settings.with_(exact=False), PHASES, TABLE))
    return arms


def hot_arms(arms: Sequence[Arm], hotness: Hotness) -> list[Arm]:
    """Returns the arms of a table with precision by hotness in the place of two levels by rank, in decode only.

    Raises:
        UserError: no arm has two levels above 0.
    """
    changed: dict[str, Arm] = {}
    for given in arms:
        arm, levels = given, given.settings.levels
        if len(levels) == 2 and 0 not in levels:
            settings = RunSettings(levels=levels, hotness=replace(hotness, settled=True))
            arm = Arm(settings, ("decode",), given.study)
        changed[arm.name] = arm
    if not any(arm.settings.hotness for arm in changed.values()):
        raise UserError(
            "two levels above 0, for --policy hotness", ", ".join(changed), "give --levels 4/2 with it"
        )
    return list(changed.values())


def batched_arms(arms: Sequence[Arm], batches: Sequence[int]) -> list[Arm]:
    """Returns each arm once for each number of windows that are decoded together, in decode only."""
    return [replace(arm, batch=batch, phases=("decode",)) for arm in arms for batch in batches]


def study_arms(study: str, batches: Sequence[int] = ()) -> list[Arm]:
    """Returns the arms of one study; of `lynx` at these batches, or at LYNX_BATCHES where none are given.

    - papers-table: none of its own, since the table is measured with its levels;
    - signals: what ranks experts in prefill, at the same ratio (DyMoE figure 3), with every fraction of heavy hitters;
    - depth: equal or cosine retention over the layers (DyMoE figure 3, section 3.2);
    - critical: the number of critical experts rounded up, or down with the rest carried to the next layer;
    - skipping: with and without scaling the other gate weights up where experts are skipped;
    - lynx: experts that the tokens of a batch agree on (Lynx's figures 11 and 14), at 4 bits;
    - lynx-sensitivity: one quarter of the tokens by confidence, bin, rank or sixth of the depth alone may
      change, or one phase (Lynx's figures 5 to 9);
    - lynx-tasks: chat tasks answered several at once, with agreement and without, by batch (Lynx's figure 10),
      and by alpha and beta;
    - compensation: low-rank compensators of a part of a token's experts, by count, place, rank, rule and base level;
    - static-levels: one level for each expert, or layer, whatever the token, by damage or by load;
    - residency: resident experts first, at batch 1 with a cache of CACHE, next to levels by damage;
    - cache-front: uses of a miss next to levels by damage, at batch 1 with caches of CACHES;
    - cache-front-dram: the same with a second tier.

    A study of OBSERVED has none: it does not run settings.

    Raises:
        UserError: the study is unknown.
    """
    if study not in STUDIES:
        raise UserError(f"one of {', '.join(STUDIES)} for --study", repr(study), "choose one of them")
    if study == "lynx" and batches:
        return lynx_arms(batches)
    return _ARMS[study]() if study in _ARMS else []


def _varied(
    study: str,
    settings: Iterable[tuple[tuple[int, ...], dict[str, Any]]],
    phases: tuple[Phase, ...] = PHASES,
) -> list[Arm]:
    """Returns arms with these levels and fields, at the studies' retention unless a field sets it."""
    base = RunSettings(retention=DEPTH_RETENTION, exact=True)
    return [Arm(base.with_(levels=levels, **changes), phases, study) for levels, changes in settings]


def _signals() -> list[Arm]:
    ranked = [
        {"importance": signal, "heavy_hitters": share}
        for signal in SIGNALS
        for share in (SIGNAL_SHARES if needs_attention(signal) else SIGNAL_SHARES[-1:])
    ]
    varied = product(STUDIED_LEVELS, SIGNAL_RETENTIONS, ranked)
    return _varied("signals", [(levels, {"retention": r, **how}) for levels, r, how in varied], ("prefill",))


def _depth() -> list[Arm]:
    return _varied("depth", [(levels, {"depth": depth}) for levels in STUDIED_LEVELS for depth in DEPTHS])


def _critical() -> list[Arm]:
    varied = product(STUDIED_LEVELS, CRITICAL_RETENTIONS, CRITICAL)
    rounded = [(levels, {"retention": r, "critical": how}) for levels, r, how in varied]
    return _varied("critical", rounded, ("decode",))


def _skipping() -> list[Arm]:
    varied = product(((4, 0), FOUR_LEVELS), (False, True))
    return _varied("skipping", [(levels, {"renormalise": scale}) for levels, scale in varied])


def _compensation() -> list[Arm]:
    """Arms, ordered by their compensators; counts that a model's tokens do not have are left out."""
    plain = [Arm(RunSettings.uniform(level), PHASES, COMPENSATION) for level in (2, 4)]
    chosen = [Compensation(n) for n in range(1, MOST_RANKS + 1)]
    chosen += [Compensation(1, first) for first in range(1, COMPENSATED_PLACES)]
    middle, *others = (Made(rank, rule, level) for level, rank, rule in COMPENSATORS)
    arms = [
        Arm(RunSettings.uniform(2, compensation=each), PHASES, COMPENSATION, compensators=middle)
        for each in chosen
    ]
    for made, n in product(others, COMPENSATED_COUNTS):
        settings = RunSettings.uniform(made.base_level, compensation=Compensation(n))
        arms.append(Arm(settings, ("decode",), COMPENSATION, compensators=made))
    return plain + arms


_ARMS: dict[str, Callable[[], list[Arm]]] = {
    "signals": _signals,
    "depth": _depth,
    "critical": _critical,
    "skipping": _skipping,
    "lynx": lynx_arms,
    "lynx-sensitivity": sensitivity_arms,
    "lynx-tasks": task_arms,
    "residency": residency_arms,
    "cache-front": partial(front_arms, "cache-front", 0.0),
    "cache-front-dram": partial(front_arms, "cache-front-dram", DRAM),
    "static-levels": static_arms,
    COMPENSATION: _compensation,
}
