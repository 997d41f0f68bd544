"""Writes the table of docs/models.md that shows what published models take, and how much of them common memory holds.

    python -m tools.plan_table            rewrites the table
    python -m tools.plan_table --print    prints the table

The models of edgemoe/models/published/sizes.py are planned as `edgemoe plan NAME` and `edgemoe pull NAME
--dry-run` do, without weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgemoe.models.plans.what_fits import RAM, SHARE_LEVEL, VRAM, Part, WhatFits
from edgemoe.models.published.announced import announced_checkpoint
from edgemoe.models.published.sizes import PUBLISHED
from tools.checkout import ROOT
from tools.command_line import make_parser

DOCS = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- plans -->\n", "<!-- end of plans -->"

_GB = 10**9


def row(name: str) -> list[str]:
    """A model's cells: its name, three sizes in GB, and a part for each size of memory."""
    fits = WhatFits.of_checkpoint(announced_checkpoint(name))
    sizes = (fits.download_bytes or 0, fits.store_bytes, fits.smallest_limit)
    parts = map(_cell, [*fits.vram.values(), *fits.ram.values()])
    return [name, *(f"{size / _GB:.1f}" for size in sizes), *parts]


def _cell(part: Part) -> str:
    """A part in few letters."""
    if not part.percent:
        return "-"
    if part.percent < 100:
        return f"{part.percent} %"
    return "all" if part.level == SHARE_LEVEL else f"all, {part.level} bits"


def table() -> str:
    """The table as Markdown."""
    sizes = ["Download, GB", "Store, GB", "Smallest limit, GB"]
    memory = [f"{gb} GB {kind}" for kind, row in (("VRAM", VRAM), ("RAM", RAM)) for gb in row]
    head = ["Model", *sizes, *memory]
    lines = [head, ["---"] * len(head), *map(row, PUBLISHED)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def rewritten(text: str) -> str:
    """Replaces the table between the marks of a document.

    Raises:
        SystemExit: a mark is missing.
    """
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(
            f"tools.plan_table: expected {BEGIN.strip()} and {END} in {DOCS}, got none: add both"
        )
    return f"{before}{BEGIN}{table()}{END}{after}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("tools.plan_table", __doc__)
    parser.add_argument("--print", action="store_true", help="print the table, change no file")
    if parser.parse_args(argv).print:
        print(table(), end="")
    else:
        DOCS.write_text(rewritten(DOCS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
