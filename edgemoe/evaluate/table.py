"""The report as text: tables of quality and of tasks, and the verdicts on the claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgemoe.console.width import fitted
from edgemoe.evaluate.arm import TABLE, signal_name
from edgemoe.evaluate.claims import Claim
from edgemoe.evaluate.hotness import HotnessRow
from edgemoe.evaluate.observations import RoutingRow, SimilarityRow
from edgemoe.evaluate.rows import EvalRow, gain

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

_FRONT: list[_Column] = [
    ("from disk", lambda row: _number(row.bits_from_disk, ".3f")),
    ("from DRAM", lambda row: _number(row.bits_from_dram, ".3f")),
    ("scheduled", lambda row: _number(row.bits_scheduled, ".2f")),
    ("skipped", lambda row: _number(row.skipped, ".3f")),
    *_QUALITY[:-1],
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
    "lynx": [
        ("batch", lambda row: f"{row.batch}"),
        ("active %", lambda row: _number(row.active and 100 * row.active, ".1f")),
        ("pairs changed", lambda row: _number(row.remapped, "d")),
        *_QUALITY,
    ],
    "lynx-sensitivity": [
        ("may change", lambda row: row.variation or "-"),
        ("active %", lambda row: _number(row.active and 100 * row.active, ".1f")),
        ("pairs changed", lambda row: _number(row.remapped, "d")),
        *_QUALITY,
    ],
    "compensation": [
        ("of 2 or 4", lambda row: _number(row.kl_over_base, ".3f")),
        ("nats a bit", lambda row: _number(row.kl_less_per_bit, ".5f")),
        *_QUALITY[1:-2],
        ("bits read", lambda row: _number(row.bits_per_weight_read, ".3f")),
    ],
    "residency": [
        ("cache", lambda row: _number(row.cache, ".2f")),
        ("KB per token", lambda row: _number(row.bytes_per_token and row.bytes_per_token / 1000, ".1f")),
        *_QUALITY,
    ],
    **dict.fromkeys(("cache-front", "cache-front-dram"), _FRONT),
    "static-levels": [("allocation", lambda row: row.variation or "-"), *_QUALITY],
    "skipping": [("others", lambda row: "scaled" if row.renormalise else "unscaled"), *_QUALITY],
}

_LEGEND = (
    "setting: in 8/4/2/0 r 0.9 experts have 8, 4, 2 or 0 bits, fewer where they matter less (--levels, --retention)",
    "phase: a prompt at once (prefill), or one token after another (decode)",
    "KL: distance from the bf16 model's answers, 0 is equal, +-: its standard error; top-1: share of tokens that both "
    "take for the likeliest",
    "bits read: mean bits per weight of experts; share high: share of experts at the highest level",
)
"""Explains the table's columns."""

_VERDICTS = {True: "holds", False: "DOES NOT HOLD", None: "no difference beyond noise"}


def quality_lines(rows: Sequence[EvalRow]) -> list[str]:
    """Returns the lines of one table for TABLE and for each study, out of the rows that have a perplexity."""
    lines: list[str] = []
    for study, own in _COLUMNS.items():
        if chosen := [row for row in rows if row.study == study and row.perplexity is not None]:
            columns = _SETTING + own
            title = [] if study == TABLE else ["", f"study: {study}"]
            body = [[cell(row) for _, cell in columns] for row in chosen]
            lines += title + _aligned([[name for name, _ in columns], *body], flush=2)
    return lines


def legend_lines(rows: Sequence[EvalRow]) -> list[str]:
    """Returns the lines that explain the columns of quality_lines; none without such a table."""
    return [fitted(line) for line in _LEGEND] if any(row.perplexity is not None for row in rows) else []


def routing_lines(rows: Sequence[RoutingRow]) -> list[str]:
    """Returns the lines of the study of routing: a line for each layer and fraction of heavy hitters."""
    titles = [
        "layer",
        "heavy hitters",
        "with all",
        "with the rest",
        "next window",
        "most loaded",
        "by heavy hitters",
    ]
    body = [
        [
            f"{row.layer}",
            f"{row.heavy_hitters:g}",
            _number(row.correlation, ".3f"),
            _number(row.correlation_rest, ".3f"),
            _number(row.correlation_windows, ".3f"),
            f"{max(row.load) / max(sum(row.load), 1):.3f}",
            f"{max(row.heavy_load) / max(sum(row.heavy_load), 1):.3f}",
        ]
        for row in rows
    ]
    return (
        [
            "study: routing (correlations of experts' loads by heavy hitters)",
            *_aligned([titles, *body], flush=0),
        ]
        if rows
        else []
    )


