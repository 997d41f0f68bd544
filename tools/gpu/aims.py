"""The aims of the project on a GPU, and the report of tools.gpu.bench as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edgemoe.bench.tables import times_and_bytes
from tools.gpu.cases import limits_name

Json = dict[str, Any]


def aims(rows: Sequence[Json], offloaded: Json | str, layers: int, least: int) -> list[Json]:
    """The project's aims, each with its bound and the measured figure, which is None where a row is missing."""
    at = f"{limits_name(least, 'DRAM large')}: "
    found = {(row["name"], row["arm"]): row for row in rows}

    def seconds(name: str, metric: str = "tpot_s") -> float | None:
        row = found.get((at + name, "warm"))
        return None if row is None else float(row[metric]["mean"])

    def times(more: float | None, less: float | None) -> float | None:
        return more / less if more and less else None

    mixed, four = seconds("4/2 + prefetch"), found.get((at + "exact 4", "warm"))
    theirs: dict[str, float] = {}
    if not isinstance(offloaded, str):
        theirs = {name: offloaded[name] / offloaded["layers"] * layers for name in ("ttft_s", "tpot_s")}
    over = [row["peak_vram_bytes"] / row["vram_limit_bytes"] for row in rows]
    return [
        _aim(
            "exact 4, warm: fraction of the bound", 0.7, None if four is None else four["fraction_of_bound"]
        ),
        _aim("4/2, times faster than on demand from DRAM", 2.4, times(seconds("on demand from DRAM"), mixed)),
        _aim("4/2, times faster than on demand from SSD", 4.3, times(seconds("on demand from SSD"), mixed)),
        _aim(
            "4/2, TPOT a layer: times faster than accelerate's offload", 8, times(theirs.get("tpot_s"), mixed)
        ),
        _aim(
            "4/2, TTFT a layer: times faster than accelerate's offload",
            7,
            times(theirs.get("ttft_s"), seconds("4/2 + prefetch", "ttft_s")),
        ),
        {"aim": "largest peak over its limit", "at_most": 1.0, "found": max(over, default=None)},
    ]


def _aim(what: str, at_least: float, figure: float | None) -> Json:
    return {"aim": what, "at_least": at_least, "found": figure}


def summary(report: Json) -> str:
    """Formats the report as text."""
    parts = [report["label"], "", times_and_bytes(report["rows"]), ""]
    offloaded = report["offload"]
    parts.append(
        f"accelerate's CPU offload: {offloaded if isinstance(offloaded, str) else json.dumps(offloaded)}"
    )
    for aim in report["aims"]:
        wanted = f"at least {aim['at_least']}" if "at_least" in aim else f"at most {aim['at_most']}"
        parts.append(f"- {aim['aim']}: {wanted} aimed at, {_shown(aim['found'])}")
    parts += [f"- left out: {what}" for what in report["left_out"]]
    parts.append(f"- {report['seconds']:.0f} s in all")
    return "\n".join(parts)


def _shown(figure: float | None) -> str:
    return "not measured" if figure is None else f"{figure:.2f} found"
