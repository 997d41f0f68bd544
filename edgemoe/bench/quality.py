"""Quality beside speed: rows of an evaluation report, by the name of their setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgemoe.policy.settings import RunSettings
from storage.errors import UserError

PHASES = ("prefill", "decode")
MEASURES = ("perplexity", "kl", "top1_agreement", "task_accuracy", "bits_per_weight_read")

EvaluationRow = dict[str, Any]


def load_quality(path: Path) -> list[EvaluationRow]:
    """The rows that `edgemoe eval --json` has printed.

    Raises:
        UserError: the file is missing, or holds no such report.
    """
    try:
        rows: list[EvaluationRow] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for row in rows:
            row["setting"], row["phase"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"an evaluation report was wanted in {path}",
            f"{type(error).__name__}: {error}",
            "Write one with `edgemoe eval --json` and give it to --quality",
        ) from error
    return rows


def quality_of(rows: Sequence[EvaluationRow], settings: RunSettings) -> dict[str, Any] | None:
    """Measures of a setting: {"setting": evaluated name, phase: {measure: value}}; None: not measured.

    Where planes that are there are used (conservative reuse) and only the levels as scheduled were evaluated,
    those stand in: reuse only adds bits. The name tells which it is.
    """
    scheduled = settings.with_(exact=True).name
    names = [scheduled] if settings.exact else [f"{settings.name} reuse", scheduled]
    for name in names:
        phases = {
            row["phase"]: {measure: row.get(measure) for measure in MEASURES}
            for row in rows
            if row["setting"] == name and row["phase"] in PHASES and _same_choice(row, settings)
        }
        if phases:
            return {"setting": name, **phases}
    return None


def _same_choice(row: EvaluationRow, settings: RunSettings) -> bool:
    """Whether the evaluation chose levels by what the benchmark does. One level for all is no choice."""
    return len(settings.levels) == 1 or all(
        row.get(name) in (None, getattr(settings, name)) for name in ("importance", "depth")
    )
