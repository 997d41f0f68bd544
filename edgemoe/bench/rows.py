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
        settings: its own.
        dram_on_demand: whether loading on demand has the second tier, which is a cache, all the same.
    """

    name: str
    settings: RunSettings
    dram_on_demand: bool = False


def single_row(settings: RunSettings) -> tuple[BenchRow, ...]:
    """One row, named for its settings."""
    return (BenchRow(settings.name, settings),)


def ablation_rows(max_level: int) -> tuple[tuple[BenchRow, ...], tuple[str, ...]]:
    """The rows of DyMoE table 3 at a base of 4 bits, and this program's own beside them.

    The table's rows evict whole experts and prefetch all that the prediction asks for, as the paper does; "ours"
    evict planes by the default rule and prefetch as far as it pays. Readers, kernel and parallelism are the same in
    every row. With several levels, planes that are there are used (conservative reuse), as the paper's cache does.

    Args:
        max_level: of the store.

    Returns:
        the rows, and a sentence for each row that this store cannot run.
    """
    four = RunSettings.uniform(4, eviction="lru-experts")
    mixed = four.with_(levels=(4, 2), exact=False, retention=PAPER_RETENTION)
    ours = mixed.with_(eviction=RunSettings().eviction, speculate="auto")
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
    left_out = []
    name = "ours: 8/4/2/0, planes"
    if max_level >= 8:
        rows.append(BenchRow(name, ours.with_(levels=(8, 4, 2, 0))))
    else:
        left_out.append(f"{name}: left out, the store's highest level is {max_level}")
    return tuple(rows), tuple(left_out)
