"""Summarizes runs of several programs: a row for each program, limit, prompt length and batch, with ratios.

Where several prompts decode together TPOT is the time of a step, which decodes a token of each, and tok/s counts all of
them. A ratio is the peer's mean, or median, time over the row's: more than 1 is in edgemoe's favour. The bound is that
of `edgemoe bench`, at the best bandwidths that any run probed: one slow probe does not lower it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgemoe.bench.quality import EvaluationRow, quality_of
from edgemoe.bench.summary import summary
from edgemoe.console.sizes import format_size
from edgemoe.policy.settings import RunSettings
from edgemoe.speed.bound import TIERS, slowest
from tools.peers.run import Outcome

Json = dict[str, Any]


class Case(NamedTuple):
    """Conditions of a run.

    Args:
        limit: bytes; None: unlimited.
        tokens: the number of tokens of each prompt.
        batch: prompts that decode together.
    """

    limit: int | None
    tokens: int
    batch: int = 1

    def __str__(self) -> str:
        """The case as text: "3 GB, 64 tokens", and the batch where it is more than one."""
        batch = f", batch {self.batch}" if self.batch > 1 else ""
        return f"{show_limit(self.limit)}, {self.tokens} tokens{batch}"

    @classmethod
    def of(cls, run: Json) -> Case:
        """The case of a run, or of a row of runs."""
        return cls(run["limit_bytes"], run["prompt_tokens"], run["batch"])


def run_of(name: str, case: Case, round_number: int, outcome: Outcome) -> Json:
    """One run as the JSON keeps it: raw times, TTFT, TPOT and memory; seconds and bytes."""
    times = outcome.answer.get("token_times", [])
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return {
        "name": name,
        "limit_bytes": case.limit,
        "prompt_tokens": case.tokens,
        "batch": case.batch,
        "round": round_number,
        "failure": outcome.failure,
        "ttft_s": times[0] if times else None,
        "tpot_s": sum(gaps) / len(gaps) if gaps else None,
        "itl_s": gaps,
        "peak_bytes": outcome.usage.peak_bytes,
        "limit_hit": outcome.usage.failcnt,
        **outcome.answer,
    }


def summarize(
    runs: Sequence[Json], peer: str, quality: Sequence[EvaluationRow], settings: Mapping[str, RunSettings]
) -> list[Json]:
    """Makes a row for each program and case, in the order of their first runs.

    Args:
        runs: results of run_of.
        peer: the program that ratios compare with.
        quality: rows of an evaluation report; empty: every quality is None.
        settings: program -> its settings, for each program that has a quality.
    """
    rates = best_rates(runs)
    groups: dict[tuple[str, Case], list[Json]] = {}
    for run in runs:
        groups.setdefault((run["name"], Case.of(run)), []).append(run)
    rows = {key: _row(key[0], key[1], group, rates) for key, group in groups.items()}
    for (name, case), row in rows.items():
        against = rows.get((peer, case))
        for measure in ("ttft_s", "tpot_s"):
            row[f"ratio_{measure[:-2]}"] = _ratio(against, row, measure, "mean")
            row[f"ratio_{measure[:-2]}_p50"] = _ratio(against, row, measure, "p50")
        row["quality"] = quality_of(quality, settings[name]) if name in settings else None
    return list(rows.values())


def _ratio(against: Json | None, row: Json, measure: str, of: str) -> float | None:
    if against is None or against[measure][of] is None or row[measure][of] is None:
        return None
    return float(against[measure][of] / row[measure][of])


def _row(name: str, case: Case, runs: Sequence[Json], rates: Mapping[str, float]) -> Json:
    good = [run for run in runs if run["failure"] is None]
    measured = [run["row"] for run in good if "row" in run]
    fractions = [reached(run, rates) for run in good if "row" in run]
    itl = summary([gap for run in good for gap in run["itl_s"]])
    tpot = summary([run["tpot_s"] for run in good])
    return {
        "name": name,
        "limit_bytes": case.limit,
        "prompt_tokens": case.tokens,
        "batch": case.batch,
        "failed": len(runs) - len(good),
        "ttft_s": summary([run["ttft_s"] for run in good if run["ttft_s"] is not None]),
        "tpot_s": tpot,
        "tok_s": case.batch / tpot["mean"] if tpot["mean"] else None,
        "itl_s": itl,
        "p99_over_median": itl["p99"] / itl["p50"] if itl["p99"] and itl["p50"] else None,
        "load_s": summary([run["load_s"] for run in good]),
        "fraction_of_bound": _mean(fractions),
        "hit_rate": _mean([row["hit_rate"]["vram"] or 0 for row in measured]),
        "weight_bytes_per_step": _mean([read for run in good if (read := weight_bytes(run)) is not None]),
        "ssd_bytes_per_token": _mean([row["bytes_per_token"]["ssd"] for row in measured]),
        "peak_bytes": max((run["peak_bytes"] or 0 for run in runs), default=None),
        "failures": [run["failure"] for run in runs if run["failure"]],
    }


def weight_bytes(run: Json) -> float | None:
    """Bytes of weights that a step multiplies with, experts at the level of the product; None: not counted."""
    value = run["row"]["bytes_per_token"]["vram"] if "row" in run else run.get("weight_bytes")
    return None if value is None else float(value)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def best_rates(runs: Sequence[Json]) -> dict[str, float]:
    """The best bandwidth of each tier that any run probed, bytes per second."""
    probed = [run["row"]["bandwidth"] for run in runs if "row" in run]
    return {tier: max(rates[tier] for rates in probed) for tier in TIERS} if probed else {}


def reached(run: Json, rates: Mapping[str, float]) -> float:
    """The fraction of a run's time per token that its bytes account for at `rates`, bytes per second."""
    parts, own = run["row"]["bound_per_tier_s"], run["row"]["bandwidth"]
    at_best = {tier: parts[tier] * own[tier] / rates[tier] for tier in TIERS}
    dense = parts["dense"] * own["vram"] / rates["vram"]
    return float(slowest(at_best | {"dense": dense}) / run["tpot_s"])


