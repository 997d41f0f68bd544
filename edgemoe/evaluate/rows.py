"""One row of the report: a setting in one phase, its quality and the bits that it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgemoe.evaluate.arm import TABLE, Arm, Phase
from edgemoe.evaluate.metrics import Quality
from edgemoe.evaluate.studies import LOWERED
from edgemoe.experts.use import ExpertUse, fraction_at
from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.policy.settings import format_levels

BF16 = "bf16"
"""Name of the reference's row."""

CHOICE_FIELDS = ("rule", "importance", "heavy_hitters", "depth", "critical", "renormalise")
"""Fields of RunSettings, besides levels and retention, on which quality depends; reports name them the same."""


@dataclass(frozen=True)
class EvalRow:
    """Field names are the JSON's. None: not measured, or undefined for the reference."""

    setting: str
    phase: Phase
    """Policy that chose the levels. Tasks use both phases, so both rows of a setting have the same accuracy."""
    levels: str
    retention: float | None = None
    """None where bits are given."""
    bits: float | None = None
    """Mean bits per weight that levels were to have by damage; None: by retention."""
    effective_retention: float | None = None
    """Fraction at the highest level: of experts in prefill, of (token, slot) pairs in decode."""
    perplexity: float | None = None
    kl: float | None = None
    """Mean KL(bf16 || setting) per token, in nats."""
    kl_stderr: float | None = None
    """Standard error of kl over the text's tokens."""
    top1_agreement: float | None = None
    task_accuracy: float | None = None
    """Mean over kinds of the fraction of turns answered right."""
    bits_per_weight_read: float | None = None
    """Mean over experts in prefill, where one is read once for all tokens; over (token, slot) pairs in decode.

    Counts the level computed at: with reuse, more than the scheduled one; and the compensators that were used.
    """
    tokens: int = 0
    """Predicted tokens that perplexity is over."""
    task_accuracy_by_kind: dict[str, float] | None = None
    rule: str | None = None
    """What decided the levels where an option says so."""
    importance: str | None = None
    heavy_hitters: float | None = None
    depth: str | None = None
    critical: str | None = None
    renormalise: bool | None = None
    layer: int | None = None
    """The only layer that is lowered, in the study of layers."""
    batch: int = 1
    """Windows that were decoded together."""
    active: float | None = None
    """With --lynx, distinct experts that steps used, as a fraction of the experts that their tokens chose alone."""
    remapped: int | None = None
    """With --lynx, (token, expert) pairs that the token did not choose by itself."""
    variation: str | None = None
    """The choice that a study made in the routers' place, by a rule that no option has (studies.Variation)."""
    compensated: int | None = None
    """Experts of a token that were compensated at most; None: without compensators."""
    compensated_first: int | None = None
    """Likelier experts of a token before them, which were not."""
    made: str | None = None
    """Compensators that the study of compensation has made: mean rank and the rule of ranks."""
    kl_over_base: float | None = None
    """KL as a fraction of the base level's KL without compensators, or of level 2's."""
    kl_less_per_bit: float | None = None
    """Reduction of KL, in nats, from that base for each additional bit per weight that is read."""
    cache: float | None = None
    """Fraction of all experts' bytes at 4 bits that were in memory at most; None: as the limits say."""
    bytes_per_token: float | None = None
    """With a cache, bytes read from disk for a new token, mean from the second window on."""
    dram: float | None = None
    """With a cache, the same fraction of the second tier; None: there is none."""
    bits_from_disk: float | None = None
    """With a cache, bits per weight of a chosen expert that were read from disk, mean from the second window on."""
    bits_from_dram: float | None = None
    """With a cache, bits per weight of a chosen expert that were read from the second tier, mean likewise."""
    bits_scheduled: float | None = None
    """With a cache, mean bits per weight of the scheduled levels."""
    skipped: float | None = None
    """With a cache, fraction of chosen experts that were skipped."""
    turns: int | None = None
    """Turns of chat tasks that are compared for `won` and `lost`."""
    won: int | None = None
    """Turns that are right here and wrong in the study's first row."""
    lost: int | None = None
    """Turns that are wrong here and right in the study's first row."""
    hot_experts: int | None = None
    """Experts that may have the higher level at once where precision follows hotness, as `edgemoe plan` says."""
    demoted: int | None = None
    """Experts that lost the higher level to others while the text ran, where precision follows hotness."""
    exact: bool = True
    """False where resident planes above the scheduled level are used (conservative reuse)."""
    study: str = TABLE
    """table, or the study that the row belongs to."""


