"""A picture of the table: KL against bits read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgemoe.console.output_files import require_plot
from edgemoe.evaluate.arms import PHASES, TABLE
from edgemoe.evaluate.rows import EvalRow
from storage.errors import UserError


def plot_kl(rows: Sequence[EvalRow], path: Path) -> None:
    """Draws KL (log scale, nats a token) against bits a weight read: a panel a phase, a line for each list of levels.

    The picture's kind follows the suffix of `path`. Rows without KL, or with none at all, are left out.

    Raises:
        UserError: no matplotlib, no row to draw, or `path` cannot be written.
    """
    require_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [row for row in rows if row.kl and row.bits_per_weight_read and row.study == TABLE]
    if not drawn:
        raise UserError("a plot of KL was wanted", "no row has one", "Give --text and --reference")
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, phase in zip(figure.subplots(1, len(PHASES), sharey=True), PHASES, strict=True):
        of_phase = [row for row in drawn if row.phase == phase]
        for levels, exact in dict.fromkeys((row.levels, row.exact) for row in of_phase):
            line = [row for row in of_phase if (row.levels, row.exact) == (levels, exact)]
            x, y = [row.bits_per_weight_read for row in line], [row.kl for row in line]
            # Mixed settings at r = 1 lie on the uniform ones, which show through as larger open squares.
            style = {"marker": "o"} if "/" in levels else {"marker": "s", "ms": 11, "mfc": "none"}
            axes.plot(x, y, label=levels if exact else f"{levels} reuse", **style)
        axes.set(title=phase, xlabel="bits a weight read", ylabel="KL to bf16, nats a token", yscale="log")
        axes.grid(visible=True, alpha=0.3)
        if of_phase:
            axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(
            f"a plot was wanted at {path}", str(error), "Give a writable path ending in .png"
        ) from error
