"""The report as a picture: TTFT and TPOT of every row, hit rate and bytes per token of every tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgemoe.bench.prompts import RANDOM
from edgemoe.evaluate.plot import write_figure
from edgemoe.speed.bound import TIERS

_PANELS: tuple[tuple[str, Callable[[dict[str, Any]], dict[str, float]]], ...] = (
    ("TTFT, s", lambda row: {"": row["ttft_s"]["mean"]}),
    ("TPOT, ms", lambda row: {"": 1000 * row["tpot_s"]["mean"]}),
    ("hit rate", lambda row: {tier.upper(): row["hit_rate"][tier] or 0.0 for tier in ("vram", "dram")}),
    ("MB per token", lambda row: {tier.upper(): row["bytes_per_token"][tier] / 1e6 for tier in TIERS}),
)
"""Title, and the lengths of a row's bars by their label."""


def plot_batches(report: dict[str, Any], path: Path) -> None:
    """Draws throughput with its bound, times and active experts against the batch (bench.batch) into an image file.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = sorted(report["rows"], key=lambda row: row["batch"])
    batches = [row["batch"] for row in rows]
    lines: dict[str, dict[str, list[float | None]]] = {
        "decode, tokens/s": {
            "measured": [row["decode_tok_s"] for row in rows],
            "bound": [row["bound_tok_s"] for row in rows],
        },
        "seconds": {
            "TTFT": [row["ttft_s"]["mean"] for row in rows],
            "TTFT p99": [row["ttft_s"]["p99"] for row in rows],
            "TPOT": [row["tpot_s"]["mean"] for row in rows],
            "ITL p99": [row["itl_s"]["p99"] for row in rows],
        },
        "experts active in a layer": {
            f"{phase}{of}": [row[key][phase] for row in rows]
            for phase in ("decode", "prefill")
            for key, of in (("active", ""), ("active_paper", ", DynaExq"))
        },
    }
    figure = Figure(figsize=(13, 4), layout="constrained")
    for axes, (title, of_label) in zip(figure.subplots(1, 3), lines.items(), strict=True):
        for label, values in of_label.items():
            numbers = [float("nan") if value is None else value for value in values]
            axes.plot(batches, numbers, marker="o", label=label)
        axes.set(title=title, xlabel="batch")
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    write_figure(figure, path, dpi=120)


def plot_report(report: dict[str, Any], path: Path) -> None:
    """Draws four panels of bars into an image file, which output_files.require_plot has accepted.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = report["rows"]
    figure = Figure(figsize=(12, 2 + 0.45 * len(rows)), layout="constrained")
    names = [
        f"{row['name']}, {row['arm']}" + (" (random)" if row["prompts"] == RANDOM else "") for row in rows
    ]
    for axes, (title, bars_of) in zip(figure.subplots(1, 4, sharey=True), _PANELS, strict=True):
        bars = [bars_of(row) for row in rows]
        height = 0.8 / len(bars[0])
        for i, label in enumerate(bars[0]):
            places = [row + (i - (len(bars[0]) - 1) / 2) * height for row in range(len(rows))]
            axes.barh(places, [bar[label] for bar in bars], height, label=label)
        axes.set_title(title)
        axes.margins(y=0.01)
        axes.set_yticks(range(len(rows)), names)
        if len(bars[0]) > 1:
            axes.legend()
    axes.invert_yaxis()
    write_figure(figure, path, dpi=120)
