"""Draws the loss curve of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_curve(log: list[dict[str, Any]], path: Path) -> None:
    """Draws held-out and training loss and task accuracy over tokens into a PNG.

    Args:
        log: lines of a run's log, one or more.
        path: the PNG file.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    millions = [line["tokens"] / 1e6 for line in log]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for domain in log[-1]["held_out"]["loss"]:
        values = [line["held_out"]["loss"][domain] for line in log]
        left.plot(millions, values, marker=".", label=f"{domain}, held out")
    for name in ("chat", "text"):
        points = [
            (m, line["training"][name])
            for m, line in zip(millions, log, strict=True)
            if name in line["training"]
        ]
        left.plot(*zip(*points, strict=True), linestyle=":", label=f"{name}, training")
    left.set(xlabel="million tokens", ylabel="loss (nats per token)", yscale="log")
    for kind in log[-1]["held_out"]["accuracy"]:
        right.plot(millions, [line["held_out"]["accuracy"][kind] for line in log], marker=".", label=kind)
    right.set(xlabel="million tokens", ylabel="held-out tasks right", ylim=(-0.02, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
