"""One row of the table: a setting in one phase, and how good and how large it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from edgemoe.evaluate.accuracy import mean_accuracy
from edgemoe.evaluate.arms import TABLE, Arm, Phase
from edgemoe.evaluate.metrics import Quality
from edgemoe.experts.use import ExpertUse, fraction_at, mean_bits
from edgemoe.policy.settings import format_levels

BF16 = "bf16"
"""Name of the reference's row."""


@dataclass(frozen=True)
class EvalRow:
    """Field names are the JSON's. None: not measured, or the reference has none."""

    setting: str
    phase: Phase
    """Which policy chose the levels. Tasks are answered with both, so both rows of a setting have the same accuracy."""
    levels: str
    retention: float | None
    effective_retention: float | None
    """Share at the highest level: of experts in prefill, of (token, slot) pairs in decode."""
    perplexity: float | None
    kl: float | None
    """Mean KL(bf16 || setting) a token, in nats."""
    kl_stderr: float | None
    """Standard error of kl over the text's tokens."""
    top1_agreement: float | None
    task_accuracy: float | None
    """Mean over kinds of the share of turns answered right."""
    bits_per_weight_read: float | None
    """Mean over experts in prefill, where one is read once for all tokens; over (token, slot) pairs in decode.

    Of what was computed from: with reuse that is more than was asked for.
    """
    tokens: int
    """Predicted tokens that perplexity is over."""
    task_accuracy_by_kind: dict[str, float] | None
    importance: str | None
    heavy_hitters: float | None
    depth: str | None
    renormalise: bool | None
    layer: int | None
    """The only layer that is scheduled; None: all."""
    exact: bool
    """False where more bits than scheduled are used if they are resident (conservative reuse)."""
    study: str
    """table, or the study that the row belongs to."""

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self)


def with_accuracy(row: EvalRow, by_kind: Mapping[str, float] | None) -> EvalRow:
    """The row with the tasks' accuracy filled in; unchanged for None."""
    if by_kind is None:
        return row
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    return EvalRow(
        **values | {"task_accuracy": mean_accuracy(by_kind), "task_accuracy_by_kind": dict(by_kind)}
    )


def reference_row(quality: Quality | None) -> EvalRow:
    """The bf16 model's: the same in both phases, as it has no levels to choose."""
    return EvalRow(
        setting=BF16,
        phase="prefill",
        levels=BF16,
        retention=None,
        effective_retention=None,
        perplexity=quality.perplexity if quality else None,
        kl=quality.kl if quality else None,
        kl_stderr=quality.kl_stderr if quality else None,
        top1_agreement=quality.top1_agreement if quality else None,
        task_accuracy=None,
        bits_per_weight_read=16.0,
        tokens=quality.tokens if quality else 0,
        task_accuracy_by_kind=None,
        importance=None,
        heavy_hitters=None,
        depth=None,
        renormalise=None,
        layer=None,
        exact=True,
        study=TABLE,
    )


def setting_row(arm: Arm, phase: Phase, quality: Quality | None, use: ExpertUse) -> EvalRow:
    """A setting's, from what was measured and what was used for it."""
    settings = arm.settings
    counts = use.scheduled if phase == "decode" and settings.exact else use.experts
    return EvalRow(
        setting=arm.name,
        phase=phase,
        levels=format_levels(settings.levels),
        retention=settings.retention,
        effective_retention=fraction_at(counts, settings.levels[0]),
        perplexity=quality.perplexity if quality else None,
        kl=quality.kl if quality else None,
        kl_stderr=quality.kl_stderr if quality else None,
        top1_agreement=quality.top1_agreement if quality else None,
        task_accuracy=None,
        bits_per_weight_read=mean_bits(counts),
        tokens=quality.tokens if quality else 0,
        task_accuracy_by_kind=None,
        importance=settings.importance,
        heavy_hitters=settings.heavy_hitters,
        depth=settings.depth,
        renormalise=settings.renormalise,
        layer=settings.only_layer,
        exact=settings.exact,
        study=arm.study,
    )
