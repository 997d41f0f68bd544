"""The named settings that a benchmark compares; among them the rows of an ablation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgemoe.policy.settings import PAPER_CACHE, PAPER_RANKING, RANKING, RunSettings

PAPER_RETENTION = 0.75
"""Mean retention of the rows with several levels."""

ROW_FIELDS = {
    "ours": ("rule", "levels", "exact", "tpot_target", "speculate", "eviction"),
    "paper": ("rule", "levels", "exact", "tpot_target", "speculate", "bits"),
}
"""Ablation -> fields of RunSettings that are its rows' own."""


@dataclass(frozen=True)
class BenchRow:
    """A row of the table.

    Args:
        name: the name in the table.
        settings: the settings of the engine.
        dram_on_demand: keep the DRAM tier, which is a cache, also where the settings load on demand.
    """

    name: str
    settings: RunSettings
    dram_on_demand: bool = False


def single_row(settings: RunSettings) -> tuple[BenchRow, ...]:
    """Returns one row, named for its settings."""
    return (BenchRow(settings.name, settings),)


def ablation_rows(
    which: str, max_level: int, settings: Mapping[str, Any] | None = None, *, on_gpu: bool = False
) -> tuple[tuple[BenchRow, ...], tuple[str, ...]]:
    """Returns the rows of an ablation like DyMoE's table 3, at a base of 4 bits.

    Readers, kernel and parallelism are the same in every row. Rows with several levels use resident planes above the
    scheduled level (conservative reuse), as the paper's cache does.

    Args:
        which: "paper": the table by the paper's rules, and a row of four levels. "ours": the table with blocks split
            by kind, promotions of missing planes and every predicted expert read ahead, and with rows that use this
            program's own rules.
        max_level: highest level of the store, in bits.
        settings: fields of RunSettings that every row takes in which they have an effect; none of ROW_FIELDS[which].
        on_gpu: the rows run on a GPU. The rows of table 3 then copy every expert into its memory before they compute
            it: experts that are computed where they lie in DRAM need no look-ahead, and the rows with and without it
            would do the same.

    Returns:
        the rows, and a sentence for each row that this store cannot run.
    """
    place = {"in_place": "off"} if on_gpu else {}
    rows, note = _our_rows(place) if which == "ours" else _paper_rows(place), ""
    if max_level < 8:
        note = f"{rows.pop().name}: left out, the store's highest level is {max_level}"
    taken = tuple(replace(row, settings=_with(row.settings, settings or {})) for row in rows)
    return taken, (note,) if note else ()


def _table(cached: RunSettings, mixed: RunSettings, ahead: str) -> list[BenchRow]:
    """The six rows of table 3: settings of one level and of 4/2, and a mode of look-ahead."""
    return [
        BenchRow("load on demand", cached.with_(cache=False)),
        BenchRow("cache", cached),
        BenchRow("cache + prefetch", cached.with_(speculate=ahead)),
        BenchRow("cache + 4/2", mixed),
        BenchRow("cache + 4/2 + prefetch", mixed.with_(speculate=ahead)),
        BenchRow("cache + 4/0 + prefetch", mixed.with_(levels=(4, 0), speculate=ahead)),
    ]


def _paper_rows(place: Mapping[str, Any]) -> list[BenchRow]:
    four = RunSettings.uniform(4, **PAPER_CACHE, **place)
    mixed = four.with_(levels=(4, 2), exact=False, rule="paper", retention=PAPER_RETENTION, **PAPER_RANKING)
    levels = mixed.with_(levels=(8, 4, 2, 0), speculate="critical")
    return [*_table(four, mixed, "critical"), BenchRow("cache + 8/4/2/0 + prefetch", levels)]


def _our_rows(place: Mapping[str, Any]) -> list[BenchRow]:
    four = RunSettings.uniform(4, eviction="lru-experts", **place)
    mixed = four.with_(levels=(4, 2), exact=False, retention=PAPER_RETENTION, critical="ceil")
    own = RunSettings()
    ours = mixed.with_(eviction=own.eviction, critical=own.critical, speculate="auto", in_place=own.in_place)
    return [
        *_table(four, mixed, "full"),
        BenchRow("ours: exact 4, planes", RunSettings.uniform(4, speculate="auto")),
        BenchRow("ours: 4/2, planes", ours),
        BenchRow("ours: 8/4/2/0, planes", ours.with_(levels=(8, 4, 2, 0))),
    ]


def _with(settings: RunSettings, changes: Mapping[str, Any]) -> RunSettings:
    """A row's settings, with the given settings that have an effect on it."""
    without = RANKING if len(settings.scheduled) == 1 else () if 0 in settings.levels else ("renormalise",)
    return settings.with_(**{name: value for name, value in changes.items() if name not in without})
