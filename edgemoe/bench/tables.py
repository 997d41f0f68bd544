"""The report as text: Markdown, CSV, JSON and JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from functools import reduce
from operator import getitem
from typing import Any

from edgemoe.bench.prompts import RANDOM
from edgemoe.console.sizes import format_size
from edgemoe.console.width import fitted, markdown_tables
from edgemoe.speed.bound import TIERS

Report = dict[str, Any]
Row = dict[str, Any]


def as_jsonl(report: Report) -> str:
    """Returns a line for each row, with the environment in every one."""
    return "\n".join(json.dumps(row | {"environment": report["environment"]}) for row in report["rows"])


def as_csv(report: Report) -> str:
    """Returns a line for each row: every value outside lists (samples, layers), named by its path."""
    rows = [_flat(row) | _flat({"environment": report["environment"]}) for row in report["rows"]]
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested objects, with names joined by dots; lists are left out."""
    flat: dict[str, Any] = {}
    for name, part in value.items():
        if isinstance(part, dict):
            flat |= _flat(part, f"{prefix}{name}.")
        elif not isinstance(part, list | tuple):
            flat[prefix + name] = part
    return flat


def times_and_bytes(rows: list[Row]) -> str:
    """Returns the tables of times, memory and bytes."""
    return "\n\n".join([_table(_TIMES, rows), _table(_BYTES, rows)])


def as_summary(report: Report) -> str:
    """Returns one table of speed, bytes and memory, and what its rows are; all figures are in `as_markdown`."""
    rows, facts = report["rows"], report["environment"]
    columns = _SHORT_BATCH if "batch" in rows[0] else _SHORT
    if any(row.get("quality") for row in rows):
        columns = [*columns, ("KL decode", _quality("decode", "kl"))]
    counts = [f"{facts[name]} {what}" for name, what in _COUNTS if name in facts]
    lines = [
        f"{facts['model']}: {', '.join(counts)}",
        "first s: seconds to the first token; 8/4/2/0 r 0.9: bits of experts, fewer where they matter less",
        "" if "batch" in rows[0] else _LEGEND,
        "--full prints all figures and conditions, --json each run too",
    ]
    notes = [f"- {note}" for note in facts["notes"]]
    text = "\n".join(fitted(line) for line in [*notes, *lines] if line)
    return f"{_table(columns, rows)}\n\n{text}"


_LEGEND = (
    "cold: no expert is in memory when the prompt comes; warm: the same prompt again; in memory: the share of experts "
    "that were; bits: mean bits per weight of the experts that were computed"
)

_COUNTS = (
    ("prompt_tokens", "tokens of prompt"),
    ("new_tokens", "new tokens"),
    ("runs", "runs"),
    ("threads", "threads"),
)
"""Conditions that the summary names, and what each counts."""


def as_markdown(report: Report) -> str:
    """Returns tables of times, memory and bytes, settings, quality and look-ahead, then notes and conditions.

    The milliseconds after "reached" are the bound's parts: dense weights, and the bytes of each tier.
    """
    rows, facts = report["rows"], report["environment"]
    batches = "batch" in rows[0]
    parts = [_table(_BATCH, rows)] if batches else [times_and_bytes(rows), _table(_SETTING, rows)]
    if any(row.get("quality") for row in rows):
        parts.append(_table(_QUALITY, rows))
    if not batches and any(row["prefetch"] != "off" for row in rows):
        layers = [row | layer for row in rows for layer in row["lookahead"]["decode"]["layers"]]
        parts += [_table(_LOOKAHEAD, rows), _table(_LAYERS, layers)]
    parts += ["\n".join(fitted(f"- {note}") for note in facts["notes"])] if facts["notes"] else []
    shown = {name: value for name, value in facts.items() if name not in ("notes", "bandwidth_probes")}
    parts.append("\n".join(fitted(f"- {name}: {_fact(name, value)}") for name, value in shown.items()))
    return "\n\n".join(parts)


