"""Quality next to speed: rows of an evaluation report of the same store, joined by their settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgemoe.errors import UserError
from edgemoe.evaluate.arm import PHASES
from edgemoe.evaluate.rows import CHOICE_FIELDS
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.store.manifest import Manifest

MEASURES = ("perplexity", "kl", "top1_agreement", "task_accuracy", "bits_per_weight_read")

EvaluationRow = dict[str, Any]
"""A row of the JSON of `edgemoe eval`."""


@dataclass(frozen=True)
class Evaluation:
    """A report of `edgemoe eval`.

    Args:
        path: the path of its file.
        rows: the report's rows.
        store: fingerprint of the store's manifest; None: the report names no store.
    """

    path: Path
    rows: list[EvaluationRow]
    store: str | None

    def of(self, manifest: Manifest) -> tuple[list[EvaluationRow], tuple[str, ...]]:
        """The rows, if they are of that store, and sentences for a report where they are left out."""
        if self.store == manifest.fingerprint:
            return self.rows, ()
        other = "of another store" if self.store else "of a store that it does not name"
        note = f"quality is not measured: {self.path.name} is {other}; this is {manifest.fingerprint}"
        return [], (note,)


def load_quality(path: Path) -> Evaluation:
    """Reads a report of `edgemoe eval --json`.

    Raises:
        UserError: the file is missing, or is no such report.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        rows: list[EvaluationRow] = report["rows"]
        for row in rows:
            row["setting"], row["phase"]
        store = report.get("environment", {}).get("store")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"an evaluation report in {path}",
            f"{type(error).__name__}: {error}",
            "write one with `edgemoe eval --json` and give it to --quality",
        ) from error
    return Evaluation(path, rows, store)


def quality_of(rows: Sequence[EvaluationRow], settings: RunSettings) -> dict[str, Any] | None:
    """Returns the measures of a setting: {"setting": evaluated name, phase: {measure: value}}; None: not measured.

    Settings with conservative reuse fall back to the evaluation of the scheduled levels: reuse only adds bits. The
    name says which one it is. Precision by hotness has no scheduled levels to fall back to. Bits that follow a wanted
    time are the run's, which no evaluation has.
    """
    if settings.tpot_target is not None:
        return None
    names = [] if settings.exact else [f"{settings.name} reuse"]
    if not settings.hotness:
        names.append(settings.with_(exact=True).name)
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
    """Returns whether the evaluation chose levels in the same way. One level for all experts is no choice."""
    chosen = {name: getattr(settings, name) for name in CHOICE_FIELDS}
    return len(settings.scheduled) == 1 or {name: row.get(name) for name in chosen} == chosen