def with_accuracy(row: EvalRow, by_kind: Mapping[str, float] | None) -> EvalRow:
    """Returns the row with the tasks' accuracy filled in, each kind with the same weight; unchanged for None."""
    if by_kind is None:
        return row
    mean = sum(by_kind.values()) / len(by_kind)
    return replace(row, task_accuracy=mean, task_accuracy_by_kind=dict(by_kind))


def with_pairs(row: EvalRow, right: Sequence[bool], first: Sequence[bool]) -> EvalRow:
    """Returns the row with its turns compared, one by one, with the turns of the study's first row."""
    pairs = list(zip(right, first, strict=True))
    won, lost = (sum(pair == kind for pair in pairs) for kind in ((True, False), (False, True)))
    return replace(row, turns=len(pairs), won=won, lost=lost)


def gain(row: EvalRow) -> tuple[float, float]:
    """The change of the fraction of right turns of a row of with_pairs, and its standard error over the turns."""
    turns, won, lost = row.turns or 0, row.won or 0, row.lost or 0
    mean = (won - lost) / turns
    return mean, math.sqrt(((won + lost) / turns - mean**2) / turns)


def reference_row(quality: Quality | None) -> EvalRow:
    """Returns the row of the bf16 model: one for both phases, because it has no levels to choose."""
    return EvalRow(BF16, "prefill", BF16, bits_per_weight_read=16.0, **_measures(quality))


def lowered_row(layer: int, layers: int, quality: Quality) -> EvalRow:
    """Returns the row of the bf16 model whose experts in one of `layers` layers are at LOWERED bits."""
    bits = (16 * (layers - 1) + BITS_PER_WEIGHT[LOWERED]) / layers
    setting, levels = f"{BF16}, layer {layer} at {LOWERED}", f"{BF16}/{LOWERED}"
    return EvalRow(
        *(setting, "prefill", levels),
        bits_per_weight_read=bits,
        layer=layer,
        study="layers",
        **_measures(quality),
    )


def setting_row(arm: Arm, phase: Phase, quality: Quality | None, use: ExpertUse) -> EvalRow:
    """Returns the row of a setting in one phase.

    Args:
        arm: the setting.
        phase: one of its phases.
        quality: the quality on the text; None without one.
        use: levels that its experts were scheduled and computed at.
    """
    settings = arm.settings
    chosen = settings.compensation
    scheduled = phase == "decode" and settings.exact
    counts = use.scheduled if scheduled else use.experts
    return EvalRow(
        setting=arm.name,
        phase=phase,
        levels=format_levels(settings.levels),
        retention=settings.retention if settings.bits is None and not settings.hotness else None,
        bits=settings.bits,
        effective_retention=fraction_at(counts, settings.levels[0]),
        bits_per_weight_read=use.bits_scheduled if scheduled else use.bits_computed,
        batch=arm.batch,
        active=use.active / use.active_before if use.active_before else None,
        remapped=use.remapped if use.active_before else None,
        variation=arm.variation.name if arm.variation else None,
        compensated=chosen.count if chosen else None,
        compensated_first=chosen.first if chosen else None,
        made=str(arm.compensators) if arm.compensators else None,
        cache=arm.cache or None,
        dram=arm.dram or None,
        exact=settings.exact,
        study=arm.study,
        **{name: getattr(settings, name) for name in CHOICE_FIELDS},
        **_measures(quality),
    )


def _measures(quality: Quality | None) -> dict[str, Any]:
    """Fields of Quality are fields of EvalRow."""
    return asdict(quality) if quality else {}
