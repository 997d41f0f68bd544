"""What a benchmark compares: named settings; among them the rows of an ablation."""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.policy.settings import RunSettings

PAPER_RETENTION = 0.75
"""Mean retention of the rows with several levels."""


@dataclass(frozen=True)
class BenchRow:
    """A row of the table.

    Args:
        name: in the table.
        settings: of the engine.
        dram_on_demand: keep the DRAM tier, which is a cache, also where the settings load on demand.
    """

    name: str
    settings: RunSettings
    dram_on_demand: bool = False


def single_row(settings: RunSettings) -> tuple[BenchRow, ...]:
    """Returns one row, named for its settings."""
    return (BenchRow(settings.name, settings),)


def ablation_rows(max_level: int) -> tuple[tuple[BenchRow, ...], tuple[str, ...]]:
    """Returns the rows of DyMoE table 3 at a base of 4 bits, and this program's own beside them.

    The table's rows evict whole experts, prefetch every predicted expert and round the number of critical experts up,
    as the paper does; "ours" evict planes and round by the default rules and prefetch while that pays. Readers, kernel
    and parallelism are the same in every row. Rows with several levels use resident planes above the scheduled level
    (conservative reuse), as the paper's cache does.

    Args:
        max_level: highest level of the store, in bits.

    Returns:
        the rows, and a sentence for each row that this store cannot run.
    """
    four = RunSettings.uniform(4, eviction="lru-experts")
    mixed = four.with_(levels=(4, 2), exact=False, retention=PAPER_RETENTION, critical="ceil")
    own = RunSettings()
    ours = mixed.with_(eviction=own.eviction, critical=own.critical, speculate="auto")
    rows = [
        BenchRow("load on demand", four.with_(cache=False)),
        BenchRow("cache", four),
        BenchRow("cache + prefetch", four.with_(speculate="full")),
        BenchRow("cache + 4/2", mixed),
        BenchRow("cache + 4/2 + prefetch", mixed.with_(speculate="full")),
        BenchRow("cache + 4/0 + prefetch", mixed.with_(levels=(4, 0), speculate="full")),
        BenchRow("ours: exact 4, planes", RunSettings.uniform(4, speculate="auto")),
        BenchRow("ours: 4/2, planes", ours),
    ]
    name = "ours: 8/4/2/0, planes"
    if max_level < 8:
        return tuple(rows), (f"{name}: left out, the store's highest level is {max_level}",)
    return (*rows, BenchRow(name, ours.with_(levels=(8, 4, 2, 0)))), ()