def _fact(name: str, value: object) -> str:
    """A condition for people: sizes with their unit, seconds rounded, other values as JSON."""
    if name.endswith("_bytes") and isinstance(value, int):
        return format_size(value)
    return f"{value:.3g} s" if name.endswith("_s") and isinstance(value, float) else json.dumps(value)


FORMATS: dict[str, Callable[[Report], str]] = {
    "md": as_markdown,
    "csv": as_csv,
    "json": json.dumps,
    "jsonl": as_jsonl,
}

Cell = Callable[[Row], str]
Column = tuple[str, Cell]
"""Title, and the text of a row's cell."""


def _text(path: str, show: Callable[[Any], str] = str) -> Cell:
    """Shows the value at a path of names joined by dots."""
    names = path.split(".")
    return lambda row: show(reduce(getitem, names, row))


def _size(path: str) -> Cell:
    return _text(path, format_size)


def _number(path: str, digits: int, scale: float = 1) -> Cell:
    """Shows a scaled number; "-" for None."""
    return _text(path, lambda value: "-" if value is None else f"{scale * value:.{digits}f}")


def _quality(phase: str, measure: str) -> Cell:
    def cell(row: Row) -> str:
        value = (row["quality"] or {}).get(phase, {}).get(measure)
        return "not measured" if value is None else f"{value:.4g}"

    return cell


def _label(row: Row) -> str:
    name = f"{row['name']}, {RANDOM}" if row["prompts"] == RANDOM else str(row["name"])
    return name if row["valid"] else f"{name}, INVALID: over its limit"


_NAME: list[Column] = [("row", _label), ("cache", _text("arm"))]

_TIMES: list[Column] = [
    *_NAME,
    ("TTFT s", _number("ttft_s.mean", 3)),
    ("TPOT ms", _number("tpot_s.mean", 1, 1000)),
    ("decode tok/s", _number("decode_tok_s", 2)),
    ("± std ms", _number("tpot_s.std", 1, 1000)),
    ("n", _text("tpot_s.n")),
    *[(f"ITL {p} ms", _number(f"itl_s.{p}", 1, 1000)) for p in ("p50", "p90", "p95", "p99")],
    ("prefill tok/s", _number("prefill_tok_s", 1)),
    ("bound ms", _number("bound_s", 1, 1000)),
    ("reached %", _number("fraction_of_bound", 0, 100)),
    *[(f"{part} ms", _number(f"bound_per_tier_s.{part}", 1, 1000)) for part in ("dense", *TIERS)],
]

_BYTES: list[Column] = [
    *_NAME,
    ("hits VRAM %", _number("hit_rate.vram", 1, 100)),
    ("hits DRAM %", _number("hit_rate.dram", 1, 100)),
    *[(f"{tier.upper()} a token", _size(f"bytes_per_token.{tier}")) for tier in TIERS],
    *[(f"{tier.upper()} a second", _size(f"bandwidth.{tier}")) for tier in TIERS],
    ("experts at 8/4/2/0", lambda row: "/".join(str(row["levels_used"][level]) for level in "8420")),
    ("reused", _text("experts_reused")),
    ("limit", _size("limit_bytes")),
    ("peak", _size("peak_vram_bytes")),
    ("process peak", _size("peak_process_bytes")),
]

_SETTING: list[Column] = [
    *_NAME,
    ("setting", _text("setting")),
    ("prefetch", _text("prefetch")),
    ("eviction", _text("eviction")),
    ("bits per weight", _number("bits_per_weight_read", 2)),
    ("effective r", _number("effective_retention", 3)),
]

_SHORT: list[Column] = [
    *_NAME,
    ("first s", _number("ttft_s.mean", 3)),
    ("tok/s", _number("decode_tok_s", 1)),
    ("in memory", lambda row: _percent(row["hit_rate"])),
    ("disk/token", _size("bytes_per_token.ssd")),
    ("bits", _number("bits_per_weight_read", 2)),
    ("memory", lambda row: f"{format_size(row['peak_vram_bytes'])} of {format_size(row['limit_bytes'])}"),
]


