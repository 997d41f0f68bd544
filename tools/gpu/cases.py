"""The cases of tools.gpu.bench: rows under the same limits, and which of them --only chooses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from edgemoe.bench.rows import PAPER_RETENTION, BenchRow
from edgemoe.console.sizes import format_size
from edgemoe.errors import UserError
from edgemoe.policy.settings import RunSettings

FOUR = RunSettings.uniform(4, speculate="auto")
MIXED = RunSettings(levels=(4, 2), retention=PAPER_RETENTION, speculate="auto")
OFFLOAD = "accelerate's offload"
"""Name of the peer, which is no row of edgemoe's."""

ON_DEMAND = RunSettings.uniform(4, cache=False)

TIERED = (
    BenchRow("exact 4", FOUR),
    BenchRow("4/2 + prefetch", MIXED),
    BenchRow("exact 4, copied first", FOUR.with_(in_place="off")),
    BenchRow("4/2 + prefetch, copied first", MIXED.with_(in_place="off")),
    BenchRow("4/0 + prefetch", MIXED.with_(levels=(4, 0))),
)
RESIDENT = (BenchRow("exact 4", RunSettings.uniform(4)),)
LOADED = (
    BenchRow("on demand from DRAM", ON_DEMAND, dram_on_demand=True),
    BenchRow("on demand from SSD", ON_DEMAND),
)


@dataclass(frozen=True)
class Case:
    """Rows under the same limits.

    Args:
        name: prefix of the rows' names in the report.
        rows: the rows, at least one.
        vram: limit of GPU memory in bytes; None: as much as the fully resident model needs.
        dram: limit of DRAM in bytes.
    """

    name: str
    rows: tuple[BenchRow, ...]
    vram: int | None
    dram: int


def cases(limits: Sequence[int], dram_large: int, dram_small: int) -> Iterator[Case]:
    """Yields every case, the ones with the most to say first."""
    least, *more = sorted(limits)
    yield Case(limits_name(least, "DRAM large"), TIERED, least, dram_large)
    yield Case("everything resident", RESIDENT, None, 0)
    from_dram, from_ssd = LOADED
    yield Case(limits_name(least, "DRAM large"), (from_dram,), least, dram_large)
    yield Case(limits_name(least, "DRAM small"), TIERED[:2], least, dram_small)
    for limit in more:
        yield Case(limits_name(limit, "DRAM large"), TIERED[:2], limit, dram_large)
    yield Case(limits_name(least, "DRAM large"), (from_ssd,), least, dram_large)


def limits_name(limit: int, dram: str) -> str:
    """Names a case by its limit of GPU memory, in bytes, and its DRAM tier."""
    return f"{format_size(limit)}, {dram}"


def is_chosen(name: str, only: Sequence[str]) -> bool:
    """Whether a row's name has one of the texts of --only, from the beginning of a word on, or there are no texts."""
    return not only or any(f" {text}" in f" {name}" for text in only)


def choose(cases: Iterable[Case], only: Sequence[str]) -> tuple[list[Case], list[str]]:
    """Returns the cases with the rows that --only chooses, and the names of the other rows."""
    chosen, others = [], []
    for case in cases:
        rows = tuple(row for row in case.rows if is_chosen(f"{case.name}: {row.name}", only))
        chosen += [replace(case, rows=rows)] if rows else []
        others += [f"{case.name}: {row.name}" for row in case.rows if row not in rows]
    return chosen, others


def require_a_row(limits: Sequence[int], only: Sequence[str]) -> None:
    """Raises UserError, with every name, where --only chooses nothing."""
    chosen, others = choose(cases(limits, 0, 0), only)
    if not chosen and not is_chosen(OFFLOAD, only):
        names = "; ".join([*others, OFFLOAD])
        raise UserError(f"a text of these names for --only: {names}", ", ".join(only), "name one of them")
