"""The report for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgemoe.evaluate.arms import TABLE
from edgemoe.evaluate.claims import Claim
from edgemoe.evaluate.rows import EvalRow
from edgemoe.evaluate.studies import STUDIES

_Cell = Callable[[EvalRow], str]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_SETTING: tuple[tuple[str, _Cell], ...] = (
    ("setting", lambda row: row.setting),
    ("phase", lambda row: row.phase),
)

_QUALITY: tuple[tuple[str, _Cell], ...] = (
    ("perplexity", lambda row: _number(row.perplexity, ".3f")),
    ("KL", lambda row: _number(row.kl, ".5f")),
    ("+-", lambda row: _number(row.kl_stderr, ".5f")),
    ("top-1", lambda row: _number(row.top1_agreement, ".4f")),
    ("bits read", lambda row: _number(row.bits_per_weight_read, ".2f")),
    ("share high", lambda row: _number(row.effective_retention, ".3f")),
)

_COLUMNS: dict[str, tuple[tuple[str, _Cell], ...]] = {
    TABLE: (*_QUALITY, ("tasks", lambda row: _number(row.task_accuracy, ".3f"))),
    "signals": (("signal", lambda row: row.importance or "-"), *_QUALITY),
    "depth": (("depth", lambda row: row.depth or "-"), *_QUALITY),
    "layers": (("layer", lambda row: _number(row.layer, "d")), *_QUALITY),
}


def quality_lines(rows: Sequence[EvalRow]) -> list[str]:
    """One table of the rows that have a perplexity for TABLE and for each study."""
    lines: list[str] = []
    for study in (TABLE, *STUDIES):
        if chosen := [row for row in rows if row.study == study and row.perplexity is not None]:
            columns = _SETTING + _COLUMNS[study]
            title = [] if study == TABLE else ["", f"study: {study}"]
            body = [[cell(row) for _, cell in columns] for row in chosen]
            lines += title + _aligned([[name for name, _ in columns], *body], left=2)
    return lines


def task_lines(rows: Sequence[EvalRow]) -> list[str]:
    """Accuracy by kind of task, one column a setting."""
    by_setting = {row.setting: row for row in rows if row.task_accuracy_by_kind is not None}
    if not by_setting:
        return []
    columns = list(by_setting.values())
    kinds = columns[0].task_accuracy_by_kind or {}
    body = [[kind, *(f"{(row.task_accuracy_by_kind or {})[kind]:.3f}" for row in columns)] for kind in kinds]
    mean = ["all kinds", *(_number(row.task_accuracy, ".3f") for row in columns)]
    return _aligned([["task", *by_setting], *body, mean], left=1)


def claim_lines(claims: Sequence[Claim]) -> list[str]:
    """What the paper says, and whether it is so here."""
    return [f"{_VERDICTS[c.holds]}: {c.claim}: {c.figures}" for c in claims]


_VERDICTS = {True: "holds", False: "DOES NOT HOLD", None: "no difference beyond noise"}


def _aligned(cells: list[list[str]], left: int) -> list[str]:
    """Cells in columns, the first `left` of them flush left."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