def _percent(hits: dict[str, float | None]) -> str:
    """The share of experts that some tier in memory had."""
    found = [hits["vram"], hits["dram"]]
    known = [hit for hit in found if hit is not None]
    return f"{100 * sum(known):.0f} %" if known else "-"


_QUALITY: list[Column] = [
    *_NAME,
    ("quality of", lambda row: row["quality"]["setting"] if row["quality"] else "-"),
    ("perplexity", _quality("decode", "perplexity")),
    ("KL decode", _quality("decode", "kl")),
    ("KL prefill", _quality("prefill", "kl")),
    ("task accuracy", _quality("decode", "task_accuracy")),
]

_LOOKAHEAD: list[Column] = [
    *_NAME,
    ("read ahead", _text("lookahead.decode.speculated")),
    ("used", _text("lookahead.decode.speculated_used")),
    ("cancelled", _text("lookahead.decode.speculated_cancelled")),
    ("hidden", _size("lookahead.decode.hidden_bytes")),
    ("wasted", _size("lookahead.decode.wasted_bytes")),
    ("hidden s", _number("lookahead.decode.hidden_s", 3)),
]

_LAYERS: list[Column] = [
    *_NAME,
    ("layer", _text("layer")),
    ("recall %", _number("recall", 1, 100)),
    ("precision %", _number("precision", 1, 100)),
    ("hidden", _size("hidden_bytes")),
    ("wasted", _size("wasted_bytes")),
    ("hidden s", _number("hidden_s", 3)),
]


def _batch(row: Row) -> str:
    name = str(row["batch"]) if row["full"] else f"{row['batch']}, NOT FULL: at most {row['most_rows']} rows"
    return name if row["valid"] else f"{name}, INVALID: over its limit"


_BATCH: list[Column] = [
    ("batch", _batch),
    ("rows per step", _number("rows_per_step", 1)),
    ("requests", _text("requests")),
    *[
        (f"{name} {p} s", _number(f"{key}.{p}", 3))
        for name, key in (("TTFT", "ttft_s"), ("E2E", "e2e_s"))
        for p in ("mean", "p99")
    ],
    ("TPOT ms", _number("tpot_s.mean", 1, 1000)),
    ("decode tok/s", _number("decode_tok_s", 2)),
    *[(f"ITL {p} ms", _number(f"itl_s.{p}", 1, 1000)) for p in ("mean", "p99")],
    ("tokens/s", _number("tokens_s", 2)),
    ("full steps tok/s", _number("full_tok_s", 2)),
    ("bound tok/s", _number("bound_tok_s", 2)),
    ("reached %", _number("fraction_of_bound", 0, 100)),
    *[(f"{tier.upper()} a step", _size(f"bytes_per_step.{tier}")) for tier in TIERS],
    *[
        (f"{phase}: active %{of}", _number(f"{key}.{phase}", 1, 100))
        for phase in ("decode", "prefill")
        for key, of in (("active", ""), ("active_paper", ", DynaExq"))
    ],
    ("peak", _size("peak_vram_bytes")),
    ("limit", _size("limit_bytes")),
]


_SHORT_BATCH: list[Column] = [
    ("requests at once", _batch),
    ("first s", _number("ttft_s.mean", 3)),
    ("ms per token", _number("tpot_s.mean", 1, 1000)),
    ("tok/s in all", _number("tokens_s", 1)),
    ("disk per step", _size("bytes_per_step.ssd")),
    ("memory", lambda row: f"{format_size(row['peak_vram_bytes'])} of {format_size(row['limit_bytes'])}"),
]


def _table(columns: list[Column], rows: list[Row]) -> str:
    keys = len(_NAME) if columns[: len(_NAME)] == _NAME else 1
    return markdown_tables(
        [title for title, _ in columns], [[cell(row) for _, cell in columns] for row in rows], keys
    )
