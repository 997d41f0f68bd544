"""The report as pictures: KL against bits read, and the experts of all tokens and of heavy hitters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.errors import UserError
from edgemoe.evaluate.arm import PHASES, TABLE
from edgemoe.evaluate.observations import RoutingRow
from edgemoe.evaluate.rows import EvalRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS_ACROSS = 4
"""Panels in a row of the picture of routing."""


def plot_kl(rows: Sequence[EvalRow], path: Path) -> None:
    """Draws KL (log scale, nats per token) against bits read per weight: a panel per phase, a line per list of levels.

    Rows of studies and rows whose KL is 0 or missing are left out. output_files.require_plot has accepted `path`.

    Raises:
        UserError: no row can be drawn, or `path` cannot be written.
    """
    from matplotlib.figure import Figure

    drawn = [row for row in rows if row.kl and row.bits_per_weight_read and row.study == TABLE]
    if not drawn:
        raise UserError("KL to plot", "no row that has one", "give --text and --reference")
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, phase in zip(figure.subplots(1, len(PHASES), sharey=True), PHASES, strict=True):
        of_phase = [row for row in drawn if row.phase == phase]
        for levels, exact in dict.fromkeys((row.levels, row.exact) for row in of_phase):
            line = [row for row in of_phase if (row.levels, row.exact) == (levels, exact)]
            x, y = [row.bits_per_weight_read for row in line], [row.kl for row in line]
            # Mixed settings at r = 1 lie on the uniform ones, which show through as larger open squares.
            style = {"marker": "o"} if "/" in levels else {"marker": "s", "ms": 11, "mfc": "none"}
            axes.plot(x, y, label=levels if exact else f"{levels} reuse", **style)
        axes.set(
            title=phase, xlabel="bits per weight read", ylabel="KL to bf16, nats per token", yscale="log"
        )
        axes.grid(visible=True, alpha=0.3)
        if of_phase:
            axes.legend()
    write_figure(figure, path, dpi=150)


def plot_front(rows: Sequence[EvalRow], path: Path) -> None:
    """Draws KL against bits from disk per chosen expert: a panel per size of the tiers, a line per rule.

    Only rows of the studies of caches are drawn; without any, no file is written.

    Raises:
        UserError: `path` cannot be written.
    """
    from matplotlib.figure import Figure

    drawn = [row for row in rows if row.study.startswith("cache-front") and row.kl is not None]
    tiers = list(dict.fromkeys((row.cache or 0.0, row.dram or 0.0) for row in drawn))
    if not tiers:
        return
    figure = Figure(figsize=(5 * len(tiers), 4), layout="constrained")
    for axes, tier in zip(figure.subplots(1, len(tiers), sharey=True, squeeze=False)[0], tiers, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in drawn:
            if (row.cache or 0.0, row.dram or 0.0) == tier:
                rule = f"{row.levels} {(row.variation or '').split(' below')[0]}"
                lines.setdefault(rule, []).append((row.bits_from_disk or 0.0, row.kl or 0.0))
        for rule, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=rule)
        title = f"cache {tier[0]:g}" + (f", second tier {tier[1]:g}" if tier[1] else "")
        axes.set(title=title, xlabel="bits from disk per chosen expert", yscale="log")
        axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    figure.supylabel("KL to bf16, nats per token")
    write_figure(figure, path, dpi=120)


def plot_routing(rows: Sequence[RoutingRow], path: Path) -> None:
    """Draws the fraction of tokens, and of the fewest heavy hitters, that each expert gets: a panel for each layer.

    Raises:
        UserError: `path` cannot be written.
    """
    from matplotlib.figure import Figure

    fewest = min(row.heavy_hitters for row in rows)
    drawn = [row for row in rows if row.heavy_hitters == fewest]
    across = min(len(drawn), PANELS_ACROSS)
    down = -(-len(drawn) // across)
    figure = Figure(figsize=(4 * across, 2.5 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, row in zip(panels, drawn, strict=False):
        for load, label in ((row.load, "all tokens"), (row.heavy_load, f"heavy hitters {fewest:g}")):
            axes.step(range(len(load)), [each / max(sum(load), 1) for each in load], where="mid", label=label)
        found = "" if row.correlation is None else f", correlation {row.correlation:.2f}"
        axes.set(title=f"layer {row.layer}{found}", xlabel="expert", ylabel="fraction")
    panels[0].legend()
    for axes in panels[len(drawn) :]:
        axes.set_axis_off()
    write_figure(figure, path, dpi=150)


def write_figure(figure: Figure, path: Path, dpi: int) -> None:
    """Writes a figure of matplotlib as an image; the suffix of `path`, a known one, chooses the format.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=dpi)
    except OSError as error:
        raise UserError(
            f"a plot {path}", str(error), "give a writable path that ends in .png or .svg"
        ) from error