def show_limit(limit: int | None) -> str:
    """A limit as text: "3 GB", or "none"."""
    return "none" if limit is None else format_size(limit)


def _number(path: str, digits: int, scale: float = 1) -> Callable[[Json], str]:
    def cell(row: Json) -> str:
        value: Any = row
        for name in path.split("."):
            value = value[name]
        return "-" if value is None else f"{scale * value:.{digits}f}"

    return cell


def _kl(row: Json) -> str:
    value = ((row["quality"] or {}).get("decode") or {}).get("kl")
    return "-" if value is None else f"{value:.4f}"


COLUMNS: tuple[tuple[str, Callable[[Json], str]], ...] = (
    ("limit", lambda row: show_limit(row["limit_bytes"])),
    ("prompt", lambda row: str(row["prompt_tokens"])),
    ("batch", lambda row: str(row["batch"])),
    ("program", lambda row: str(row["name"])),
    ("runs", lambda row: f"{row['tpot_s']['n']}" + (f", {row['failed']} failed" if row["failed"] else "")),
    ("TTFT mean s", _number("ttft_s.mean", 2)),
    ("median", _number("ttft_s.p50", 2)),
    ("TPOT mean ms", _number("tpot_s.mean", 1, 1000)),
    ("median", _number("tpot_s.p50", 1, 1000)),
    ("tok/s", _number("tok_s", 1)),
    ("ITL p50", _number("itl_s.p50", 1, 1000)),
    ("p99", _number("itl_s.p99", 1, 1000)),
    ("p99/p50", _number("p99_over_median", 2)),
    ("TTFT ratio", _number("ratio_ttft", 2)),
    ("of medians", _number("ratio_ttft_p50", 2)),
    ("TPOT ratio", _number("ratio_tpot", 2)),
    ("of medians", _number("ratio_tpot_p50", 2)),
    ("of bound %", _number("fraction_of_bound", 0, 100)),
    ("hits %", _number("hit_rate", 0, 100)),
    ("weights MB per step", _number("weight_bytes_per_step", 0, 1e-6)),
    ("SSD MB per token", _number("ssd_bytes_per_token", 0, 1e-6)),
    ("peak GB", _number("peak_bytes", 2, 1e-9)),
    ("load s", _number("load_s.mean", 1)),
    ("KL (decode)", _kl),
)


def as_table(rows: Sequence[Json]) -> str:
    """The rows as a Markdown table, followed by a list of the runs that failed."""
    lines = ["| " + " | ".join(title for title, _ in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(cell(row) for _, cell in COLUMNS) + " |" for row in rows]
    failures = [
        f"- {row['name']} at {Case.of(row)}: {failure}" for row in rows for failure in row["failures"]
    ]
    return "\n".join(lines + (["", *failures] if failures else []))


def plot(rows: Sequence[Json], path: Path) -> None:
    """Draws every row's mean TTFT, mean TPOT and p99 of ITL on logarithmic axes into an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2 + 0.35 * len(rows)), layout="constrained")
    names = [f"{Case.of(row)}: {row['name']}" for row in rows]
    panels = (
        ("TTFT, s", "ttft_s", "mean", 1),
        ("TPOT, ms", "tpot_s", "mean", 1000),
        ("ITL p99, ms", "itl_s", "p99", 1000),
    )
    for axes, (title, measure, part, scale) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        axes.barh(range(len(rows)), [scale * (row[measure][part] or 0) for row in rows])
        axes.set_xscale("log")
        axes.set_title(title)
        axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)
