"""The report as text: tables of quality and of tasks, and the verdicts on the claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgemoe.evaluate.claims import Claim
from edgemoe.evaluate.rows import EvalRow
from edgemoe.evaluate.studies import STUDIES, TABLE, signal_name

_Column = tuple[str, Callable[[EvalRow], str]]
"""Title, and the text of a row's cell."""


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_SETTING: list[_Column] = [("setting", lambda row: row.setting), ("phase", lambda row: row.phase)]

_QUALITY: list[_Column] = [
    ("perplexity", lambda row: _number(row.perplexity, ".3f")),
    ("KL", lambda row: _number(row.kl, ".5f")),
    ("+-", lambda row: _number(row.kl_stderr, ".5f")),
    ("top-1", lambda row: _number(row.top1_agreement, ".4f")),
    ("bits read", lambda row: _number(row.bits_per_weight_read, ".2f")),
    ("share high", lambda row: _number(row.effective_retention, ".3f")),
]

_COLUMNS: dict[str, list[_Column]] = {
    TABLE: [*_QUALITY, ("tasks", lambda row: _number(row.task_accuracy, ".3f"))],
    "signals": [
        ("signal", lambda row: signal_name(row.importance or "-", row.heavy_hitters or 0)),
        *_QUALITY,
    ],
    "depth": [("depth", lambda row: row.depth or "-"), *_QUALITY],
    "critical": [("critical", lambda row: row.critical or "-"), *_QUALITY],
    "layers": [("layer", lambda row: _number(row.layer, "d")), *_QUALITY],
    "skipping": [("others", lambda row: "scaled" if row.renormalise else "unscaled"), *_QUALITY],
}

_VERDICTS = {True: "holds", False: "DOES NOT HOLD", None: "no difference beyond noise"}


def quality_lines(rows: Sequence[EvalRow]) -> list[str]:
    """Returns the lines of one table for TABLE and for each study, out of the rows that have a perplexity."""
    lines: list[str] = []
    for study in (TABLE, *STUDIES):
        if chosen := [row for row in rows if row.study == study and row.perplexity is not None]:
            columns = _SETTING + _COLUMNS[study]
            title = [] if study == TABLE else ["", f"study: {study}"]
            body = [[cell(row) for _, cell in columns] for row in chosen]
            lines += title + _aligned([[name for name, _ in columns], *body], left=2)
    return lines


def task_lines(rows: Sequence[EvalRow]) -> list[str]:
    """Returns the lines of a table of accuracy: a line for each kind of task, a column for each setting."""
    columns = {row.setting: row.task_accuracy_by_kind for row in rows if row.task_accuracy_by_kind}
    if not columns:
        return []
    means = {row.setting: row.task_accuracy for row in rows}
    kinds = next(iter(columns.values()))
    body = [[kind, *(_number(by_kind[kind], ".3f") for by_kind in columns.values())] for kind in kinds]
    mean = ["all kinds", *(_number(means[setting], ".3f") for setting in columns)]
    return _aligned([["task", *columns], *body, mean], left=1)


def claim_lines(claims: Sequence[Claim]) -> list[str]:
    """Returns a line for each claim: the verdict, the statement and its figures."""
    return [f"{_VERDICTS[c.holds]}: {c.claim}: {c.figures}" for c in claims]


def _aligned(cells: list[list[str]], left: int) -> list[str]:
    """Pads cells to columns, the first `left` of them flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
