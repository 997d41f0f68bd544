"""Compares the speed that `edgemoe plan` expects with what `edgemoe bench` measured, at the rates of the same run.

    edgemoe bench --synthetic w1 --vram-limit 3GB --json >3GB.json
    python -m tools.timing.expected STORE 3GB.json ...

Prints a row for each row of the reports: the limit, levels, the share of the experts that fits, hits, and tokens per
second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgemoe.console.sizes import format_size
from edgemoe.models.plans.expected import Expected, expected_speed, speed_text
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings, parse_levels
from edgemoe.speed.rates import Rates
from tools.command_line import make_parser


def expected_of(store: StoreModel, row: dict[str, Any]) -> Expected:
    """The speed that a plan expects of a row's setting, at the rates that its run measured.

    Args:
        store: the store of the report.
        row: a row of the JSON of `edgemoe bench`.
    """
    chosen = {name: row[name] for name in ("retention", "bits") if row[name] is not None}
    settings = RunSettings(levels=parse_levels(row["levels"]), exact=row["exact"], **chosen)
    limits = {f"{tier}_limit": row[f"{tier}_limit_bytes"] for tier in ("vram", "dram")}
    plan = store.plan(**limits, settings=settings, context=row["plan"]["context"])
    return expected_speed(store, plan, settings, Rates(**row["bandwidth"]))


def rows(store: StoreModel, reports: Sequence[Path]) -> Iterator[list[str]]:
    """Yields the cells of each row of the reports."""
    for path in reports:
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            made = expected_of(store, row)
            hits = " to ".join(f"{100 * end:.0f}" for end in made.hit_rate)
            measured = 1 / row["tpot_s"]["mean"]
            yield [
                *(
                    format_size(row["vram_limit_bytes"]),
                    row["setting"],
                    row["arm"],
                    f"{100 * made.fitting:.0f} %",
                ),
                *(f"{hits} %", f"{100 * row['hit_rate']['vram']:.0f} %"),
                *(speed_text(made.tok_s), f"{measured:.1f}"),
            ]


HEAD = ("limit", "setting", "arm", "fits", "hits expected", "hits", "tok/s expected", "tok/s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table of some reports."""
    parser = make_parser("tools.timing.expected", __doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("reports", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    store = StoreModel.open(given.store)
    for cells in [HEAD, ["---"] * len(HEAD), *rows(store, given.reports)]:
        print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