def similarity_lines(rows: Sequence[SimilarityRow]) -> list[str]:
    """Returns the lines of the study of similarity: a line for each pair of adjacent layers."""
    titles = ["layer", "next", "cosine", "std", "tokens"]
    body = [
        [f"{row.layer}", f"{row.next_layer}", f"{row.similarity:.3f}", f"{row.std:.3f}", f"{row.tokens}"]
        for row in rows
    ]
    return ["study: similarity (of router inputs)", *_aligned([titles, *body], flush=0)] if rows else []


def hotness_lines(rows: Sequence[HotnessRow]) -> list[str]:
    """Returns the lines of the studies of hotness: a line for each measurement."""
    titles = ["part", "text", "other", "hot", "policy", "fraction", "KL", "+-", "gap recovered"]
    body = [
        [
            *(row.part, row.text, row.other or "-", _number(row.hot, "d"), row.policy or "-"),
            *(_number(row.fraction, ".3f"), _number(row.kl, ".5f"), _number(row.kl_stderr, ".5f")),
            _number(row.gap_recovered, ".3f"),
        ]
        for row in rows
    ]
    return ["study: hotness (by text)", *_aligned([titles, *body], flush=3)] if rows else []


def task_lines(rows: Sequence[EvalRow]) -> list[str]:
    """Returns the lines of a table of accuracy: a line for each kind of task, a column for each setting."""
    columns = {row.setting: row.task_accuracy_by_kind for row in rows if row.task_accuracy_by_kind}
    if not columns:
        return []
    means = {row.setting: row.task_accuracy for row in rows}
    kinds = next(iter(columns.values()))
    body = [[kind, *(_number(by_kind[kind], ".3f") for by_kind in columns.values())] for kind in kinds]
    mean = ["all kinds", *(_number(means[setting], ".3f") for setting in columns)]
    return _aligned([["task", *columns], *body, mean], flush=1)


def together_lines(rows: Sequence[EvalRow]) -> list[str]:
    """Returns the lines of the study of tasks that are answered several at once."""
    titles = ["setting", "batch", "active %", "tasks", "turns", "won", "lost", "points", "+-"]
    body = [
        [
            row.setting,
            f"{row.batch}",
            _number(row.active and 100 * row.active, ".1f"),
            _number(row.task_accuracy, ".4f"),
            *(f"{count}" for count in (row.turns, row.won, row.lost)),
            *(_number(100 * value, ".2f") for value in gain(row)),
        ]
        for row in rows
        if row.turns
    ]
    return (
        ["study: lynx-tasks (compared with its first row)", *_aligned([titles, *body], flush=1)]
        if body
        else []
    )


def claim_lines(claims: Sequence[Claim]) -> list[str]:
    """Returns a line for each claim after one that names the papers: the verdict, the statement and its figures."""
    heading = (
        "claims of papers, compared with these rows; tables and figures are DyMoE's where no paper is named"
    )
    lines = [f"{_VERDICTS[c.holds]}: {c.claim}: {c.figures}" for c in claims]
    return [heading, *lines] if lines else []


def finding(row: EvalRow) -> str:
    """Describes a row that has just been measured, in one line.

    Returns:
        such as "4/2 r 0.9, decode: perplexity 21.342, KL 0.00410, 3.92 bits per weight"; without a text, the tasks.
    """
    parts = (
        ("perplexity {:.3f}", row.perplexity),
        ("KL {:.5f}", row.kl),
        ("{:.2f} bits per weight", row.bits_per_weight_read),
        ("{:.3f} of the tasks right", row.task_accuracy),
    )
    known = ", ".join(form.format(value) for form, value in parts if value is not None)
    return f"{row.setting}, {row.phase}: {known or 'measured'}"


def _aligned(cells: list[list[str]], flush: int) -> list[str]:
    """Pads cells to columns, the first `flush` of them flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if i < flush else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
