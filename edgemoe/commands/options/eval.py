"""Options of `edgemoe eval` alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgemoe.models.options.declared import one_of, option
from edgemoe.models.options.settings import complete_levels

TASK_COUNT = 20
"""Default of --task-count."""


@dataclass(frozen=True)
class MeasureOptions:
    """Options of the measurement."""

    text: list[Path] | None = option(
        "UTF-8 text for perplexity, KL and top-1 agreement; repeat for --study hotness."
    )
    reference: Path | None = option(
        "Checkpoint of the bf16 model to compare with, run by transformers. "
        "Default: the demo model where that is measured, else none."
    )
    levels: list[str] | None = option(
        "A setting, as in 4/2; repeat for more. Default: 8, 4, 4/2 and 8/4/2/0.",
        autocompletion=complete_levels,
    )
    retention: list[float] | None = option(
        "Mean share of critical experts, above 0, at most 1; repeat for more. Default: 0.9."
    )
    bits: list[float] | None = option(
        "Mean bits per weight of settings of three or more levels, instead of their retention; repeat for more."
    )
    policy: str | None = option(
        "hotness: two levels such as 4/2 follow how much experts are wanted (DynaExq) instead of --retention; of new "
        "tokens only, one by one. Steps wait until experts have moved, so that rows can be repeated. Default: dymoe.",
        autocompletion=one_of("dymoe", "hotness"),
    )
    compensate: list[int] | None = option(
        "Settings once more with so many experts of a token compensated (edgemoe compensate), where they have the "
        "level that the store's compensators are of; repeat for more."
    )
    tokens: int | None = option("Most tokens of the text. Default: 1024.", min=2)
    window: int | None = option(
        "Tokens of a window of the text, each run alone; above 512, up to the model's context or 4,096, on a CPU "
        "without --vram-limit. Default: 512.",
        min=2,
    )
    batch: list[int] | None = option(
        "Windows of the text that are decoded together, a token of each in a step; repeat for more. Every setting, "
        "and --study lynx, has a row for each number, of new tokens alone. --tokens must give a multiple of so many "
        "windows. Default: 1.",
        min=1,
    )
    tasks: bool = option(
        "Run the demo's chat tasks, and print their accuracy by kind.",
        False,
    )
    task_count: int | None = option(
        f"Held-out chat tasks of each kind, for every row of the table. Default: {TASK_COUNT}.", min=0
    )
    study: list[str] | None = option(
        "papers-table: levels 8, 4, 2, 4/2, 4/0, 8/4 and 8/4/2/0, each at a retention of 0.75, 0.9 and 1, instead of "
        "the short list. Rows after it: signals, depth, critical or skipping; lynx (windows decoded together, whose "
        "tokens agree on experts), lynx-sensitivity (a part of these may change) or lynx-tasks (chat tasks answered "
        "together); residency (with a cache, resident experts first); cache-front (with caches of three sizes, absent "
        "experts skipped or replaced, next to levels by damage) or cache-front-dram (with a second tier too); "
        "static-levels (one level for each expert or layer, whatever the token); compensation (low-rank compensators, "
        "made of --reference, of a part of a token's experts, next to levels of as many bits); layers (of "
        "--reference, one at 2 bits, the rest in bf16); routing (experts' loads by heavy hitters and by all tokens); "
        "similarity (of adjacent layers' router inputs); hotness (hot sets of several texts, and their KL) or "
        "hotness-change (KL after one text gives way to another). Repeat for more.",
        autocompletion=one_of(
            *(
                "papers-table",
                "signals",
                "depth",
                "critical",
                "skipping",
                "lynx",
                "lynx-sensitivity",
                "lynx-tasks",
            ),
            *(
                "residency",
                "cache-front",
                "cache-front-dram",
                "static-levels",
                "compensation",
                "layers",
                "routing",
                "similarity",
                "hotness",
                "hotness-change",
            ),
        ),
    )
    reuse: bool = option(
        "Mixed settings once more, with higher planes used where they are resident; "
        "their decode rows run token by token.",
        False,
    )
    plot: Path | None = option(
        "Draw KL to --reference against bits read into this PNG; of --study routing, the loads into NAME-routing.png "
        "next to it; of --study cache-front, KL against bits from disk into NAME-cache-front.png."
    )
    seed: int = option("Seed of everything random.", 0)
