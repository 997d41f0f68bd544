"""Quality beside speed: rows of an evaluation report, joined by the name of their setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgemoe.evaluate.studies import PHASES
from edgemoe.policy.settings import RunSettings
from storage.errors import UserError

MEASURES = ("perplexity", "kl", "top1_agreement", "task_accuracy", "bits_per_weight_read")

EvaluationRow = dict[str, Any]
"""A row of the JSON of `edgemoe eval`."""


def load_quality(path: Path) -> list[EvaluationRow]:
    """Reads the rows of a report of `edgemoe eval --json`.

    Raises:
        UserError: the file is missing, or is no such report.
    """
    try:
        rows: list[EvaluationRow] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for row in rows:
            row["setting"], row["phase"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"an evaluation report in {path}",
            f"{type(error).__name__}: {error}",
            "write one with `edgemoe eval --json` and give it to --quality",
        ) from error
    return rows


def quality_of(rows: Sequence[EvaluationRow], settings: RunSettings) -> dict[str, Any] | None:
    """Returns the measures of a setting: {"setting": evaluated name, phase: {measure: value}}; None: not measured.

    Settings with conservative reuse fall back to the evaluation of the scheduled levels: reuse only adds bits. The
    name says which one it is.
    """
    scheduled = settings.with_(exact=True).name
    for name in [scheduled] if settings.exact else [f"{settings.name} reuse", scheduled]:
        phases = {
            row["phase"]: {measure: row.get(measure) for measure in MEASURES}
            for row in rows
            if row["setting"] == name and row["phase"] in PHASES and _same_choice(row, settings)
        }
        if phases:
            return {"setting": name, **phases}
    return None


def _same_choice(row: EvaluationRow, settings: RunSettings) -> bool:
    """Returns whether the evaluation chose levels by the same signals. One level for all experts is no choice."""
    return len(settings.levels) == 1 or all(
        row.get(name) in (None, getattr(settings, name)) for name in ("importance", "depth")
    )
